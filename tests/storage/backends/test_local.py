"""Local files: content and names reach the disk before anything is published, whichever process wrote them."""

import os
from pathlib import Path

import pytest

from storage.backends import local
from storage.backends.root import open_root
from tests.storage.forks import Forks

MANIFEST = "manifests/000001/train.r0.json"


@pytest.fixture(scope="module")
def process():
    """Start a process of `tests.storage.flushes`; returns the events that it reports, as (call, path)."""
    forks = Forks("tests.storage.flushes")

    def ended(url, kill, *steps):
        found = forks.run(url, kill, *steps)
        assert found.returncode == (0 if kill == "-" else -9), found.stderr
        return [tuple(line.split(" ", 1)) for line in found.stdout.splitlines()]

    yield ended
    forks.close()


def chain(folder, top):
    """A folder and those above it, `top` included."""
    return {str(one) for one in (folder, *folder.parents) if one.is_relative_to(top)}


@pytest.fixture
def calls(monkeypatch):
    """Inodes that this process flushes and links, in order."""
    made, fsync, link = [], os.fsync, os.link

    def noted_fsync(descriptor):
        fsync(descriptor)
        made.append(("fsync", os.fstat(descriptor).st_ino))

    def noted_link(source, target):
        link(source, target)
        made.append((f"link {Path(target).name}", Path(target).stat().st_ino))

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted_link)
    return made


@pytest.mark.parametrize("way", ["bytes", "file", "copied file"])
def test_content_is_flushed_before_its_name_is_there_and_then_the_name(tmp_path, calls, way):
    root = open_root(str(tmp_path / "runs"))
    source = tmp_path / "source"
    source.write_bytes(b"content")
    if way == "copied file":  # it has another name, so it is copied
        os.link(source, tmp_path / "other")
    if way == "bytes":
        assert root.put_if_absent("run/parts/part", b"content")
    else:
        assert root.put_file_if_absent("run/parts/part", source)
    stored = tmp_path / "runs" / "run" / "parts"
    linked = calls.index(("link part", (stored / "part").stat().st_ino))
    before, after = calls[:linked], calls[linked + 1 :]
    assert ("fsync", (stored / "part").stat().st_ino) in before
    assert {("fsync", one.stat().st_ino) for one in (tmp_path, *stored.parents[:2])} <= set(before)
    assert ("fsync", stored.stat().st_ino) in after


def test_a_copy_is_flushed_with_its_folders(tmp_path, calls):
    root = open_root(str(tmp_path / "runs"))
    root.put_if_absent("run/parts/part", b"content")
    root.copy("run/parts/part", "child/parts/part")
    copied = tmp_path / "runs" / "child" / "parts"
    linked = [number for number, (call, _) in enumerate(calls) if call == "link part"]
    after = calls[linked[-1] :]
    assert {("fsync", one.stat().st_ino) for one in (copied, copied.parent, copied.parents[1])} <= set(after)


def test_a_replaced_file_is_flushed_with_its_name(tmp_path, calls):
    open_root(str(tmp_path)).replace("run/report/table.md", b"content")
    report = tmp_path / "run" / "report"
    assert calls[0] == ("fsync", (report / "table.md").stat().st_ino)
    assert calls[-1] == ("fsync", report.stat().st_ino)


def test_a_record_for_people_costs_no_flush(tmp_path, calls):
    root = open_root(str(tmp_path))
    assert root.put_if_absent("run/attempt", b"content", durable=False)
    assert not root.put_if_absent("run/attempt", b"content", durable=False)
    assert not [call for call, _ in calls if call == "fsync"]


@pytest.mark.parametrize("way", ["part", "file"])
def test_the_name_of_a_part_that_a_killed_process_linked_is_flushed_before_a_manifest_names_it(tmp_path, process, way):
    top = tmp_path / "new" / "runs"
    process(str(top), ".arrow", way)
    (part,) = top.rglob("*.arrow")
    second = process(str(top), "-", way, "1")
    published = second.index(("link", str(top / "run" / MANIFEST)))
    flushed = {path for call, path in second[:published] if call == "fsync"}
    assert chain(part.parent, tmp_path) <= flushed


def test_the_name_of_a_manifest_that_a_killed_process_linked_is_flushed_before_another_rests_on_it(tmp_path, process):
    top = tmp_path / "new" / "runs"
    process(str(top), "000000/train.r0.json", "0")
    assert (top / "run" / "manifests" / "000000" / "train.r0.json").exists()
    second = process(str(top), "-", "hold", "1")
    published = second.index(("link", str(top / "run" / MANIFEST)))
    flushed = {path for call, path in second[:published] if call == "fsync"}
    assert chain(top / "run" / "manifests" / "000000", tmp_path) <= flushed


def test_a_folder_that_was_removed_and_made_again_is_flushed_again(tmp_path, calls):
    root = open_root(str(tmp_path))
    root.put_if_absent("run/parts/one", b"content")
    for path in ("one", ""):
        target = tmp_path / "run" / "parts" / path
        target.unlink() if path else target.rmdir()
    calls.clear()
    root.put_if_absent("run/parts/one", b"content")
    assert ("fsync", (tmp_path / "run").stat().st_ino) in calls


def test_what_a_process_has_flushed_once_it_does_not_flush_again(tmp_path, calls):
    root = open_root(str(tmp_path))
    root.put_if_absent("run/parts/one", b"content")
    calls.clear()
    root.put_if_absent("run/parts/two", b"content")
    assert [call for call, _ in calls] == ["fsync", "link two", "fsync"], "the file, and the folder for its name"


def test_a_folder_that_another_has_made_and_flushed_meanwhile_is_not_flushed_again(tmp_path, calls, monkeypatch):
    """Else the flushes of threads that write into one new folder depend on how they take turns."""
    root, exists, others = open_root(str(tmp_path)), Path.exists, ["run/parts/one"]

    def exists_until_now(path):
        there = exists(path)
        if not there and others and path.name == "parts":
            root.put_if_absent(others.pop(), b"content")
            calls.clear()
        return there

    monkeypatch.setattr(Path, "exists", exists_until_now)
    root.put_if_absent("run/parts/two", b"content")
    assert [call for call, _ in calls] == ["fsync", "link two", "fsync"], "the file, and the folder for its name"


def test_a_listing_that_fails_is_no_empty_listing(tmp_path):
    (tmp_path / "file").touch()
    assert [entry.name for entry in local.files(tmp_path)] == ["file"]
    assert list(local.files(tmp_path / "nothing")) == []
    with pytest.raises(NotADirectoryError):
        list(local.files(tmp_path / "file"))


@pytest.mark.parametrize(
    ("first", "kill", "step", "folder"),
    [
        ((), "rerun-000001.json", "rerun", "revisions"),
        (("rerun",), "head-000001.json", "choice", "revisions"),
        (("0", "2", "3", "4"), "000001/train.r0.json", "1", "manifests/000001"),
    ],
    ids=["rerun", "choice", "an early iteration done again"],
)
def test_whatever_a_killed_process_linked_is_flushed_before_something_rests_on_it(
    tmp_path, process, first, kill, step, folder
):
    top = tmp_path / "runs"
    process(str(top), "-", *first)
    process(str(top), kill, step)
    second = process(str(top), "-", "hold", "9")
    published = second.index(("link", str(top / "run" / "manifests/000009/train.r0.json")))
    flushed = {path for call, path in second[:published] if call == "fsync"}
    assert chain(top / "run" / folder, tmp_path) <= flushed
