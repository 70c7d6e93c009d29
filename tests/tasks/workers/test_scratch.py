import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage import layout
from storage.backends.root import open_root
from storage.errors import InputError
from storage.manifest import Manifest
from storage.ownership.scratch import scratch, sweep
from tasks.workers.folders import claim, claimed, kept_in_memory, owned, run_folder
from tasks.workers.hosts import _fetch

LEAVE_MARKED = """
import sys
from tasks.workers.folders import kept_in_memory
with kept_in_memory(sys.argv[1]) as folder:
    (folder / "state").write_text(sys.argv[1])
    print(folder, flush=True)
    input()
"""

NOW = datetime.now(UTC)
MANIFEST = Manifest(
    run="run", iteration=0, stage="train", parts=(), config_digest="", code_version="", started=NOW, finished=NOW
)
LEAVE = """
import os, sys
from storage.ownership.scratch import new_folder, socket_folder
held = socket_folder()
folder = held.__enter__() if sys.argv[1] == "sockets" else new_folder(memory=sys.argv[1] == "memory")
(folder / "state").write_bytes(b"x")
print(folder, flush=True)
input()
"""


def test_a_folder_is_there_for_a_block():
    with scratch() as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()


@pytest.mark.parametrize("where", ["memory", "disk", "sockets"])
def test_what_a_killed_process_left_goes_and_what_a_living_one_has_stays(where):
    command = [sys.executable, "-c", LEAVE, where]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = Path(process.stdout.readline().strip())
    with scratch() as own:
        assert folder not in sweep()
        assert (folder / "state").exists()
        process.kill()
        process.communicate()
        assert folder in sweep()
        assert not folder.exists()
        assert own.exists()


def test_folders_of_others_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("ratchet-abc", "ratchet-000000000000-1-2-abc", "other-1-2-3", "rt-0000001-2-0"):
        (tmp_path / name).mkdir()
    assert sweep() == []
    assert len(list(tmp_path.iterdir())) == 4


def holding(mark):
    """A process with a folder of that mark, and the folder."""
    command = [sys.executable, "-c", LEAVE_MARKED, mark]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_kept_in_memory_is_taken_over_by_its_successor_alone():
    (one, ours), (other, theirs), (living, held) = map(holding, ("run a", "run b", "run a"))
    for process in (one, other):
        process.kill()
        process.communicate()
    with kept_in_memory("run a") as folder:
        assert (folder / "state").read_text() == "run a"
        assert not ours.exists()
        assert theirs in sweep()
        assert held.exists()
        with kept_in_memory("run a") as second:
            assert not (second / "state").exists()
    assert not folder.exists()
    living.communicate("\n")
    assert not held.exists()


def test_a_folder_of_another_user_is_not_taken_over(monkeypatch):
    process, folder = holding("run c")
    process.kill()
    process.communicate()
    with monkeypatch.context() as patch:
        patch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
        with kept_in_memory("run c") as own:
            assert not (own / "state").exists()
    assert folder in sweep()


def test_runs_of_one_name_below_two_roots_hold_nothing_in_common_on_a_cluster():
    ours, theirs = claim("s3://a/runs", "run"), claim("s3://b/runs", "run")
    assert not ours.startswith(theirs)
    assert run_folder(ours) != run_folder(theirs)
    assert claimed(ours) == claimed(theirs) == claimed(f"{ours}:evaluation") == "run"


def test_a_folder_of_a_run_that_another_user_has_made_is_refused(tmp_path, monkeypatch):
    ours = owned(tmp_path / "host" / "run")
    assert owned(ours).stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(ours)
    with pytest.raises(InputError, match="link is another user's"):
        owned(tmp_path / "link")
    monkeypatch.setattr("os.getuid", lambda: ours.stat().st_uid + 1)
    with pytest.raises(InputError, match="run is another user's"):
        owned(ours)


def test_a_host_that_fetches_files_does_not_put_them_into_a_folder_of_another_user(tmp_path):
    root, folder = open_root(str(tmp_path / "root")), tmp_path / "theirs"
    root.put_if_absent(layout.run_config_key("run"), b"{}")
    (tmp_path / "ours").mkdir()
    folder.symlink_to(tmp_path / "ours")
    with pytest.raises(InputError, match="theirs is another user's"):
        _fetch(root.url, MANIFEST, folder / "model", "", None)
    assert list((tmp_path / "ours").iterdir()) == []
