import itertools
import math
import tracemalloc
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from storage.backends.root import open_root
from storage.errors import StageFailed
from storage.manifest import Manifest
from storage.parts import PartWriter
from storage.schema import BRANCHES, PROMPTS, REWARD, ROLLOUT
from tasks.stages.names import Stage
from tests.storage.tables import rollout_table, scored_table
from tests.trainer_core.models import examples_of
from trainer_core.batches.reading import read_samples, solved_examples

# (prompt id, sample id, prompt tokens, response tokens)
SAMPLES = [("b", 0, [1, 2], [3]), ("b", 1, [1, 2], [4, 5]), ("a", 0, [6], [7, 8, 9]), ("a", 1, [6], [])]
REWARDS = {("a", 1): 0.0, ("a", 0): 0.5, ("b", 1): None, ("b", 0): 1.0}  # in another order


@pytest.fixture
def root(tmp_path):
    return open_root(f"file://{tmp_path}")


def store(root, stage, schema, *tables):
    return store_tables(root, stage, schema, [pa.Table.from_pylist(rows, schema) for rows in tables])


def store_tables(root, stage, schema, tables):
    writer = PartWriter(root, "run", 1, stage)
    parts = [writer.write_table(f"{stage}-{number}.arrow", table, schema) for number, table in enumerate(tables)]
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return Manifest(
        run="run", iteration=1, stage=stage, parts=tuple(parts), config_digest="", code_version="", started=moment,
        finished=moment,
    )  # fmt: skip


def rollout_row(prompt_id, sample_id, prompt, response):
    return {
        "run": "run", "iteration": 1, "prompt_id": prompt_id, "sample_id": sample_id, "prompt_tokens": prompt,
        "response_tokens": response, "logprobs": [-float(token) for token in response],
        "position": 0, "again": 0, "sampled": [True] * len(response), "weight_version": [0] * len(response),
        "turns": [{"role": "assistant", "begin": 0, "end": len(response), "finish_reason": "stop"}],
        "seed": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 4,
    }  # fmt: skip


def reward_row(key, reward):
    status = "ok" if reward is not None else "error"
    return {"prompt_id": key[0], "sample_id": key[1], "reward": reward, "status": status, "detail": ""}


def rollouts(root):
    rows = [rollout_row(*sample) for sample in SAMPLES]
    return store(root, Stage.ROLLOUT, ROLLOUT, rows[:1], rows[1:])  # two parts


def test_rollouts_and_rewards_are_joined_by_sample(root):
    rewards = store(root, Stage.REWARD, REWARD, [reward_row(*item) for item in REWARDS.items()])
    samples = read_samples(root, rollouts(root), rewards)
    assert samples.tokens.tolist() == [1, 2, 3, 1, 2, 4, 5, 6, 7, 8, 9, 6]
    assert samples.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert samples.response_lengths.tolist() == [1, 2, 3, 0]
    assert samples.engine_logprobs.tolist() == [-3, -4, -5, -7, -8, -9]
    assert samples.rewards.tolist() == [1.0, 0.0, 0.5, 0.0]
    assert samples.groups[0] == samples.groups[1] != samples.groups[2] == samples.groups[3]


def test_without_reward_or_response_a_sample_is_not_usable(root):
    rewards = store(root, Stage.REWARD, REWARD, [reward_row(*item) for item in REWARDS.items()])
    assert read_samples(root, rollouts(root), rewards).usable.tolist() == [True, False, True, False]


def routed(root, routes):
    rows = [rollout_row(*sample) | {"routes": given} for sample, given in zip(SAMPLES, routes, strict=True)]
    return store(root, Stage.ROLLOUT, ROLLOUT, rows[:1], rows[1:])


def test_usable_samples_have_routes_for_each_token_but_the_last(root):
    rewards = store(root, Stage.REWARD, REWARD, [reward_row(*item) for item in REWARDS.items()])
    samples = read_samples(root, routed(root, [b"abcd", None, b"efghij", None]), rewards, routes=True)
    assert samples.routes is not None
    assert samples.routes.tobytes() == b"abcd" + bytes(6) + b"efghij"  # two bytes for each of 2, 3, 3 and 0 positions
    assert read_samples(root, rollouts(root), rewards).routes is None
    for given in (
        [b"abcd", None, None, None],
        [b"abcd", None, b"efgh", None],
        [None] * 4,
        [b"abcde", None, b"efghij", None],
    ):
        with pytest.raises(StageFailed, match=r"sample \('.*', 0\) has . bytes of routes for . tokens: sample with"):
            read_samples(root, routed(root, given), rewards, routes=True)


def test_other_branches_come_before_the_row_of_their_sample_with_its_reward(root):
    rewards = store(root, Stage.REWARD, REWARD, [reward_row(*item) for item in REWARDS.items()])
    others = [rollout_row("a", 0, [6, 7], [1, 2]), rollout_row("b", 0, [9], [8]), rollout_row("a", 0, [5], [4])]
    table = pa.Table.from_pylist(others, ROLLOUT)
    part = PartWriter(root, "run", 1, Stage.ROLLOUT).write_table(BRANCHES, table, ROLLOUT)
    (first, second), branches = rollouts(root).parts, part.model_copy(update={"rows": None})
    manifest = rollouts(root).model_copy(update={"parts": (first, second, branches)})
    samples = read_samples(root, manifest, rewards)
    assert samples.branches.tolist() == [2, 1, 3, 1]
    assert samples.owners.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert samples.rows.tolist() == [1, 2, 5, 6]
    assert samples.tokens.tolist() == [9, 8, 1, 2, 3, 1, 2, 4, 5, 6, 7, 1, 2, 5, 4, 6, 7, 8, 9, 6]
    assert samples.rewards.tolist() == [1.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.0]
    assert samples.usable.tolist() == [True, True, False, True, True, True, False]
    assert samples.groups.tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert samples.sample_lengths.tolist() == [2, 2, 6, 0]
    lost = manifest.model_copy(update={"parts": (second, branches)})
    with pytest.raises(StageFailed, match=r"1 samples have no row, but a branch, first \('b', 0\)"):
        read_samples(root, lost, rewards)


def test_a_sample_without_reward_row_is_named(root):
    rewards = store(root, Stage.REWARD, REWARD, [reward_row(*item) for item in list(REWARDS.items())[:3]])
    with pytest.raises(StageFailed, match=r"1 samples have no reward row, first \('b', 0\)"):
        read_samples(root, rollouts(root), rewards)


def test_a_score_that_is_no_number_is_no_score(root):
    # the unchecked result of a user's function
    rewards = {**REWARDS, ("a", 0): math.nan, ("b", 0): math.inf}
    samples = read_samples(
        root, rollouts(root), store(root, Stage.REWARD, REWARD, [reward_row(*item) for item in rewards.items()])
    )
    assert not samples.usable.any()
    assert samples.rewards.tolist() == [0.0] * 4


def row_by_row(table, scores):
    """The same join by a dictionary of Python objects."""
    of = {(row["prompt_id"], row["sample_id"]): row["reward"] for row in scores.to_pylist()}
    keys = [(row["prompt_id"], row["sample_id"]) for row in table.to_pylist()]
    rewards = np.array([of[key] or 0.0 for key in keys], np.float32)
    groups = np.unique([prompt for prompt, _ in keys], return_inverse=True)[1].astype(np.int32)
    return rewards, groups, np.array([of[key] is not None for key in keys])


@pytest.mark.parametrize("seed", range(5))
def test_the_join_is_that_of_a_dictionary(root, seed):
    random = np.random.default_rng(seed)
    table = rollout_table(40, 4, seed)
    names = ["p1", "p10", "P1", "", "Ω", "\U0001f600", "é", *(f"p{number}" for number in random.permutation(500)[:33])]
    prompts = pa.array(np.repeat(np.array(names, object), 4).tolist())
    table = table.set_column(2, ROLLOUT.field("prompt_id"), prompts).take(random.permutation(160))
    # some are scored twice, some are not requested, some have no score
    rows = np.concatenate((random.permutation(160), random.integers(0, 160, 30)))
    values = [None if value < 0.2 else round(value, 2) - 0.6 for value in random.random(190).tolist()]
    values[5] = -0.0
    scores = scored_table(table.take(rows), values)
    other = scores.slice(0, 1).set_column(0, REWARD.field("prompt_id"), pa.array(["of another iteration"]))
    scores = pa.concat_tables([other, scores])
    cuts = [0, *sorted(random.integers(0, 160, 3).tolist()), 160]
    pieces = [table.slice(start, stop - start) for start, stop in itertools.pairwise(cuts)]
    found = read_samples(root, store_tables(root, Stage.ROLLOUT, ROLLOUT, pieces),
                         store_tables(root, Stage.REWARD, REWARD, [scores.slice(0, 77), scores.slice(77)]))  # fmt: skip
    rewards, groups, scored = row_by_row(table, scores)
    for mine, theirs in ((found.rewards, rewards), (found.groups, groups), (found.usable, scored)):
        assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes())


def test_a_reward_table_without_rows_is_no_score(root):
    with pytest.raises(StageFailed, match=r"4 samples have no reward row, first \('b', 0\)"):
        read_samples(root, rollouts(root), store(root, Stage.REWARD, REWARD, []))


@pytest.mark.parametrize(("rows", "length"), [(20_000, 100), (100_000, 1)], ids=["tokens", "samples"])
def test_neither_tokens_nor_samples_become_objects(root, rows, length):
    table = rollout_table(rows // 4, 4)
    random = np.random.default_rng(0)
    columns = {"prompt_tokens": np.int32, "response_tokens": np.int32, "logprobs": np.float32}
    for name, kind in columns.items():
        values = pa.array(random.integers(300, 1000, rows * length).astype(kind))
        column = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * length), values)
        table = table.set_column(ROLLOUT.get_field_index(name), ROLLOUT.field(name), column)
    scores = scored_table(table, random.random(rows))
    stages = store_tables(root, Stage.ROLLOUT, ROLLOUT, [table]), store_tables(root, Stage.REWARD, REWARD, [scores])
    tracemalloc.start()
    samples = read_samples(root, *stages)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples.tokens) == 2 * rows * length
    assert peak < 2 * table.nbytes


def test_solved_examples_are_those_with_an_answer():
    rows = {
        "prompt_id": ["a", "b", "c"],
        "prompt": ["a", "b", "c"],
        "prompt_tokens": [[5], [6, 7], [8]],
        "answer": ["x", None, "z"],
        "answer_tokens": [[1, 2], None, [3]],
        "record": ["{}"] * 3,
    }
    found = solved_examples(pa.table(rows, schema=PROMPTS))
    expected = examples_of([([5], [1, 2]), ([8], [3])])
    for name in ("tokens", "prompt_lengths", "response_lengths"):
        np.testing.assert_array_equal(vars(found)[name], vars(expected)[name])
        assert vars(found)[name].dtype == vars(expected)[name].dtype
