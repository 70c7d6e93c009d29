"""The memory of the whole process tree."""

import subprocess
import sys

from flows.cli.launch import MemoryMeter, tree_bytes

HOLD = "import sys; data = bytearray(96 << 20); print('ready', flush=True); sys.stdin.read()"


def test_the_memory_of_children_counts():
    before = tree_bytes()
    child = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child, MemoryMeter(period_s=0.05) as meter:
        assert child.stdout is not None
        child.stdout.readline()
        during = tree_bytes()
        child.communicate()
    assert during - before > 90 << 20
    assert tree_bytes() < during - (90 << 20)
    assert meter.peak_gib > 90 / 1024
