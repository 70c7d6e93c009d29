"""Archives that grow with a run."""

from datetime import UTC, datetime

import pyarrow.parquet as pq
import pytest

from storage import layout
from storage.errors import DigestMismatch
from storage.manifest import commit, need
from storage.revisions import Choice, read_revisions, record_choice
from storage.schema import ROLLOUT
from storage.upkeep.archive import compact_new
from storage.upkeep.verify import verify
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import age, make_iteration, make_run, put
from tests.storage.stepping import SharedStore, Stepper
from tests.storage.tables import rollout_table
from tests.storage.upkeep.test_redoing import again

GROUP = 12  # samples of an iteration


def chunks(root):
    return [layout.archive_span(key)[1:] for key in root.keys("run/archive")]


def new(root):
    return [(one.iterations, one.rows) for one in compact_new(root, WORKFLOW, "run", size=2)]


def age_manifests(root):
    for key in root.keys("run/manifests"):
        age(root, key)


def test_only_what_is_new_is_written(root):
    make_run(root, iterations=3)
    age_manifests(root)
    assert new(root) == [((1, 2), 2 * GROUP), ((3, 3), GROUP)]
    assert new(root) == []
    make_iteration(root, "run", 4)
    make_iteration(root, "run", 5)
    age_manifests(root)
    for key in root.keys("run/archive"):
        age(root, key, days=1)
    assert new(root) == [((3, 4), 2 * GROUP), ((5, 5), GROUP)]
    assert chunks(root) == [(1, 2), (3, 4), (5, 5)]
    tables = [pq.read_table(root.backend.full(key)) for key in root.keys("run/archive")]
    assert [sorted(set(one["iteration"].to_pylist())) for one in tables] == [[1, 2], [3, 4], [5]]
    assert verify(root, "run").sound


def test_an_iteration_that_is_not_scored_yet_is_left_out(root):
    make_run(root, iterations=1)
    put(root, "run", 2, Stage.ROLLOUT, {}, rollout_table(), ROLLOUT)
    assert new(root) == [((1, 1), GROUP)]


def test_a_stage_that_was_committed_later_than_the_file_is_written_again(root):
    made = make_run(root, iterations=2)
    age_manifests(root)
    assert new(root)
    for key in root.keys("run/archive"):
        age(root, key, days=1)
    age(root, made[1, Stage.REWARD].key, days=0)
    assert new(root) == [((1, 2), 2 * GROUP)]
    for key in root.keys("run/archive"):
        age(root, key, days=-0.1)
    assert new(root) == []
    assert chunks(root) == [(1, 2)]


def test_an_archive_of_the_whole_run_is_left_alone(root):
    make_run(root, iterations=2)
    whole = layout.archive_key("run", "samples", range(1, 3), "0" * 32)
    root.replace(whole, b"of a person")
    new(root)
    assert root.exists(whole)


def test_texts_are_only_made_if_there_is_something_to_write(root):
    make_run(root, iterations=1)
    age_manifests(root)
    new(root)

    def never():
        raise AssertionError

    assert compact_new(root, WORKFLOW, "run", never, size=2) == ()


def test_a_damaged_part_is_named(root):
    made = make_run(root, iterations=1)
    root.replace(made[1, Stage.ROLLOUT].parts[0].key, b"something else")
    with pytest.raises(DigestMismatch, match="rollout"):
        new(root)
    assert root.keys("run/archive") == []


def test_two_at_once_leave_the_newer_archive():
    # one stops after each of its store operations in turn, while the run grows and the other does all of its work
    for steps in range(400):
        store = SharedStore()
        root = store.root()
        make_run(root, iterations=1)
        gated = store.root(lambda: stepper)  # noqa: B023 - the stepper of this round
        stepper = Stepper(lambda gated=gated: compact_new(gated, WORKFLOW, "run"))
        for _ in range(steps):
            stepper.step()
        finished = stepper.ended
        make_iteration(root, "run", 2)
        compact_new(root, WORKFLOW, "run")
        while not stepper.ended:
            stepper.step()
        assert stepper.error is None
        assert (1, 2) in chunks(root)
        compact_new(root, WORKFLOW, "run")
        assert chunks(root) == [(1, 2)]
        if finished:
            break
    assert finished


def test_a_chunk_from_before_the_head_was_chosen_is_written_again(root):
    make_run(root, iterations=1)
    age_manifests(root)
    assert new(root)
    assert new(root) == []
    chosen = Choice(revision=0, goes_on=0, reason="a test", asked_by="tests", time=datetime.now(UTC))
    record_choice(root, "run", chosen, 1)
    age(root, layout.choice_key("run", 1), days=-0.1)
    assert new(root) == [((1, 1), GROUP)]


def test_chunks_of_a_former_head_go(root):
    make_run(root, iterations=4)
    assert [span for span, _ in new(root)] == [(1, 2), (3, 4)]
    made = again(root, 1, Stage.ROLLOUT)
    assert new(root) == []
    assert chunks(root) == []
    before = need(root, "run", 1, Stage.REWARD, read_revisions(root, "run").seen(0))
    commit(root, before.model_copy(update={"revision": 1, "inputs": {**before.inputs, "rollout": made.digest}}))
    assert [span for span, _ in new(root)] == [(1, 1)]
    assert chunks(root) == [(1, 1)]
