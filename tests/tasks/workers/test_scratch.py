import subprocess
import sys
from pathlib import Path

import pytest

from tasks.workers.scratch import scratch, sweep

LEAVE = """
import os, sys
from tasks.workers.scratch import new_folder
folder = new_folder(memory=sys.argv[1] == "memory")
(folder / "state").write_bytes(b"x")
print(folder, flush=True)
input()
"""


def test_a_folder_is_there_for_a_block():
    with scratch() as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()


@pytest.mark.parametrize("where", ["memory", "disk"])
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
    for name in ("ratchet-abc", "ratchet-000000000000-1-2-abc", "other-1-2-3"):
        (tmp_path / name).mkdir()
    assert sweep() == []
    assert len(list(tmp_path.iterdir())) == 3
