"""Processes that wait for the place of one that dies: which place each takes, and an engine whose place is taken.

The engine is a user's own of no lines, so that it starts in a second.
"""

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest
import ray

from tasks.engine.start import import_engine
from tasks.workers.actors import find_groups, living
from tasks.workers.fleet import Fleet, engines_on
from tasks.workers.standby import Place, fitting
from tests.small.config import small_config
from tests.tasks.workers.test_cluster import gone
from trainer_core.start import import_trainer

ENGINE = """
from tasks.engine.base import BaseEngine


class Idle(BaseEngine):
    def parameters(self):
        return {}

    def sample(self, prompts, seeds, sampling):
        return []

    def logprobs(self, sequences):
        return []
"""
ON_A = Place("engine", import_engine, (False,), (("CUDA_VISIBLE_DEVICES", "0"),), "a")
ON_B = replace(ON_A, host="b")


def taken(waiting, places):
    found = fitting([(place, str(number)) for number, place in enumerate(waiting)], places)
    return {key: int(name) for key, (_, name) in found.items()}


def test_a_place_is_taken_by_a_process_that_waits_on_its_own_host():
    waiting = [ON_A, ON_B, ON_A]
    assert taken(waiting, {1: ON_B, 2: ON_A}) == {1: 1, 2: 0}
    assert taken(waiting, {0: ON_B, 1: ON_B, 3: ON_A, 4: ON_A, 5: ON_A}) == {0: 1, 3: 0, 4: 2}


def test_a_place_is_taken_by_a_process_of_its_role_and_its_cards():
    others = [
        replace(ON_A, environment=(("CUDA_VISIBLE_DEVICES", "1"),)),
        replace(ON_A, role="rank", imports=import_trainer, arguments=("cuda",)),
        replace(ON_A, arguments=(True,)),
    ]
    assert taken(others, {0: ON_A}) == {}
    assert taken([*others, replace(ON_A, seat={"num_gpus": 1.0})], {0: ON_A}) == {0: 3}


def idle(folder, *settings):
    """A configuration of engines of no lines."""
    (folder / "idle.py").write_text(ENGINE)
    return small_config([f'engine.function="{folder}/idle.py:Idle"', *settings])


@pytest.fixture
def fleet(cluster_of_group, tmp_path):
    yield (found := Fleet("run", idle(tmp_path, "workers.standby=1"), cluster_of_group))
    found.close()


def served(fleet, folder):
    """The engine, which has come up, and an actor that waits beside it since then."""
    (engine,) = fleet.engines(folder)
    assert engine.identity().weight_version is None
    engine.awaited = True
    before = find_groups("run/standby-engine")
    fleet.engines(folder)
    ((waits,),) = [actors for name, actors in find_groups("run/standby-engine").items() if name not in before]
    return engine, waits


def kill(process, lives):
    os.kill(process, signal.SIGKILL)
    while lives():  # Ray learns of it from the operating system
        time.sleep(0.01)


def test_a_process_that_waits_takes_the_place_of_an_engine_unless_it_has_died_too(
    fleet, cluster_of_group, tmp_path, caplog
):
    engine, waits = served(fleet, tmp_path)
    assert engines_on("run", small_config(), cluster_of_group).keys() == {"engine-0"}
    second = ray.get(waits.where.remote()).process
    kill(engine.processes()[0], engine.alive)
    engine, waits = served(fleet, tmp_path)
    assert engine.processes() == [second]
    assert [one.processes() for one in engines_on("run", small_config(), cluster_of_group).values()] == [[second]]

    third = ray.get(waits.where.remote()).process
    kill(third, lambda: living({0: waits}))
    kill(second, engine.alive)
    assert caplog.messages == []
    engine, waits = served(fleet, tmp_path)
    assert caplog.messages == ["standby-engine died while it waited; another is started later"]
    left = [psutil.Process(one) for one in (*engine.processes(), ray.get(waits.where.remote()).process)]
    assert not {second, third} & {one.pid for one in left}
    fleet.close()
    assert gone(left)
