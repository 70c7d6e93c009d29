"""Figures that follow from turns and from the columns of tokens."""

import numpy as np
import pyarrow as pa

from storage.schema import ROLLOUT
from storage.turns import finish_reasons, of_each_token, one_turn, sampled_lengths, weight_versions

TURNS = [
    [
        {"role": "assistant", "begin": 0, "end": 2, "finish_reason": "stop"},
        {"role": "tool", "begin": 2, "end": 3},
        {"role": "assistant", "begin": 3, "end": 4, "finish_reason": "length"},
    ],
    [{"role": "assistant", "begin": 0, "end": 1, "finish_reason": "stop"}, {"role": "tool", "begin": 1, "end": 2}],
    [{"role": "tool", "begin": 0, "end": 1}],
]
SAMPLED = [[True, True, False, True], [True, False], [False]]
VERSIONS = [[3, 3, -1, 5], [4, -1], [-1]]


def table() -> pa.Table:
    columns = {"turns": TURNS, "sampled": SAMPLED, "weight_version": VERSIONS}
    halves = [{name: rows[some] for name, rows in columns.items()} for some in (slice(0, 1), slice(1, 3))]
    schema = pa.schema([ROLLOUT.field(name) for name in columns])
    return pa.concat_tables([pa.table(half, schema=schema) for half in halves])


def test_a_sample_ended_as_its_last_turn_that_was_sampled():
    assert finish_reasons(table()["turns"]).to_pylist() == ["length", "stop", None]


def test_only_sampled_tokens_count():
    assert sampled_lengths(table()["sampled"]).tolist() == [3, 1, 0]
    assert sampled_lengths(table()["sampled"].slice(1)).tolist() == [1, 0]


def test_versions_are_those_of_sampled_tokens():
    oldest, newest = weight_versions(table())
    assert (oldest.to_pylist(), newest.to_pylist()) == ([3, 4, None], [5, 4, None])


def test_versions_of_rows_of_which_all_is_sampled_or_that_are_empty():
    schema = pa.schema([ROLLOUT.field(name) for name in ("sampled", "weight_version")])
    rows = pa.table({"sampled": [[], [True, True], []], "weight_version": [[], [7, 6], []]}, schema=schema)
    assert [one.to_pylist() for one in weight_versions(rows)] == [[None, 6, None], [None, 7, None]]


def test_a_plain_answer_is_one_turn_of_the_assistant():
    turns = one_turn(np.array([2, 0]), pa.array(["stop", "length"]))
    assert turns.type == ROLLOUT.field("turns").type
    known = [{name: one[name] for name in ("role", "begin", "end", "finish_reason")} for (one,) in turns.to_pylist()]
    assert known == [
        {"role": "assistant", "begin": 0, "end": 2, "finish_reason": "stop"},
        {"role": "assistant", "begin": 0, "end": 0, "finish_reason": "length"},
    ]


def test_a_value_for_each_token_of_a_slice():
    responses = pa.array([[1], [2, 3], []], pa.list_(pa.int32())).slice(1)
    assert of_each_token(responses, pa.scalar(7)).to_pylist() == [[7, 7], []]
