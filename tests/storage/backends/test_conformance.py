"""The conformance checks pass on our backends and on the example, and name the fault of a backend that fails."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from storage.backends import conformance
from storage.backends.backend import Backend, Stored
from storage.backends.conformance import CHECKS, check
from storage.backends.root import Root, open_root
from storage.errors import InputError, RatchetError, StorageUnavailable
from tests.storage.conftest import EXAMPLE

BY_NAME = {one.__name__: one for one in CHECKS}
RACE = "lets_one_of_several_writers_win"  # left out for S3: moto cannot arbitrate between writers


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != RACE])
def test_each_backend_passes_each_check(any_root, name, monkeypatch):
    if any_root.url.startswith("s3"):
        monkeypatch.setattr(conformance, "_MANY", 20)  # a request each
    check(any_root, BY_NAME[name])
    assert any_root.keys("") == []


@pytest.mark.parametrize("url", ["{}/runs", f"{EXAMPLE}://{{}}/runs.db"], ids=["file", "sqlite"])
def test_one_of_several_writers_wins(tmp_path, url):
    root = open_root(url.format(tmp_path))
    check(root, BY_NAME[RACE])
    assert root.keys("") == []


class InMemory(Backend):
    """The six required methods and no more, with a fault if one is named."""

    def __init__(self, fault=""):
        self.fault, self.objects, self.listed = fault, {}, {}

    def put_if_absent(self, key, data, durable):
        if key in self.objects and self.fault != "no condition":
            return False
        if self.fault != "lost write":
            self.replace(key, bytes(data)[: len(data) - (self.fault == "torn")])
        return None if self.fault == "no result" else True

    def replace(self, key, data):
        self.listed = dict(self.objects)
        if not (self.fault == "no replacement" and key in self.objects):
            self.objects[key] = bytes(data), datetime.now(UTC)

    def read(self, key):
        if key not in self.objects:
            if self.fault == "absence is empty":
                return b""
            raise FileNotFoundError(key)
        return self.objects[key][0]

    def remove(self, key):
        del self.objects[key]

    def info(self, key):
        if key not in self.objects:
            return None
        data, time = self.objects[key]
        if self.fault == "pairs":
            return key, len(data)
        return Stored(key, len(data), datetime.min.replace(tzinfo=UTC) if self.fault == "no ages" else time)

    def stored(self, prefix):
        start = prefix if self.fault == "other folders" or not prefix else f"{prefix}/"
        there = self.listed if self.fault == "late listing" else self.objects
        return [Stored(key, len(data), time) for key, (data, time) in dict(there).items() if key.startswith(start)]


class Forgiving(InMemory):
    def remove(self, key):
        if key not in self.objects:
            raise FileNotFoundError(key)
        super().remove(key)


def test_a_backend_of_six_methods_passes(tmp_path):
    root = Root("mine://here", Forgiving())
    root.check_writable()
    for one in CHECKS:
        if one.__name__ != "lets_one_of_several_writers_win":  # a dictionary without a lock
            check(root, one)


@pytest.mark.parametrize(
    ("fault", "found_by", "words"),
    [
        ("no condition", "refuses_a_taken_key", "two writers would overwrite each other"),
        ("lost write", "keeps_what_was_written", "not there"),
        ("torn", "keeps_what_was_written", "differs from the content that was written"),
        ("no replacement", "replaces", "read with its former content"),
        ("absence is empty", "tells_absence", "not there succeeds"),
        ("no ages", "tells_ages", "as old as before"),
        ("late listing", "lists_at_once", "folders of another level are listed"),
        ("other folders", "lists_at_once", "of 1100 new objects are listed"),
    ],
)
def test_a_faulty_backend_is_named(fault, found_by, words):
    root = Root("mine://here", Forgiving(fault))
    with pytest.raises(RatchetError, match=words):
        check(root, BY_NAME[found_by])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no condition", "ignores conditional writes"),
        ("lost write", "loses what is written"),
        ("torn", "loses or changes what is written"),
        ("late listing", "lists an object later than it was written"),
        ("no result", "loses or changes what is written: put_if_absent of b'ratchet' returns None"),
        ("pairs", r"describes an object as \('.*', 7\), not as Stored\("),
    ],
)
def test_the_start_refuses_a_faulty_backend_by_its_name(fault, words):
    with pytest.raises(StorageUnavailable, match=rf"mine://here \(Forgiving\) {words}") as refusal:
        Root("mine://here", Forgiving(fault)).check_writable()
    assert refusal.value.exit_code == 2


@pytest.mark.slow
def test_the_command_says_what_passed(tmp_path):
    command = [sys.executable, "-m", "storage.backends.conformance", f"{EXAMPLE}://{tmp_path}/runs.db"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.count("passed"), ended.stdout.count("FAILED")) == (0, 9, 0), ended


WHOLE = """\
from ratchet import Backend
class Whole(Backend):
    def __init__(self, url): self.url = url
    def put_if_absent(self, key, data, durable): ...
    def replace(self, key, data): ...
    def read(self, key): ...
    def remove(self, key): ...
    def info(self, key): ...
    def stored(self, prefix): ...

"""
MODULES = {
    "broken": ("import nothing_of_that_name", r"ModuleNotFoundError: .* \(mine.py, line 1\)"),
    "missing": ("Other = 1", "has no 'Mine'"),
    "number": ("Mine = 3", "'int' object is not callable"),
    "foreign": ("class Mine:\n    def __init__(self, url): pass", "Mine is not a subclass of storage.backends"),
    "partial": (
        "from storage.backends.backend import Backend\nclass Mine(Backend):\n    def read(self, key): return b''",
        "without an implementation for abstract methods 'info', 'put_if_absent'",
    ),
    "unlike": (
        f"{WHOLE}class Mine(Whole):\n    def read(self): ...",
        r"`def read\(self\)` \(mine.py, line 12\): expected `def read\(self, key\)`",
    ),
    "async": (
        f"{WHOLE}class Mine(Whole):\n    async def info(self, key): ...",
        r"`async def info.*line 12\): expected",
    ),
    "ends": ("raise SystemExit(3)", r"SystemExit: 3 \(mine.py, line 1\)"),
    "raising": (
        "class Mine:\n    def __init__(self, url):\n        raise ValueError('no')",
        r"ValueError: no \(mine.py, line 3\)",
    ),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_backend_that_cannot_be_used_is_refused_with_its_place(tmp_path, kind):
    text, words = MODULES[kind]
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=words):
        open_root(f"{tmp_path}/mine.py:Mine://here")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nowhere/mine.py:Mine://here", "there is no file .*/nowhere/mine.py"),
        ("no_such_package.module:Mine://here", "no_such_package"),
        ("s3://", "names no place"),
        (" ", "names no place"),
        (f"{EXAMPLE}:SQLite:/folder/runs.db", "names no place"),
        (f"{EXAMPLE}://relative.db", r"ValueError: .*not an absolute path.* \(backend.py, line "),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(url, words):
    with pytest.raises(InputError, match=words):
        open_root(url)


def test_an_error_of_a_backend_that_it_does_not_name_is_told_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text(f"{WHOLE}class Mine(Whole):\n    def info(self, key): return {{}}[key]\n")
    with pytest.raises(StorageUnavailable, match=r"fails at run: KeyError: 'run' \(mine.py, line 12\)\. Correct it"):
        open_root(f"{tmp_path}/mine.py:Mine://here").exists("run")


def test_a_backend_imports_the_files_beside_it(tmp_path):
    (tmp_path / "mine.py").write_text("from beside_the_store import Mine")
    (tmp_path / "beside_the_store.py").write_text(f"{WHOLE}Mine = Whole")
    assert open_root(f"{tmp_path}/mine.py:Mine://here").url.endswith("mine.py:Mine://here")


def test_a_root_of_a_file_is_the_same_from_each_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from infra.examples.backend import SQLite")
    monkeypatch.chdir(tmp_path)
    root = open_root(f"mine.py:SQLite://{tmp_path}/runs.db")
    assert root.url == f"{tmp_path}/mine.py:SQLite://{tmp_path}/runs.db"
    root.put_if_absent("key", b"content")
    assert open_root(root.url).read_bytes("key") == b"content"
    assert open_root(root.url).info("key").modified > datetime.now(UTC) - timedelta(minutes=1)
