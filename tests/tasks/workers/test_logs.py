"""The lines of trainer ranks and engines: named, at a limited rate, without styles."""

import builtins
import time

import pytest

from tasks.workers.actors import WorkerGroup, fresh_names, short_name, spawn
from tasks.workers.cluster import Cluster
from tasks.workers.logs import BURST, PER_S, Lines, heard

DEADLINE_S = 60.0


@pytest.mark.slow
def test_every_rank_is_heard_by_its_name(cluster: Cluster):
    said: list[str] = []
    with heard(said.append, print):
        names = fresh_names("a/trainers/settings", 2)
        group = WorkerGroup(["0", "1"], spawn(names, [{}, {}], detached=False))
        group.start(builtins.print, [("\x1b[31mfirst\x1b[0m",), ("second",)], DEADLINE_S)
        (spare,) = spawn(fresh_names("a/standby", 1), [{}], detached=False)  # takes the place of a third one
        spare.become.remote("trainer-2")
        spare.make.remote(builtins.print, ("third",))
        deadline = time.monotonic() + DEADLINE_S
        while len(said) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        group.end()
    assert sorted(said) == ["[trainer-0] first", "[trainer-1] second", "[trainer-2] third"]


def test_a_process_that_prints_without_end_is_limited():
    said: list[str] = []
    now = [0.0]
    lines = Lines(said.append, print, lambda: now[0])
    lines({"actor_name": "engine-0", "lines": [f"line {n}" for n in range(BURST + 50)]})
    lines({"pid": "autoscaler", "lines": ["of Ray"]})
    lines({"actor_name": "trainer-0", "lines": ["another process", "  "]})
    assert len(said) == BURST + 1
    assert said[-1] == "[trainer-0] another process"
    now[0] += 1.0
    lines({"actor_name": "engine-0", "lines": ["more"] * 50})
    assert said[BURST + 1 :] == ["[engine-0] ... 50 lines left out", *["[engine-0] more"] * int(PER_S)]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("W1125 torch/utils/cpp_extension.py:140] No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'", False),
        ("[W1125 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy for memory allocation", False),
        ("\rLoading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 236.59it/s]", False),
        ("[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 0", False),
        ("RuntimeError: No CUDA GPUs are available", True),
        ("Warning: the loss is nan", True),
        ("Error while Loading safetensors checkpoint shards: no space", True),
    ],
)
def test_known_harmless_lines_of_others_are_left_out_and_nothing_else(line: str, shown: bool):
    said: list[str] = []
    Lines(said.append, print)({"actor_name": "engine-0", "lines": [line]})
    assert said == ([f"[engine-0] {line}"] if shown else [])


def test_a_name_says_the_role():
    assert short_name("run/trainers/0123/ab/1") == "trainer-1"
    assert short_name("run/engine-2/0123/ab/0") == "engine-2"


def test_the_first_rank_tells_how_far_it_is():
    said: list[str] = []
    counted: list[tuple[int, int, str, str]] = []
    lines = Lines(said.append, lambda *given: counted.append(given))
    for name in ("trainer-0", "trainer-1"):
        lines({"actor_name": name, "lines": ["3 of 12 micro-batches", "loss 0.5"]})
    assert counted == [(3, 12, "micro-batches", "")]
    assert said == ["[trainer-0] loss 0.5", "[trainer-1] loss 0.5"]
