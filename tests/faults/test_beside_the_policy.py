"""Rows of the fault matrix for what a run may have beside its policy: adapters, a critic, a teacher and routes.

A quick test kills one run again and again, each time in another process, at points that come one after another. In a
cell of the full matrix a run is killed once. Both end as the run that nothing interrupts.
"""

import functools
import json

import pytest

from flows.proof.faults import FLOW, Fault
from storage.kill_points import Point
from storage.parts import read_part, read_parts, read_table
from storage.schema import ROLLOUT, TEACHER_TOP
from storage.upkeep.verify import verify
from tasks.stages.names import Stage
from tasks.stages.views import Served, Trained
from tests.faults.running import SmallRun
from tests.faults.small_run import RUN
from tests.faults.test_matrix import POINTS, VICTIMS, check_rows
from tests.small.config import ITERATIONS
from tests.small.models import made
from tests.small.weights import SIZE
from tests.small.workers import ROUTING
from trainer_core.state.facts import FACTS_FILE

LIVE = ("train.lora.rank=4", "engine.adapter=live")
SETTINGS = {
    "lora": LIVE[:1],
    "live": LIVE,
    "critic": ("train.policy.advantage.type=gae", "train.critic.learning_rate=1e-3"),
    "teacher": ("train.policy.distill.reward_weight=1", "train.policy.distill.top_k=3"),
    "routes": ("train.experts.replay=true",),
}
STAGES = {
    "lora": ((Stage.TRAIN, 0), (Stage.TRAIN, 1), (Stage.WEIGHT_SYNC, 1)),
    "live": ((Stage.WEIGHT_SYNC, 0), (Stage.WEIGHT_SYNC, 1), (Stage.EVALUATE, 1)),
    "critic": ((Stage.TRAIN, 0), (Stage.TRAIN, 1)),
    "teacher": ((Stage.PREPARE, 0), (Stage.TRAIN, 1)),
    "routes": ((Stage.ROLLOUT, 1), (Stage.TRAIN, 1)),
}
"""Stages that do something else where a run has this."""
CELLS = [
    (kind, Fault(*stage, point, victim))
    for kind, stages in STAGES.items()
    for stage in stages
    for point in POINTS[stage[0]]
    for victim in VICTIMS
]
KILLS = {
    "lora": (
        "train@0:upload:trainer-0", "train@1:started:trainer-1", "train@1:mid-part:flow",
        "weight-sync@1:served:engine-0",
    ),
    "live": (
        "weight-sync@0:sent:flow", "weight-sync@0:served:engine-0", "weight-sync@1:sent:trainer-1",
        "weight-sync@1:served:flow", "weight-sync@1:parts-done:node", "evaluate@1:started:engine-0",
    ),
    "critic": (
        "train@0:mid-part:flow", "train@0:committed:trainer-0", "train@1:upload:flow", "train@1:parts-done:node",
    ),
    "teacher": (
        "prepare@0:upload:flow", "train@1:mid-part:flow", "train@1:upload:flow", "train@1:parts-done:trainer-0",
        "train@2:started:trainer-1",
    ),
    "routes": (
        "rollout@1:mid-response:flow", "rollout@1:mid-part:engine-0", "rollout@1:parts-done:trainer-1",
        "train@1:started:node", "train@1:upload:flow",
    ),
}  # fmt: skip
"""Of a training that a teacher scores, `mid-part` is in its table, and `upload` behind it, in the state."""


@pytest.fixture(scope="module")
def settings_of(tmp_path_factory):
    teacher = made(tmp_path_factory.mktemp("teacher"), 7)
    named = {"teacher": (f'train.policy.distill.teacher="{teacher}"',)}
    return {kind: (*named.get(kind, ()), *settings) for kind, settings in SETTINGS.items()}


@pytest.fixture(scope="module")
def whole(launcher, tmp_path_factory, settings_of):
    """A run that nothing interrupts, by what it has."""

    @functools.cache
    def finished(kind):
        return SmallRun(launcher, tmp_path_factory.mktemp(kind) / "run").finished(settings=settings_of[kind])

    return finished


def killed(run, settings, fault, **plan):
    """Kill the run once; returns what is stored then."""
    attempt = run.attempt(fault, settings=settings, **plan)
    assert (attempt.delivered, attempt.lingering) == ([fault], []), attempt.messages
    assert attempt.code == (-9 if fault.victim == FLOW else 1), attempt.messages
    return run.look()


def check_end(run, settings, between, expected):
    """Complete the run; check that it does only what was not stored, and ends as the run that nothing interrupts."""
    again = run.attempt(settings=settings)
    assert (again.code, again.lingering) == (0, []), again.messages
    end = run.look()
    assert end.digests == expected.digests
    assert end.parts == expected.parts
    assert again.bodies.keys() == end.digests.keys() - between.digests.keys()
    assert again.calls["teacher_scores"] == len(taught(end) - taught(between))
    check_rows(end)
    assert verify(end.root, RUN).sound


def taught(look):
    """Iterations whose scores by a teacher are recorded."""
    return {iteration for iteration, name in look.pieces if name.startswith("teacher-")}


@pytest.mark.parametrize("kind", KILLS)
def test_killed_again_and_again_it_ends_as_if_undisturbed(launcher, tmp_path, settings_of, whole, kind):
    run, settings, between = SmallRun(launcher, tmp_path / "run"), settings_of[kind], None
    for kill in KILLS[kind]:
        between = killed(run, settings, Fault.parse(kill))
    check_end(run, settings, between, whole(kind))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "fault"), [pytest.param(*one, id=f"{one[0]}-{one[1]}") for one in CELLS])
def test_a_kill_changes_nothing_in_the_end(launcher, tmp_path, settings_of, whole, kind, fault):
    run, settings = SmallRun(launcher, tmp_path / "run"), settings_of[kind]
    check_end(run, settings, killed(run, settings, fault), whole(kind))


def test_quick_kills_meet_each_process_and_each_stage():
    kills = {kind: [Fault.parse(kill) for kill in kills] for kind, kills in KILLS.items()}
    for kind, faults in kills.items():
        assert {(one.stage, one.iteration) for one in faults} >= {*STAGES[kind]}
    assert {one.victim for faults in kills.values() for one in faults} == {*VICTIMS}
    assert {one.point for faults in kills.values() for one in faults} == {*Point}


@pytest.mark.parametrize(("victim", "bases"), [("engine-0", 2), ("trainer-0", 1)])
def test_only_an_engine_that_is_new_gets_the_frozen_weights_again(launcher, tmp_path, whole, victim, bases):
    run, fault = SmallRun(launcher, tmp_path / "run"), Fault(Stage.WEIGHT_SYNC, 1, Point.SENT, victim)
    attempt = run.attempt(fault, settings=(*LIVE, "run.retries=1"), replaces=True)
    assert (attempt.code, attempt.delivered) == (0, [fault]), attempt.messages
    look = run.look()
    assert look.digests == whole("live").digests
    given = [one.metrics.get("base_bytes", 0) for (_, stage), one in look.manifests.items() if stage == "weight-sync"]
    assert sum(given) == bases * 4 * SIZE


def test_states_of_adapters_name_their_frozen_weights_and_engines_serve_the_sums_or_the_adapters(whole):
    both = [whole(kind) for kind in ("lora", "live")]
    for look in both:
        states = [look.manifests[at, Stage.TRAIN] for at in range(ITERATIONS + 1)]
        facts = [json.loads(read_part(look.root, one.part(f"state/{FACTS_FILE}")))["lora"] for one in states]
        assert all((one["rank"], len(one["base"])) == (4, 32) for one in facts)
        assert len({Trained(one).identity.tensors for one in states}) == ITERATIONS + 1
    merged, live = ((Trained(one.manifests[0, Stage.TRAIN]), one.manifests[0, Stage.WEIGHT_SYNC]) for one in both)
    assert merged[0].identity == live[0].identity
    assert Served(merged[1]).weights_digest != Served(live[1]).weights_digest


def test_each_state_has_its_critic(whole):
    states = [Trained(whole("critic").manifests[at, Stage.TRAIN]) for at in range(ITERATIONS + 1)]
    assert len({one.identity.critic for one in states} - {None}) == ITERATIONS + 1
    for one in states:
        assert {f"state/critic/weights-{rank}.bin" for rank in range(2)} <= set(one.manifest.part_names)


def test_the_scores_of_the_teacher_are_stored_with_each_state(whole):
    look = whole("teacher")
    assert "teacher/model.safetensors" in look.manifests[0, Stage.PREPARE].part_names
    assert taught(look) == {*range(1, ITERATIONS + 1)}
    for iteration in range(1, ITERATIONS + 1):
        part = look.manifests[iteration, Stage.TRAIN].part("teacher.arrow")
        assert read_parts(look.root, [part], TEACHER_TOP).num_rows == part.rows


def test_each_sample_has_its_routes(whole):
    look = whole("routes")
    for iteration in range(1, ITERATIONS + 1):
        table = read_table(look.root, look.manifests[iteration, Stage.ROLLOUT], ROLLOUT)
        for row in table.select(["prompt_tokens", "response_tokens", "routes"]).to_pylist():
            positions = len(row["prompt_tokens"]) + len(row["response_tokens"]) - 1
            assert len(row["routes"]) == positions * ROUTING.layers * ROUTING.chosen
