"""A finished stage is redone: the repeated stages, the new head, and the state after a kill; over small workers."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from flows.cli.printing import Shown, of_shown
from flows.driving import is_redoing, rerun
from flows.views.evaluations import evaluations
from flows.views.history import ended_iterations
from flows.views.samples import scored_samples
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError, WrongRecord
from storage.kill_points import Point
from storage.manifest import Manifest, find, need
from storage.ownership.lease import hold
from storage.parts import read_table
from storage.revisions import read_revisions, uncopied
from storage.schema import REWARD, ROLLOUT
from storage.upkeep.catalog import contents
from storage.upkeep.redoing import Wanted, choose
from storage.upkeep.verify import verify
from tasks.config.evaluation import EvaluationSettings
from tasks.config.identity import changed_settings
from tasks.config.run import RunConfig
from tasks.config.stored import read_config
from tasks.stages.evaluation import evaluation
from tasks.stages.names import LOOP, WORKFLOW, Stage
from tests.small.config import PROMPTS, SAMPLES, small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.here import WorkersHere, context_here
from tests.small.workers import SmallTrainer

AFTER_ROLLOUT = [Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC, Stage.EVALUATE]
ASKED = EvaluationSettings(samples=1)
FULL = [Stage.ROLLOUT, *AFTER_ROLLOUT]


def asked_for(iterations: int = 3, *settings: str) -> RunConfig:
    return small_config([f"run.iterations={iterations}", *settings])


def drive(root: Root, tmp_path: Path, config: RunConfig | None = None, **more: Any):
    process = driver(root, config or asked_for(), tmp_path / "scratch", **more)
    process.drive()
    return process.done


def wanted(stage: Stage, iteration: int, **more: Any) -> Wanted:
    return Wanted(iteration, stage, "to see", "tests", **more)


def manifests(root: Root, revision: int | None = None) -> dict[tuple[int, Stage], Manifest]:
    revisions = read_revisions(root, RUN)
    seen = revisions if revision is None else revisions.seen(revision)
    places = [(iteration, stage) for iteration in range(4) for stage in LOOP]
    found = {place: find(root, RUN, *place, seen) for place in places}
    return {place: one for place, one in found.items() if one is not None}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The root of a run of three iterations."""
    folder = tmp_path_factory.mktemp("finished")
    drive(open_root(f"{folder}/runs"), folder)
    return folder / "runs"


@pytest.fixture
def done(root: Root, finished: Path) -> dict[tuple[int, Stage], Manifest]:
    """A run of three iterations in the root."""
    shutil.copytree(finished, root.folder, dirs_exist_ok=True)
    return manifests(root)


@pytest.mark.slow
def test_other_samples_lead_to_another_end_and_the_first_stays_readable(root, tmp_path, done):
    rerun(root, RUN, wanted(Stage.ROLLOUT, 2, new_seeds=True))
    expected = [(2, Stage.ROLLOUT, False), (2, Stage.ROLLOUT, True)]  # redone, then found by the loop
    later = [(3, stage, False) for stage in FULL]
    assert drive(root, tmp_path) == [*expected, *((2, stage, False) for stage in AFTER_ROLLOUT), *later]
    again = manifests(root)
    assert {place for place in done if again[place] != done[place]} == {(n, stage) for n in (2, 3) for stage in FULL}
    assert {again[place].revision for place in again if place[0] < 2} == {0}
    assert manifests(root, revision=0) == done
    seeds = [read_table(root, one[2, Stage.ROLLOUT], ROLLOUT)["seed"].to_pylist() for one in (done, again)]
    assert not set(seeds[0]) & set(seeds[1])
    assert verify(root, RUN).sound


def test_a_cascade_ends_where_a_stage_comes_to_the_same_digest(root, tmp_path, done):
    rerun(root, RUN, wanted(Stage.ROLLOUT, 2))
    assert drive(root, tmp_path) == [(2, Stage.ROLLOUT, False)]
    again = manifests(root)
    assert again[2, Stage.ROLLOUT].revision == 1
    assert again[2, Stage.ROLLOUT].digest == done[2, Stage.ROLLOUT].digest
    assert again[2, Stage.ROLLOUT].parts == done[2, Stage.ROLLOUT].parts
    assert {place for place in done if again[place] != done[place]} == {(2, Stage.ROLLOUT)}
    assert drive(root, tmp_path, asked_for(4))[0] == (4, Stage.ROLLOUT, False)


def test_without_a_cascade_the_head_is_left_until_it_is_chosen(root, tmp_path, done):
    rerun(root, RUN, wanted(Stage.ROLLOUT, 2, new_seeds=True, cascade=False))
    process = driver(root, asked_for(), tmp_path / "scratch")
    process.redo()
    assert process.done == [(2, Stage.ROLLOUT, False)]
    assert manifests(root) == done
    assert drive(root, tmp_path) == []
    with hold(root, RUN, "test") as lease:
        choose(root, WORKFLOW, RUN, 1, "better", "tests", lease)
    assert ended_iterations(root, RUN, 10) == 2
    rest = [(2, stage, stage is Stage.ROLLOUT) for stage in FULL] + [(3, stage, False) for stage in FULL]
    assert drive(root, tmp_path) == rest
    with hold(root, RUN, "test") as lease:
        choose(root, WORKFLOW, RUN, 0, "back", "tests", lease)
    assert manifests(root) == done
    assert drive(root, tmp_path) == []


def test_evaluation_alone_is_done_again_without_the_rest(root, tmp_path, done):
    rerun(root, RUN, wanted(Stage.EVALUATE, 1))
    assert drive(root, tmp_path) == [(1, Stage.EVALUATE, False)]
    again = manifests(root)
    assert {place for place in done if again[place] != done[place]} == {(1, Stage.EVALUATE)}


@pytest.mark.parametrize("stage", [Stage.REWARD, Stage.TRAIN, Stage.WEIGHT_SYNC])
def test_what_is_deterministic_comes_to_the_same_end(root, tmp_path, done, stage):
    rerun(root, RUN, wanted(stage, 2))
    assert drive(root, tmp_path) == [(2, stage, False)]
    assert {place: one.digest for place, one in manifests(root).items()} == {p: one.digest for p, one in done.items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [Stage.ROLLOUT, Stage.EVALUATE])
@pytest.mark.parametrize("point", [Point.STARTED, Point.PARTS_DONE, Point.COMMITTED])
def test_a_kill_is_continued_and_never_leaves_two_heads(root, tmp_path, done, stage, point):
    rerun(root, RUN, wanted(stage, 2, new_seeds=stage is Stage.ROLLOUT))
    with pytest.raises(Killed):
        drive(root, tmp_path, at=killing(stage, 2, point))
    assert manifests(root) == done  # nothing was chosen yet
    assert is_redoing(root, RUN)
    drive(root, tmp_path)
    revisions = read_revisions(root, RUN)
    assert (revisions.head, len(revisions.choices), len(revisions.reruns)) == (1, 1, 1)
    assert manifests(root)[2, stage].revision == 1
    assert set(manifests(root)) == set(done)
    assert verify(root, RUN).sound


def test_a_piece_of_the_first_time_is_not_a_piece_of_the_second(root, tmp_path, done):
    rerun(root, RUN, wanted(Stage.ROLLOUT, 2, new_seeds=True, cascade=False))
    with pytest.raises(Killed):
        driver(root, asked_for(), tmp_path / "scratch", at=killing(Stage.ROLLOUT, 2, Point.MID_PART, after=1)).redo()
    process = driver(root, asked_for(), tmp_path / "scratch")
    process.redo()
    assert process.workers.calls.count("enqueue") == 3  # two pieces of three, and the first once more to compare
    assert manifests(root, revision=1)[2, Stage.ROLLOUT].metrics["sampled_again_equal"] > 0
    assert manifests(root, revision=1)[2, Stage.ROLLOUT].attempt == 1


def test_a_second_request_finds_the_first(root, tmp_path, done):
    first = rerun(root, RUN, wanted(Stage.REWARD, 2, request="flow run 1"))
    assert rerun(root, RUN, wanted(Stage.REWARD, 2)) == first  # not finished: the same words
    with pytest.raises(
        InputError, match=r"reward of iteration 2 .*is being done again as revision 1 .*ratchet choose small 0"
    ):
        rerun(root, RUN, wanted(Stage.TRAIN, 2))
    drive(root, tmp_path)
    assert rerun(root, RUN, wanted(Stage.REWARD, 2, request="flow run 1")) == first
    assert rerun(root, RUN, wanted(Stage.REWARD, 2)).revision == 2


def test_a_rerun_is_withdrawn_by_choosing_the_head_again(root, tmp_path, done):
    rerun(root, RUN, wanted(Stage.TRAIN, 2))
    with hold(root, RUN, "test") as lease:
        choose(root, WORKFLOW, RUN, 0, "never mind", "tests", lease)
    assert drive(root, tmp_path) == []


def test_what_would_be_senseless_is_refused(root, tmp_path, done):
    for stage, iteration, fact in (
        (Stage.PREPARE, 0, "start a new run"),
        (Stage.TRAIN, 0, "start a new run"),
        (Stage.TRAIN, 4, "is not finished"),
    ):
        with pytest.raises(InputError, match=fact):
            rerun(root, RUN, wanted(stage, iteration))
    with hold(root, RUN, "test") as lease, pytest.raises(InputError, match="there is no revision 7"):
        choose(root, WORKFLOW, RUN, 7, "", "tests", lease)


def test_a_stage_whose_state_retention_deleted_is_not_done_again(root, tmp_path):
    config = asked_for(3, "storage.keep_newest=2")
    drive(root, tmp_path, config)
    for stage in (Stage.TRAIN, Stage.ROLLOUT, Stage.REWARD):
        with pytest.raises(InputError, match=r"state of iteration 1 .* retention has deleted; those of \[0, 2, 3\]"):
            rerun(root, RUN, wanted(stage, 2))
    rerun(root, RUN, wanted(Stage.REWARD, 2, cascade=False))  # needs no weights
    driver(root, config, tmp_path / "scratch").redo()
    with hold(root, RUN, "test") as lease:
        choose(root, WORKFLOW, RUN, 1, "the same scores", "tests", lease)
    assert drive(root, tmp_path, config) == []
    assert rerun(root, RUN, wanted(Stage.TRAIN, 3)).revision == 2


@pytest.mark.slow
def test_states_of_a_revision_that_is_not_the_head_are_kept_as_its_own(root, tmp_path):
    config = asked_for(3, "storage.keep_newest=2")
    drive(root, tmp_path, config)
    first = manifests(root)
    rerun(root, RUN, wanted(Stage.ROLLOUT, 3, new_seeds=True))
    drive(root, tmp_path, asked_for(4, "storage.keep_newest=2"))
    with hold(root, RUN, "test") as lease:
        choose(root, WORKFLOW, RUN, 0, "back", "tests", lease)
    assert drive(root, tmp_path, asked_for(4, "storage.keep_newest=2"))[0] == (4, Stage.ROLLOUT, False)
    assert manifests(root)[3, Stage.TRAIN] == first[3, Stage.TRAIN]
    assert verify(root, RUN).sound


def test_other_settings_apply_from_the_stage_that_reads_them(root, tmp_path, done):
    before = read_config(root, RUN).config
    after = asked_for(3, "train.optimizer.learning_rate=0.01")
    settings = changed_settings(
        before.model_dump(mode="json")["train"], after.model_dump(mode="json")["train"], "train."
    )
    assert settings == {"train.optimizer.learning_rate": 0.01}
    rerun(root, RUN, wanted(Stage.TRAIN, 2, settings=settings))
    rates: list[float] = []

    class Noting(SmallTrainer):
        def train_policy(self, *arguments: Any, **options: Any) -> Any:
            rates.append(self._config.optimizer.learning_rate)
            return super().train_policy(*arguments, **options)

    workers = WorkersHere(after, trainer=Noting)
    process = driver(root, asked_for(), tmp_path / "scratch", workers=workers)
    process.drive()
    assert process.done[:3] == [(2, Stage.TRAIN, False), (2, Stage.ROLLOUT, True), (2, Stage.REWARD, True)]
    assert set(rates) == {0.01}
    again = manifests(root)
    digests = {place: one.config_digest for place, one in again.items()}
    assert digests[2, Stage.REWARD] == digests[1, Stage.TRAIN] == done[1, Stage.TRAIN].config_digest
    assert digests[2, Stage.TRAIN] == digests[3, Stage.ROLLOUT] == read_config(root, RUN).digest
    with pytest.raises(InputError, match=r"learning_rate: the run was started with 0.01.* is now given 0.001"):
        drive(root, tmp_path, asked_for(4))
    assert need(root, RUN, 3, Stage.TRAIN).digest != done[3, Stage.TRAIN].digest


def test_states_of_an_earlier_configuration_go_before_the_first_stage(root, tmp_path, done):
    process = driver(root, asked_for(4, "storage.keep_newest=1"), tmp_path / "scratch")
    process.at = killing(Stage.ROLLOUT, 4, Point.STARTED)
    with pytest.raises(Killed):
        process.drive()
    retired = [root.exists(layout.retired_key(done[iteration, Stage.TRAIN].key)) for iteration in range(4)]
    assert retired == [False, True, True, False]


def test_a_complete_run_whose_process_was_killed_at_its_end_keeps_no_further_state(root, tmp_path):
    config = asked_for(2, "storage.keep_newest=1")
    process = driver(root, config, tmp_path / "scratch")
    process.at = killing(Stage.EVALUATE, 2, Point.COMMITTED)  # the last one: retention would follow
    with pytest.raises(Killed):
        process.drive()
    first = need(root, RUN, 1, Stage.TRAIN)
    assert root.exists(first.parts[0].key)
    with hold(root, RUN, "another process"):
        assert drive(root, tmp_path, config) == []  # whoever drives the run deletes them
    assert root.exists(first.parts[0].key)
    assert drive(root, tmp_path, config) == []
    assert not root.exists(first.parts[0].key)
    assert root.exists(layout.retired_key(first.key))


def test_a_second_copy_that_a_kill_left_out_is_there_once_the_run_is_driven(root, tmp_path, done):
    rerun(root, RUN, wanted(Stage.REWARD, 3, cascade=False))  # a choice would write the copies of all records
    for key in root.keys(layout.copy_folder(RUN)):
        root.remove(key)
    drive(root, tmp_path)
    assert uncopied(root, RUN) == []
    assert verify(root, RUN).findings == ()


def test_work_of_a_rerun_whose_record_is_lost_is_not_gone_on_with(root, tmp_path, done):
    rerun(root, RUN, wanted(Stage.REWARD, 3))
    with pytest.raises(Killed):
        drive(root, tmp_path, at=killing(Stage.REWARD, 3, Point.COMMITTED))
    for key in [*root.keys(layout.copy_folder(RUN)), *root.keys(layout.revision_folder(RUN))]:
        root.remove(key)  # as a power cut would
    for iterations in (3, 4):
        with pytest.raises(WrongRecord, match=r"whose record small/revisions/rerun-000001.json is lost"):
            rerun(root, RUN, wanted(Stage.REWARD, 3)) if iterations == 3 else drive(root, tmp_path, asked_for(4))
    assert not verify(root, RUN).sound


@pytest.mark.slow
def test_an_evaluation_of_weights_that_were_replaced_is_labelled_and_compared_with_nothing(root, done, tmp_path):
    def evaluate(iteration: int) -> Manifest:
        config = asked_for()
        with context_here(root, config, tmp_path / f"{iteration}", RUN, workers=WorkersHere(config)) as context:
            return evaluation(replace(context, revisions=read_revisions(root, RUN)), iteration, ASKED).manifest

    old = [evaluate(iteration) for iteration in (1, 2)]
    rerun(root, RUN, wanted(Stage.ROLLOUT, 2, new_seeds=True))
    drive(root, tmp_path)
    new = [evaluate(iteration) for iteration in (2, 3)]
    found = {one.manifest: one for one in evaluations(root, RUN)}
    assert [found[one.digest].replaced for one in (*old, *new)] == [False, True, False, False]
    assert [found[one.digest].before for one in new] == [1, 2]
    stored = contents(root, RUN)
    lines = of_shown(Shown.of(root.url, stored, stored.newest), in_detail=False)
    (labelled,) = (line for line in lines if "of weights that were replaced" in line)
    assert old[1].digest[:12] in labelled


def test_samples_are_joined_with_the_rewards_of_their_own_revision(root, done, tmp_path):
    """A pattern over parts finds both revisions of both stages."""
    rerun(root, RUN, wanted(Stage.ROLLOUT, 2, new_seeds=True))
    drive(root, tmp_path)
    for revision in (0, 1):
        table = scored_samples(root.url, RUN, revision=revision)
        of_revision = manifests(root, revision)
        assert table.num_rows == 3 * PROMPTS * SAMPLES
        for iteration in (1, 2, 3):
            rollout, reward = (of_revision[iteration, stage] for stage in (Stage.ROLLOUT, Stage.REWARD))
            part = table.filter(pc.field("iteration") == iteration)
            assert part["seed"].equals(read_table(root, rollout, ROLLOUT, ["seed"])["seed"])
            assert part["reward"].equals(read_table(root, reward, REWARD, ["reward"])["reward"])
    assert scored_samples(root.url, RUN, [2]).num_rows == PROMPTS * SAMPLES
    with pytest.raises(InputError, match=r"iterations \[7\] of run 'small' have no samples: those of \[1, 2, 3\] do"):
        scored_samples(root.url, RUN, [2, 7])
