"""Updates in flight: responses that go on under newer weights, and a bound of staleness, wherever the run is killed."""

import random
import shlex

import pytest

from flows.cli.app import execute
from flows.driving import ask_again
from infra.fuzz import draws, in_flight
from infra.fuzz_asked import noting
from storage.backends.root import open_root
from storage.errors import InputError
from storage.manifest import need
from storage.parts import read_parts, read_table
from storage.revisions import read_revisions
from storage.schema import ROLLOUT
from storage.upkeep.redoing import Wanted
from storage.upkeep.verify import verify
from tasks.config.stored import stored_config
from tasks.forking import make_fork
from tasks.stages.names import Stage
from tasks.stages.views import IN_FLIGHT
from tests.small.config import SAMPLES, small_config
from tests.small.driving import RUN, digests, driver, reach
from tests.small.here import WorkersHere
from tests.small.workers import SmallEngine

ITERATIONS, BOUND, PROMPTS = 5, 2, 3


def config(*settings):
    given = (f"run.iterations={ITERATIONS}", "rollout.ahead=1", "evaluate.every=0", *in_flight(BOUND))
    return small_config([*given, 'train.policy.old_policy="behaviour"', "rollout.increments.tokens=1", *settings])


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("calm")
    root = open_root(str(folder / "root"))
    driver(root, config(), folder / "scratch").drive()
    return root


def rollouts(root, run=RUN):
    return [need(root, run, iteration, Stage.ROLLOUT) for iteration in range(1, ITERATIONS + 1)]


def tables(root):
    return [read_table(root, one, ROLLOUT) for one in rollouts(root)]


def left(root, manifest):
    """Rows of the responses that a rollout leaves to the next one."""
    return {
        (row["position"], row["sample_id"]): row
        for row in read_parts(root, [manifest.part(IN_FLIGHT)], ROLLOUT).to_pylist()
    }


def test_each_draw_is_trained_on_once_or_left_out_or_in_flight(calm):
    found = draws(calm)
    assert len(found) == len(set(found))
    cursor = rollouts(calm)[-1].facts["cursor"]
    assert {position for position, again in found if not again} == set(range(cursor))
    left_out = {tuple(draw) for one in rollouts(calm) for draw in one.facts["left_out"]}
    assert left_out
    assert {(position, again - 1) for position, again in found if again} == left_out
    seeds = [seed for table in tables(calm) for seed in table["seed"].to_pylist()]
    begun = {row["seed"] for one in rollouts(calm) for row in left(calm, one).values() if not row["again"]}
    again = {row["seed"] for table in tables(calm) for row in table.to_pylist() if row["again"]}
    assert len(seeds) == len(set(seeds))
    assert again
    assert not again & begun
    assert [one.metrics["groups_left_out"] for one in rollouts(calm)] == [
        len(one.facts["left_out"]) for one in rollouts(calm)
    ]


def test_a_rollout_has_as_many_samples_as_one_between_updates(calm):
    for table in tables(calm):
        assert table["sample_id"].to_pylist() == [*range(SAMPLES)] * PROMPTS
        assert all(row["turns"][0]["finish_reason"] == "stop" for row in table.to_pylist())


def test_what_is_trained_on_is_within_the_bound_and_versions_only_grow(calm):
    mixed = 0
    for iteration, (one, table) in enumerate(zip(rollouts(calm), tables(calm), strict=True), 1):
        versions = table["weight_version"].to_pylist()
        assert all(row == sorted(row) and row[-1] <= one.facts["weight_version"] for row in versions)
        oldest = min(min(row) for row in versions)
        assert one.metrics["staleness"] == iteration - 1 - oldest <= BOUND
        mixed += sum(len(set(row)) > 1 for row in versions)
    assert mixed


def test_a_response_that_goes_on_keeps_its_tokens_and_their_log_probabilities(calm):
    went_on = 0
    for before, table in zip(rollouts(calm), tables(calm)[1:], strict=False):
        stored = left(calm, before)
        for row in table.to_pylist():
            first = stored.get((row["position"], row["sample_id"]))
            if first is not None and first["again"] == row["again"]:
                there = len(first["response_tokens"])
                went_on += 0 < there < len(row["response_tokens"])
                for name in ("response_tokens", "logprobs", "weight_version"):
                    assert row[name][:there] == first[name]
                assert row["seed"] == first["seed"]
    assert went_on


def asking(root, asked):
    """Engines that note what they are asked for."""

    class Noting(SmallEngine):
        enqueue = noting(root, asked.append, SmallEngine.enqueue)

    return lambda given: WorkersHere(given, Noting)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_a_run_that_is_killed_anywhere_ends_in_the_same_bits(calm, tmp_path, seed):
    root, asked = open_root(str(tmp_path / "root")), []
    killed = reach(root, config(), tmp_path / "processes", random.Random(seed), asking(root, asked), 24)
    assert killed >= 20
    assert digests(root, ITERATIONS) == digests(calm, ITERATIONS)
    assert draws(root) == draws(calm)
    assert verify(root, RUN).sound
    assert any(one.stored for one in asked)
    assert not [one for one in asked if one.again]


OTHERWISE = {
    "colder": "rollout.temperature=0.5",
    "stopped": 'rollout.stop=["9"]',
    "halved": "engine.precision=bf16",
    "more": "rollout.samples=3",
    "seeded": "run.seed=7",
}


ROWS = [pytest.param(name, marks=[] if name in ("colder", "halved") else pytest.mark.slow) for name in OTHERWISE]


@pytest.mark.parametrize("name", ROWS)
def test_a_fork_draws_again_what_was_begun_under_other_settings(calm, tmp_path, name):
    make_fork(calm, RUN, 2, name, [OTHERWISE[name], "run.iterations=3"])
    driver(calm, stored_config(calm, name), tmp_path / name, run=name).drive()
    left_out = {position for position, _ in left(calm, rollouts(calm)[1])}
    assert {position for position, _ in need(calm, name, 3, Stage.ROLLOUT).facts["left_out"]} == left_out
    assert verify(calm, name).sound


def test_a_rollout_with_other_seeds_draws_again_what_is_in_flight(tmp_path):
    root, three = open_root(str(tmp_path / "root")), config("run.iterations=3")
    driver(root, three, tmp_path / "first").drive()
    ask_again(root, RUN, Wanted(3, Stage.ROLLOUT, "by chance?", "tests", new_seeds=True))
    driver(root, three, tmp_path / "second").drive()
    left_out = {position for position, _ in left(root, need(root, RUN, 2, Stage.ROLLOUT))}
    assert {position for position, _ in need(root, RUN, 3, Stage.ROLLOUT).facts["left_out"]} == left_out


BETWEEN = "rollout={samples=2,prompts=3,max_tokens=6,ahead=1}"
UNFOLLOWED = "would skip prompts: the rollout of iteration 2 of run 'small' has left 6 prompt groups in flight"


def test_a_fork_with_updates_between_is_refused_with_a_command_that_works(calm, tmp_path):
    with pytest.raises(InputError, match=UNFOLLOWED) as refused:
        make_fork(calm, RUN, 2, "turns", [BETWEEN, "run.iterations=1"])
    assert execute(shlex.split(str(refused.value).splitlines()[-1])[1:]) == 0
    driver(calm, turns := stored_config(calm, "turns"), tmp_path / "turns", run="turns").drive()
    assert turns.rollout.updates == "between"


@pytest.mark.parametrize(
    ("setting", "fact"),
    [
        (BETWEEN, UNFOLLOWED),
        ("rollout.ahead=0", "under which weights never change beside a rollout"),
        ("rollout.max_staleness=1", "by which no response may go on"),
        ("rollout.pause_tokens=6", "as no response is longer than rollout.max_tokens = 6"),
    ],
)
def test_settings_that_open_responses_cannot_follow_are_refused_before_a_stage_is_done_again(calm, setting, fact):
    with pytest.raises(InputError, match=fact):
        ask_again(calm, RUN, Wanted(3, Stage.ROLLOUT, "to see", "tests"), [setting])
    assert not read_revisions(calm, RUN).reruns
