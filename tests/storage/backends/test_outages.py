"""The client waits for a store in an outage; an object that it cannot look up is not taken for absent."""

import errno
import os
import threading

import pytest

from storage.errors import InputError, StorageInterrupted
from tests.storage.flaky import flaky_root


@pytest.mark.slow
def test_a_store_that_is_gone_for_a_while_is_waited_for(s3, s3_root, tmp_path):
    s3_root.put_if_absent("old", b"content")
    with s3.gone_for(1):
        assert s3_root.put_if_absent("key", b"content")
        assert s3_root.read_bytes("key") == b"content"
    for use in (
        lambda: s3_root.exists("old"),
        lambda: s3_root.read_bytes("old") == b"content",
        lambda: s3_root.keys("") == ["key", "old"],
        lambda: s3_root.download("old", tmp_path / "copy") is None,
        lambda: s3_root.folders() == [],
        lambda: s3_root.remove("key") is None,
    ):
        with s3.gone_for(0.3):
            assert use()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refused", "503"])
def test_a_store_that_stays_away_interrupts_and_its_state_is_unknown(s3, s3_root, how):
    s3_root.put_if_absent("key", b"content")
    root = s3_root.cap_patience(0.2)
    s3.stop() if how == "refused" else setattr(s3.faults, "away", True)
    try:
        for use in (
            lambda: root.put_if_absent("new", b"content"),
            lambda: root.exists("key"),
            lambda: root.exists("nothing"),
            lambda: root.read_bytes("key"),
            lambda: root.keys(""),
            lambda: root.folders(),
            lambda: root.uploads("run"),
            root.check_writable,
        ):
            with pytest.raises(StorageInterrupted) as end:
                use()
            assert end.value.exit_code == 1
    finally:
        s3.start() if how == "refused" else setattr(s3.faults, "away", False)
    assert root.exists("key")


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_a_failure_to_look_is_not_absence(root, monkeypatch, error):
    root.put_if_absent("run/key", b"content")
    impatient, failing = root.cap_patience(0.1), []

    def broken(call):
        def unless_ours(path, *arguments, **options):
            if str(path).startswith(str(root.folder)) and failing:
                raise OSError(error, os.strerror(error), str(path))
            return call(path, *arguments, **options)

        return unless_ours

    for name in ("stat", "scandir"):
        monkeypatch.setattr(os, name, broken(getattr(os, name)))
    for use in (
        lambda: impatient.exists("run/key"),
        lambda: impatient.exists("run/nothing"),
        lambda: impatient.keys("run"),
        impatient.folders,
        lambda: impatient.put_if_absent("run/key", b"other"),
    ):
        failing[:] = ["from now on"]
        with pytest.raises(StorageInterrupted):
            use()
        failing.clear()
    assert impatient.exists("run/key")
    threading.Timer(0.2, failing.clear).start()
    failing.append("for a moment")
    assert root.exists("run/key"), "tried again"


@pytest.mark.parametrize("fault", ["busy", "server error", "timeout", "reset"])
def test_passing_faults_pass(fault):
    root = flaky_root([fault, fault, "slow"], reading=[fault, fault])
    assert root.put_if_absent("key", b"content")
    assert root.read_bytes("key") == b"content"
    assert (root.backend.fs.calls["pipe_file"], root.backend.fs.calls["cat_file"]) == (3, 3)


def test_a_fault_that_stays_interrupts_the_run_when_patience_ends():
    root = flaky_root(["busy"] * 1000, ["server error"] * 1000, patience=0.5)
    for use in (lambda: root.put_if_absent("key", b"content"), lambda: root.read_bytes("key")):
        with pytest.raises(StorageInterrupted, match=r"does not answer.*is lost: start the same command again") as end:
            use()
        assert (end.value.exit_code, isinstance(end.value, InputError)) == (1, False)
    assert root.backend.fs.calls["pipe_file"] > 1
    assert not root.exists("key")


def test_a_large_transfer_is_tried_again_however_long_one_try_takes(tmp_path):
    root = flaky_root(["busy", "reset", "timeout"], patience=0)
    (tmp_path / "source").write_bytes(b"content")
    assert root.put_file_if_absent("key", tmp_path / "source")
    with pytest.raises(StorageInterrupted):
        flaky_root(["busy"], patience=0).put_if_absent("key", b"content")
