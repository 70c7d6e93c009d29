"""Attempts are counted when they begin, whatever their outcome."""

import os
import threading
from pathlib import Path

from storage import layout
from storage.backends.root import Root
from storage.unfinished import begin
from tasks.stages.names import Stage
from tests.storage.flaky import flaky_root


def flushes(monkeypatch) -> list[str]:
    """Files and folders flushed from now on."""
    found: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    return found


def attempt(root: Root, writer: str = "host:1", stage: Stage = Stage.TRAIN) -> int:
    return begin(root, "run", 3, stage, writer)


def test_each_attempt_knows_how_many_came_before(any_root):
    assert [attempt(any_root, f"host:{number}") for number in range(3)] == [0, 1, 2]
    assert attempt(any_root, stage=Stage.REWARD) == 0
    assert any_root.keys("run")[-1] == "run/manifests/000003/train.r0.attempt-2.json"


def test_attempts_are_told_from_manifests_and_pieces(root):
    attempt(root)
    (key,) = root.keys("run")
    assert (layout.is_attempt(key), layout.is_manifest(key), layout.is_piece(key)) == (True, False, False)
    assert layout.stage_of(key) == layout.manifest_key("run", 3, Stage.TRAIN, 0)
    piece = layout.piece_key("run", 3, Stage.TRAIN, 0, "00000-abc.def")
    assert (layout.is_attempt(piece), layout.is_piece(piece)) == (False, True)
    assert layout.stage_of(piece) == layout.manifest_key("run", 3, Stage.TRAIN, 0)


def test_an_attempt_of_a_run_with_a_similar_name_is_known():
    key = "a.r0.attempt-b/manifests/000003/train.r0.attempt-1.json"
    assert layout.is_attempt(key)
    assert layout.stage_of(key) == layout.manifest_key("a.r0.attempt-b", 3, Stage.TRAIN, 0)


def test_attempts_at_one_moment_have_numbers_of_their_own(root):
    barrier, numbers = threading.Barrier(4), []

    def work(name):
        barrier.wait()
        numbers.append(attempt(root, name))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [0, 1, 2, 3]


def test_nobody_waits_for_the_disk_on_its_account(root, monkeypatch):
    flushed = flushes(monkeypatch)
    attempt(root)
    attempt(root)
    assert flushed == []


def test_the_folders_that_it_made_are_flushed_with_the_next_manifest(root, monkeypatch):
    flushed = flushes(monkeypatch)
    attempt(root)
    root.put_if_absent(layout.manifest_key("run", 3, Stage.TRAIN, 0), b"content")
    folders = [one for one in flushed if layout.TEMPORARY_PREFIX not in one]
    made = [f"{root.folder}/run/manifests", f"{root.folder}/run", str(root.folder), str(root.folder.parent)]
    # above the root too, once: a process that was killed may have made those
    above = [str(one) for one in root.folder.parent.parents]
    assert folders[:4] == made, "the names of the new folders"
    assert set(folders[4:-1]) <= set(above)
    assert folders[-1] == f"{root.folder}/run/manifests/000003", "then the manifest's"
    assert layout.TEMPORARY_PREFIX in flushed[0], "what is decided by is flushed before it has its name"
    flushed.clear()
    root.put_if_absent(layout.manifest_key("run", 3, Stage.REWARD, 0), b"content")
    assert len(flushed) == 2


def test_a_lost_answer_is_no_other_attempt():
    assert attempt(flaky_root(["lost reset"])) == 0


def test_a_damaged_record_stops_nobody(root):
    attempt(root)
    root.replace(layout.attempt_key("run", 3, Stage.TRAIN, 0, 0), b"damaged")
    assert attempt(root, "host:2") == 1
