"""Ranks that outlive another one: they keep their process and their place, and others join them.

The ranks are small objects, so that each starts in a second.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from storage.errors import InputError, WorkerLost
from tasks.config.environment import Settings
from tasks.workers.actors import WorkerDied, fresh_names, grace_s, spawn
from tasks.workers.ranks import start_trainers
from tasks.workers.stalls import current_stage, within
from trainer_core.config import OptimizerConfig, ParallelConfig, TrainerConfig

LOCAL = Settings(ray_address=None, gpus=())
CONFIG = TrainerConfig(
    parallel=ParallelConfig(data=3), optimizer=OptimizerConfig(learning_rate=1e-3), max_length=8, micro_batch_size=1
)
WAIT_S = 120.0


class Rank:
    """One rank, which fails as ranks do."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def where(self) -> tuple[int, int]:
        return self.rank, os.getpid()

    def stage(self) -> str:
        return current_stage()

    def meet(self, dies: int | None) -> None:
        if self.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("connection closed by peer")

    def hang(self, dies: int, folder: Path) -> None:
        if self.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4)  # less than the others get where they are kept
        (folder / str(self.rank)).touch()


def group_of(there=None):
    """Three ranks; those `there` take their places."""

    def start(_model_dir, _config, rank):
        return Rank(rank.rank)

    return start_trainers("run/trainers", "", CONFIG, "cpu", LOCAL, WAIT_S, start=start, there=there or {})


def fails(group, dies):
    with pytest.raises(WorkerLost) as lost:
        group.submit("meet", dies).wait(WAIT_S)
    return str(lost.value)


@pytest.mark.usefixtures("cluster_of_group")
def test_survivors_keep_their_places_until_something_else_than_a_death_ends_them():
    first = group_of()
    before = dict(first.submit("where").wait(WAIT_S))
    with within("train of iteration 3"):
        assert first.submit("stage").wait(WAIT_S) == ["train of iteration 3"] * 3
    assert "trainer rank 1 of 3 died during meet" in fails(first, 1)
    there = first.survivors()
    assert sorted(there) == [0, 2]
    assert first.survivors() == {}
    (there[1],) = spawn(fresh_names("run/standby", 1), [{}], detached=False)

    second = group_of(there)
    after = dict(second.submit("where").wait(WAIT_S))
    assert sorted(after) == [0, 1, 2]
    assert {rank for rank in after if after[rank] == before[rank]} == {0, 2}
    os.kill(after[0], signal.SIGKILL)
    while second.alive():  # Ray learns of it from the operating system, between two calls
        time.sleep(0.01)
    there = second.survivors()
    assert sorted(there) == [1, 2]

    third = group_of(there)
    third.submit("where").wait(WAIT_S)
    assert re.search(r"failed in meet on host \S+ and was ended", fails(third, None))
    assert third.survivors() == {}


@pytest.mark.parametrize(
    ("failures", "keeps", "waits"),
    [
        ([], False, True),
        ([InputError("the first to fail")], False, True),
        ([InputError("the first to fail"), WorkerDied("rank 1")], False, False),
        ([WorkerDied("rank 1")], False, False),
        ([WorkerDied("rank 1")], True, True),
    ],
)
def test_nobody_waits_for_those_that_a_death_leaves_in_a_call_that_does_not_end(failures, keeps, waits):
    assert (grace_s(failures, keeps) > 0) == waits


@pytest.mark.slow
@pytest.mark.usefixtures("cluster_of_group")
def test_a_death_ends_a_group_at_once_whose_members_would_hang(tmp_path):
    group = group_of()
    group.submit("where").wait(WAIT_S)
    group.keeps = False  # as on cards
    with pytest.raises(WorkerLost, match="trainer rank 1 of 3 died during hang"):
        group.submit("hang", 1, tmp_path).wait(WAIT_S)
    assert list(tmp_path.iterdir()) == []
    assert group.survivors() == {}
