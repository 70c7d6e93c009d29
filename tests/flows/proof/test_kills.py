"""Places of the kills of a proof."""

import pytest

from flows.proof.faults import Fault, chosen, possible
from storage.errors import InputError
from storage.kill_points import Point
from tasks.config.run import RunConfig
from tasks.stages.names import LOOP, Stage


def prolonged(config: RunConfig, iterations: int = 3) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"iterations": iterations})})


def two_ranks(config: RunConfig) -> RunConfig:
    parallel = config.train.parallel.model_copy(update={"pipeline": 2})
    return config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})


def test_every_process_every_stage_and_every_point_can_be_chosen(config: RunConfig):
    faults = list(possible(prolonged(two_ranks(config), 1), regenerate=True))
    assert {fault.stage for fault in faults} == set(LOOP)
    assert {fault.point for fault in faults} == set(Point)
    assert {fault.victim for fault in faults} == {"flow", "node", "trainer-0", "trainer-1", "engine-0"}
    assert len(set(faults)) == len(faults)


@pytest.mark.parametrize(
    ("engine", "inside"),
    [
        ({"own_process": True}, {"core-0"}),
        ({"own_process": True, "count": 2}, {"core-0", "core-1"}),
        ({"tensor": 2, "count": 2}, {"core-0", "core-1", *(f"worker-{number}" for number in range(4))}),
        ({"own_process": False}, set()),
    ],
)
def test_what_vllm_starts_can_be_killed(config: RunConfig, engine: dict[str, object], inside: set[str]):
    asked = prolonged(config.model_copy(update={"engine": config.engine.model_copy(update=engine)}), 1)
    victims = {fault.victim for fault in possible(asked, regenerate=True)}
    assert {victim for victim in victims if victim.startswith(("core-", "worker-"))} == inside
    assert all(Fault.parse(str(fault)) == fault for fault in possible(asked, regenerate=True))


def test_with_stored_rollouts_nothing_is_killed_while_sampling(config: RunConfig):
    sampling = Fault(Stage.ROLLOUT, 1, Point.MID_PART)
    asked = prolonged(config)
    assert sampling in list(possible(asked, regenerate=True))
    assert sampling not in list(possible(asked, regenerate=False))


@pytest.mark.parametrize("kills", [0, 1, 5])
def test_random_points_are_in_the_order_of_work_and_given_by_the_seed(config: RunConfig, kills: int):
    everything = list(possible(prolonged(config), regenerate=False))
    for seed in range(20):
        found = chosen(prolonged(config), kills, seed, False)
        places = [everything.index(fault) for fault in found]
        assert len(places) == kills
        assert places == sorted(places)
        assert found == chosen(prolonged(config), kills, seed, False)
    assert kills == 0 or len({chosen(prolonged(config), kills, seed, False) for seed in range(20)}) > 10


def test_more_kills_than_stages_are_refused(config: RunConfig):
    with pytest.raises(InputError, match="--kills 99: this run has 19 stages"):
        chosen(prolonged(config), 99, 0, False)
