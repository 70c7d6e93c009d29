"""Checks of the promises of a backend, which anybody can run against theirs.

    python -m storage.backends.conformance URL

writes below URL, which should be empty, and removes what it has written. The exit code is 0 if each check passes."""

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from storage.backends.root import Root, open_root
from storage.errors import NotCommitted, RatchetError, StorageError

FOLDER = "conformance"
_SLEEP_S = 1.1  # some clocks of stores have a resolution of one second
_MANY = 1_100  # more than one page of a listing of S3


class NotConforming(StorageError):
    """A backend does something else than it must."""


def keeps_what_was_written(root: Root) -> None:
    """Each way to read returns the content that was written, whole."""
    content = bytes(range(256)) * 20_000
    _require(root.put_if_absent(_key("a"), content), "a first write reports that the key was taken")
    with tempfile.TemporaryDirectory() as folder:
        root.download(_key("a"), Path(folder, "file"))
        file = Path(folder, "file").read_bytes()
    found = {root.read_bytes(_key("a")), root.read_buffer(_key("a")).to_pybytes(), file}
    _require(found == {content}, "the content that is read differs from the content that was written")


def refuses_a_taken_key(root: Root) -> None:
    """A second write under a key is refused and changes nothing, also that of a file."""
    root.put_if_absent(_key("a"), b"first")
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate((b"first", b"second")):
            file = Path(folder, str(number))
            file.write_bytes(content)
            taken = root.put_if_absent(_key("a"), content) or root.put_file_if_absent(_key("a"), file)
            _require(not taken, "a second write under a key succeeds: two writers would overwrite each other")
        Path(folder, "new").write_bytes(b"of a file")
        _require(root.put_file_if_absent(_key("b"), Path(folder, "new")), "a file is not stored")
    _require((root.read_bytes(_key("a")), root.read_bytes(_key("b"))) == (b"first", b"of a file"), "a write is lost")


def lets_one_of_several_writers_win(root: Root) -> None:
    """Exactly one of eight writers at once succeeds, and its content is there."""
    for number in range(20):
        key, barrier, won = _key(f"race/{number}"), threading.Barrier(8), []

        def write(name: bytes, key: str = key, barrier: threading.Barrier = barrier, won: list[bytes] = won) -> None:
            barrier.wait()
            if root.put_if_absent(key, name * 1000):
                won.append(name)

        threads = [threading.Thread(target=write, args=(bytes([65 + one]),)) for one in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _require(len(won) == 1, f"{len(won)} of eight writers of one key succeed")
        _require(root.read_bytes(key) == won[0] * 1000, "the content is not that of the writer that succeeded")


def tells_absence(root: Root) -> None:
    """An object that is not there is FileNotFoundError, None, or in no listing; removing it twice does no harm."""
    for read in (root.read_bytes, root.read_buffer, lambda key: root.copy(key, _key("b"))):
        try:
            read(_key("nothing"))
        except NotCommitted:
            continue
        raise NotConforming("reading or copying an object that is not there succeeds")
    _require(root.info(_key("nothing")) is None, "an object that is not there has a size")
    _require(root.keys(f"{FOLDER}/nothing") == [], "a folder that is not there is not empty")
    root.put_if_absent(_key("a"), b"content")
    for _ in range(2):
        root.remove(_key("a"))
    _require(not root.exists(_key("a")), "an object that was removed is there")


def lists_at_once(root: Root) -> None:
    """A listing has each object below the folder as soon as it is written, with its size, and no other."""
    for number in range(_MANY):
        root.put_if_absent(_key(f"many/{number:04d}/x"), b"x" * (number % 7 + 1))
    root.put_if_absent(_key("many2/a"), b"beside")
    found = root.stored(f"{FOLDER}/many")
    wanted = [(_key(f"many/{number:04d}/x"), number % 7 + 1) for number in range(_MANY)]
    _require([(one.key, one.bytes) for one in found] == wanted, f"{len(found)} of {_MANY} new objects are listed")
    _require(root.folders(f"{FOLDER}/many") == [f"{number:04d}" for number in range(_MANY)], "folders are missing")
    _require(root.folders(FOLDER) == ["many", "many2"], "folders of another level are listed")
    root.remove(_key("many/0000/x"))
    _require(len(root.keys(f"{FOLDER}/many")) == _MANY - 1, "an object that was removed is listed")


def replaces(root: Root) -> None:
    """A replaced object has the new content, whether it was there or not."""
    for content in (b"first", b"second and longer", b"third"):
        root.replace(_key("a"), content)
        _require(root.read_bytes(_key("a")) == content, "a replaced object is read with its former content")


def copies(root: Root) -> None:
    """A copy within the store outlives its original, may be repeated, and its original outlives it."""
    root.put_if_absent(_key("a"), b"content")
    for _ in range(2):
        root.copy(_key("a"), _key("copies/b"))
    root.copy(_key("copies/b"), _key("copies/c"))
    root.remove(_key("a"))
    root.remove(_key("copies/c"))
    root.replace(_key("copies/d"), b"beside")
    _require(root.read_bytes(_key("copies/b")) == b"content", "a copy does not outlive its original")


def tells_ages(root: Root) -> None:
    """An object has a time, with a time zone, that `touch` makes later without changing the content."""
    root.put_if_absent(_key("a"), b"content")
    before = root.info(_key("a"))
    time.sleep(_SLEEP_S)
    _require(root.touch(_key("a")), "an object cannot be touched")
    after = root.info(_key("a"))
    _require(before is not None and after is not None and before.modified.tzinfo is not None, "an object has no time")
    assert before is not None
    assert after is not None
    _require(after.modified > before.modified, "an object that was touched is as old as before")
    _require(root.stored(FOLDER) == [after] and root.read_bytes(_key("a")) == b"content", "touching changes an object")


CHECKS: tuple[Callable[[Root], None], ...] = (
    keeps_what_was_written, refuses_a_taken_key, lets_one_of_several_writers_win, tells_absence, lists_at_once,
    replaces, copies, tells_ages,
)  # fmt: skip
"""Each raises an error that names what is wrong."""


def check(root: Root, one: Callable[[Root], None]) -> None:
    """Do one check, and remove what it has written. Raises NotConforming if the backend does something else."""
    try:
        one(root)
    finally:
        for key in root.keys(FOLDER):
            root.remove(key)
        root.remove_empty(FOLDER)


def main(url: str) -> int:
    root, failed = open_root(url), 0
    for one in (Root.check_writable, *CHECKS):
        try:
            check(root, one)
        except RatchetError as error:
            failed += 1
            sys.stdout.write(f"FAILED {one.__name__}: {error}\n")
        else:
            sys.stdout.write(f"passed {one.__name__}\n")
    return min(failed, 1)


def _key(name: str) -> str:
    return f"{FOLDER}/{name}"


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotConforming(otherwise)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
