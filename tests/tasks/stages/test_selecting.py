"""Selections of stored rollouts: each sample once, whole groups, in bounded memory."""

from datetime import timedelta
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from storage.backends.root import Root, open_root
from storage.errors import InputError, StorageError
from storage.manifest import Manifest, commit, need, revisions
from storage.parts import PartWriter
from storage.revisions import record_choice, record_rerun
from storage.schema import REWARD, ROLLOUT, SELECTION
from storage.upkeep.fork import fork
from tasks.config.retrain import RetrainSection
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.selecting import SeenHashes, Selecting, hashes_of, rollouts
from tests.storage.revised import choice, rerun
from tests.storage.runs import DOCUMENT, GROUPS, SAMPLES, make_iteration, make_run, reward_table
from tests.storage.tables import list_column, read_stored_table, rollout_table, scored_table

PER_ITERATION = GROUPS * SAMPLES
NAMES = ("prompt_tokens", "response_tokens")


@pytest.fixture
def root(tmp_path) -> Root:
    return open_root(str(tmp_path / "runs"))


def section(*select: str, **given) -> RetrainSection:
    return RetrainSection.model_validate({"start": "run@1", "select": select or ("run",), **given})


def selected(root: Root, given: RetrainSection) -> tuple[list[pa.Table], Selecting]:
    selecting, shares = Selecting(given), []
    for rollout in rollouts(root, given):
        shares += selecting.add(rollout)
        if selecting.full:
            break
    return [*shares, *selecting.rest()], selecting


def whole(root: Root, *select: str, **given) -> pa.Table:
    return pa.concat_tables(selected(root, section(*select, **given))[0])


def scores(table: pa.Table) -> dict[tuple[str, int], float | None]:
    return {(row["prompt_id"], row["sample_id"]): row["reward"] for row in table.to_pylist()}


def test_samples_are_joined_with_their_own_scores(root: Root):
    make_run(root, iterations=2)
    table = whole(root)
    assert table.schema.equals(SELECTION, check_metadata=True)
    assert table.num_rows == 2 * PER_ITERATION
    for iteration in (1, 2):
        stored = read_stored_table(root, need(root, "run", iteration, Stage.REWARD))
        assert scores(table.filter(pc.field("iteration") == iteration)) == scores(stored)


def test_a_filter_sees_samples_and_scores_together(root: Root):
    make_run(root, iterations=3)
    kept = whole(root, where="reward > 0.2 and oldest_version >= 1 and finish_reason = 'stop'")
    # of three samples the second has no score and the third 0.5; iteration 1 was sampled by version 0
    assert sorted(set(kept["iteration"].to_pylist())) == [2, 3]
    assert set(kept["sample_id"].to_pylist()) == {2}
    assert kept.num_rows == 2 * GROUPS


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "shares"), [(1, 12), (4, 6), (10, 3), (23, 2), (25, 1)])
def test_shares_hold_whole_groups_of_similar_number(root: Root, samples: int, shares: int):
    make_run(root, iterations=3)
    found, _ = selected(root, section(samples=samples))
    assert len(found) == shares
    groups = [set(share["group"].to_pylist()) for share in found]
    assert all(max(one) < min(other) for one, other in pairwise(groups))
    assert [len(share) for share in found[:-1]] == [-(-samples // SAMPLES) * SAMPLES] * (shares - 1)
    assert len(found[-1]) >= min(samples / 2, 36)


def test_a_group_is_one_prompt_of_one_rollout(root: Root):
    make_run(root, iterations=2)
    table = whole(root)
    places = table.select(["iteration", "prompt_id", "group", "source"]).to_pylist()
    assert len({(row["iteration"], row["prompt_id"]) for row in places}) == len({row["group"] for row in places}) == 8
    assert {(row["iteration"], row["source"]) for row in places} == {(1, 0), (2, 1)}


def test_what_a_fork_shares_with_its_parent_counts_once(root: Root):
    make_run(root, "run", iterations=2)
    fork(root, WORKFLOW, "run", 1, "child", "c1", DOCUMENT)
    make_iteration(root, "child", 2)
    assert whole(root, "run", "child").num_rows == 3 * PER_ITERATION
    assert whole(root, "child", "run").num_rows == 3 * PER_ITERATION
    assert whole(root, "child@1")["run"].unique().to_pylist() == ["run"]
    assert whole(root, "run@1", "run@1-2", "run").num_rows == 2 * PER_ITERATION


@pytest.mark.slow
def test_samples_of_another_root_are_selected_by_its_url(root: Root, tmp_path):
    other = open_root(str(tmp_path / "other"))
    make_run(root, iterations=1)
    make_run(other, iterations=2)
    table, selecting = selected(root, section("run", f"{other.url}//run@2"))
    assert sum(map(len, table)) == 2 * PER_ITERATION
    assert [(one.root, one.iteration) for one in selecting.sources] == [(None, 1), (other.url, 2)]


def chosen(root: Root, iteration: int, stage: Stage) -> None:
    """Record that a stage was redone, as revision 1, which is the head now."""
    record_rerun(root, "run", rerun(iteration, stage, 1))
    record_choice(root, "run", choice(1), 1)


def again(root: Root, iteration: int, seed: int, revision: int = 1, **more: object) -> Manifest:
    """Store another revision of a rollout, with its scores; it is the head."""
    before = need(root, "run", iteration, Stage.ROLLOUT)
    table = rollout_table(GROUPS, SAMPLES, seed, iteration, iteration - 1)
    part = PartWriter(root, "run", iteration, Stage.ROLLOUT).write_table("again.arrow", table, ROLLOUT)
    rollout = commit(root, before.model_copy(update={"revision": revision, "parts": (part,), **more}))
    rewards = scored_table(table, [9.0] * table.num_rows)
    part = PartWriter(root, "run", iteration, Stage.REWARD).write_table("again.arrow", rewards, REWARD)
    scored = need(root, "run", iteration, Stage.REWARD)
    inputs = {**scored.inputs, "rollout": rollout.digest}
    commit(root, scored.model_copy(update={"revision": revision, "parts": (part,), "inputs": inputs}))
    chosen(root, iteration, Stage.ROLLOUT)
    return rollout


def test_the_head_revision_counts_and_all_if_asked(root: Root):
    make_run(root, iterations=1)
    made = again(root, 1, seed=77)
    head = whole(root)
    assert set(head["revision"].to_pylist()) == {1}
    assert head["response_tokens"].to_pylist() == read_stored_table(root, made)["response_tokens"].to_pylist()
    both = whole(root, revisions="all")
    assert both["revision"].value_counts().to_pylist() == [{"values": 0, "counts": 12}, {"values": 1, "counts": 12}]
    assert len(set(both["group"].to_pylist())) == 2 * GROUPS
    first = both.filter(pc.field("revision") == 0)
    assert scores(first) == scores(read_stored_table(root, next(revisions(root, "run", 1, Stage.REWARD))))
    assert set(both.filter(pc.field("revision") == 1)["reward"].to_pylist()) == {9.0}


@pytest.mark.slow
@pytest.mark.parametrize(("select", "revisions"), [(("run",), "head"), (("run@1", "run"), "head"), (("run",), "all")])
def test_a_choice_meanwhile_does_not_mix_revisions(root: Root, select: tuple[str, ...], revisions: str):
    """The selection reads all rollouts of a run, and all scores, from the head at the time of its first read."""
    make_run(root, iterations=3)
    record_rerun(root, "run", rerun(1, Stage.ROLLOUT, 1))
    for iteration in (1, 2, 3):
        redone(root, iteration)
    before = selected(root, section(*select, revisions=revisions))[1].sources
    selecting = Selecting(section(*select, revisions=revisions))
    for number, rollout in enumerate(rollouts(root, selecting.section)):
        if number == 0:
            record_choice(root, "run", choice(1), 1)
        list(selecting.add(rollout))
    assert selecting.sources == before
    assert {one.head for one in before} == {0}
    assert {one.revision for one in before} == ({0} if revisions == "head" else {0, 1})
    after = selected(root, section(*select, revisions=revisions))[1].sources
    assert {one.head for one in after} == {1}
    assert {one.revision for one in after} == ({1} if revisions == "head" else {0, 1})


def redone(root: Root, iteration: int) -> None:
    """A rollout and its scores as revision 1, which no choice has made the head yet."""
    before, scored = (need(root, "run", iteration, stage) for stage in (Stage.ROLLOUT, Stage.REWARD))
    made = commit(root, before.model_copy(update={"revision": 1, "facts": {**before.facts, "again": 1}}))
    commit(root, scored.model_copy(update={"revision": 1, "inputs": {**scored.inputs, "rollout": made.digest}}))


def test_equal_samples_are_taken_once(root: Root):
    make_run(root, iterations=1)
    again(root, 1, seed=1)  # the same tokens as revision 0
    table, selecting = selected(root, section(revisions="all", deduplicate=True))
    assert (sum(map(len, table)), selecting.duplicates) == (PER_ITERATION, PER_ITERATION)


def test_tokens_that_are_divided_elsewhere_are_not_equal():
    lists = pa.list_(pa.int32())
    split = [([1, 2], [3]), ([1], [2, 3]), ([1, 2], [3])]
    columns = {name: pa.array([one[place] for one in split], lists) for place, name in enumerate(NAMES)}
    assert SeenHashes().add(hashes_of(pa.table(columns))).tolist() == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "rows"), [(1, 0), (5, 3), (18, 18), (99, 36)])
def test_a_limit_counts_whole_groups(root: Root, limit: int, rows: int):
    make_run(root, iterations=3)
    shares, selecting = selected(root, section(limit=limit))
    assert sum(map(len, shares)) == selecting.rows == rows


def test_only_what_is_new_enough(root: Root):
    make_run(root, iterations=2)
    newer = need(root, "run", 2, Stage.ROLLOUT)
    again(root, 2, seed=1, finished=newer.finished + timedelta(hours=2))
    assert set(whole(root, since=newer.finished + timedelta(hours=1))["iteration"].to_pylist()) == {2}
    assert selected(root, section(since=newer.finished + timedelta(hours=3)))[1].examined == 0


def test_a_rollout_without_scores_waits_for_them_or_for_new_ones(root: Root):
    make_run(root, iterations=2)
    root.remove(need(root, "run", 2, Stage.REWARD).key)
    assert set(whole(root)["iteration"].to_pylist()) == {1}
    assert whole(root, rescore=True)["reward"].null_count == PER_ITERATION + GROUPS


def test_scores_that_name_a_sample_twice_are_refused(root: Root):
    make_run(root, iterations=1)
    rollout = need(root, "run", 1, Stage.ROLLOUT)
    table = read_stored_table(root, rollout)
    twice = scored_table(pa.concat_tables([table, table.slice(0, 1)]), [0.0] * 13)
    part = PartWriter(root, "run", 1, Stage.REWARD).write_table("twice.arrow", twice, REWARD)
    commit(root, need(root, "run", 1, Stage.REWARD).model_copy(update={"revision": 1, "parts": (part,)}))
    chosen(root, 1, Stage.REWARD)
    with pytest.raises(StorageError, match="a sample twice"):
        whole(root)


@pytest.mark.parametrize(
    ("select", "words"),
    [("other", "no run 'other'"), ("run@5-9", "only those of iterations 1 to 1"), ("run@0", "iterations 1 to 1")],
)
def test_what_is_not_there_cannot_be_selected(root: Root, select: str, words: str):
    make_run(root, iterations=1)
    with pytest.raises(InputError, match=words):
        selected(root, section(select))


def test_hashes_are_new_once():
    random = np.random.default_rng(0)
    seen, before = SeenHashes(), set()
    for _ in range(60):
        hashes = random.integers(0, 400, random.integers(0, 30)).astype(np.uint64)
        expected = []
        for one in hashes.tolist():
            expected.append(one not in before)
            before.add(one)
        assert seen.add(hashes).tolist() == expected


def many_groups(root: Root, iterations: int) -> None:
    """A run in which each iteration has 500 groups of two samples, 100 tokens each."""
    make_run(root, iterations=0)
    random = np.random.default_rng(0)
    for iteration in range(1, iterations + 1):
        rows = 1000
        lists = {
            "response_tokens": list_column(np.full(rows, 100), np.int32, random),
            "logprobs": list_column(np.full(rows, 100), np.float32, random),
        }
        small = rollout_table(500, 2, iteration, iteration)
        table = pa.Table.from_arrays([lists.get(name, small[name]) for name in ROLLOUT.names], schema=ROLLOUT)
        writers = [PartWriter(root, "run", iteration, stage) for stage in (Stage.ROLLOUT, Stage.REWARD)]
        given = need(root, "run", 0, Stage.PREPARE).model_copy(update={"iteration": iteration, "facts": {}})
        part = writers[0].write_table("samples.arrow", table, ROLLOUT)
        rollout = commit(root, given.model_copy(update={"stage": Stage.ROLLOUT, "parts": (part,)}))
        part = writers[1].write_table("scores.arrow", reward_table(table), REWARD)
        inputs = {"rollout": rollout.digest}
        commit(root, given.model_copy(update={"stage": Stage.REWARD, "parts": (part,), "inputs": inputs}))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_selection(root: Root):
    many_groups(root, 24)

    def peak(last: int) -> int:
        selecting, before, most = Selecting(section(f"run@1-{last}", samples=600)), pa.total_allocated_bytes(), 0
        for rollout in rollouts(root, selecting.section):
            for share in selecting.add(rollout):
                most = max(most, pa.total_allocated_bytes() - before)
                del share
        assert selecting.rows == last * 1000
        return most

    small, large = peak(4), peak(24)
    assert large < 1.5 * small, (small, large)
