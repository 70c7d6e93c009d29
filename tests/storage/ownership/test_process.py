"""Life of a process, as far as its own machine can tell."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.ownership import process as process_module
from storage.ownership.process import Life, Owner, _birth, life, this_process


def test_this_process_lives_and_one_that_ended_does_not():
    assert life(this_process("me")) is Life.ALIVE
    code = "from storage.ownership import process; print(process.this_process('it').model_dump_json())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    gone = Owner.model_validate_json(ended.stdout)
    assert life(gone) is Life.DEAD
    assert life(this_process("me").model_copy(update={"birth": "1"})) is Life.DEAD
    assert life(gone.model_copy(update={"host": "elsewhere"})) is Life.UNKNOWN
    assert life(gone.model_copy(update={"place": "another boot"})) is Life.UNKNOWN


def test_a_process_that_ended_and_was_not_waited_for_does_not_live():
    process = subprocess.Popen(["sleep", "60"])
    owner = this_process("me").model_copy(update={"process": process.pid, "birth": _birth(process.pid)})
    assert life(owner) is Life.ALIVE
    process.kill()
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert life(owner) is Life.DEAD
    process.wait()


def test_a_process_that_proc_hides_lives(tmp_path, monkeypatch):
    me = this_process("me")
    monkeypatch.setattr(process_module, "_PROC", tmp_path)  # as with hidepid=2
    assert life(me) is Life.ALIVE
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert life(me.model_copy(update={"process": ended.pid})) is Life.DEAD


@pytest.fixture
def foreign(tmp_path):
    """Id of a process to which this one may not send signals, for as long as the test lasts."""
    if os.geteuid() != 0:
        yield 1
        return
    process = subprocess.Popen(["sleep", "60"], user=65534)
    try:
        os.seteuid(65533)
        yield process.pid
    finally:
        os.seteuid(0)
        process.kill()
        process.wait()


def test_a_process_of_another_user_lives(foreign, tmp_path, monkeypatch):
    with pytest.raises(PermissionError):
        os.kill(foreign, 0)
    theirs = this_process("it").model_copy(update={"process": foreign, "birth": _birth(foreign)})
    assert life(theirs) is Life.ALIVE
    assert life(theirs.model_copy(update={"birth": "1"})) is Life.DEAD, "its id was given to another process"
    monkeypatch.setattr(process_module, "_PROC", tmp_path)
    assert life(theirs) is Life.ALIVE
