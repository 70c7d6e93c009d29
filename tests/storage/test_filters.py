"""Conditions as text: the rows that they keep, against an evaluator of a few lines, and their refusals."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import InputError
from storage.filters import parse_filter

SCHEMA = pa.schema(
    [
        ("reward", pa.float32()),
        ("weight_version", pa.int32()),
        ("seed", pa.int64()),
        ("finish_reason", pa.string()),
        ("response_tokens", pa.list_(pa.int32())),
        ("components", pa.map_(pa.string(), pa.float32())),
    ]
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "reward": st.none() | st.sampled_from([0.0, 0.1, 0.5, -1.0, 1.0]),
            "weight_version": st.none() | st.integers(0, 4),
            "seed": st.none() | st.sampled_from([0, 1, 2**53 + 1, 2**62]),
            "finish_reason": st.none()
            | st.sampled_from(
                ["stop", "length", "it's", '"'],
            ),
            "response_tokens": st.none() | st.lists(st.integers(0, 9), max_size=3),
            "components": st.none() | st.just([("form", 0.5)]) | st.just([]),
        }
    ),
    min_size=1,
    max_size=6,
)


def column(name):
    return name, lambda row: row[name]


def rounded(value):
    return float(np.float32(value))


NUMBERS = st.sampled_from(
    [
        column("weight_version"),
        (
            "length(response_tokens)",
            lambda row: None if row["response_tokens"] is None else len(row["response_tokens"]),
        ),
        ("2", lambda _: 2),
        ("-1.5", lambda _: -1.5),
        (
            "(weight_version + 1) * 2",
            lambda row: None if row["weight_version"] is None else (row["weight_version"] + 1) * 2,
        ),
        (
            "3 - weight_version / 2",
            lambda row: None if row["weight_version"] is None else 3 - row["weight_version"] / 2,
        ),
        ("-weight_version", lambda row: None if row["weight_version"] is None else -row["weight_version"]),
    ]
)
SIGNS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def lifted(compare):
    return lambda a, b: None if a is None or b is None else compare(a, b)


def form(row):
    return dict(row["components"] or []).get("form")


ATOMS = st.one_of(
    st.builds(
        lambda a, sign, b: (f"{a[0]} {sign} {b[0]}", lambda row: lifted(SIGNS[sign])(a[1](row), b[1](row))),
        NUMBERS,
        st.sampled_from(list(SIGNS)),
        NUMBERS,
    ),
    st.builds(
        lambda sign, value: (
            f"reward {sign} {value}",
            lambda row: lifted(SIGNS[sign])(None if row["reward"] is None else rounded(row["reward"]), rounded(value)),
        ),
        st.sampled_from(list(SIGNS)),
        st.sampled_from([0.1, 0, 1e-3, -1]),
    ),
    st.sampled_from(
        [
            ("reward is null", lambda row: row["reward"] is None),
            ("components is not null", lambda row: row["components"] is not None),
            ("components.form >= 0.5", lambda row: lifted(SIGNS[">="])(form(row), 0.5)),
            ("finish_reason = 'it\\'s'", lambda row: lifted(SIGNS["=="])(row["finish_reason"], "it's")),
            ("finish_reason IN ('stop', \"length\")", lambda row: among(row["finish_reason"], ("stop", "length"))),
            ("weight_version not in (1, 3.0)", lambda row: negated(among(row["weight_version"], (1, 3)))),
            ("seed = 9007199254740993", lambda row: lifted(SIGNS["=="])(row["seed"], 2**53 + 1)),
            ("true", lambda _: True),
        ]
    ),
)


def among(value, values):
    return None if value is None else value in values


def negated(truth):
    return None if truth is None else not truth


def both(a, b):
    return False if a is False or b is False else None if a is None or b is None else True


def either(a, b):
    return negated(both(negated(a), negated(b)))


CONDITIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        inner.map(lambda one: (f"not ({one[0]})", lambda row: negated(one[1](row)))),
        st.tuples(inner, inner).map(
            lambda two: (f"({two[0][0]}) and ({two[1][0]})", lambda row: both(two[0][1](row), two[1][1](row)))
        ),
        st.tuples(inner, inner).map(
            lambda two: (f"({two[0][0]}) OR ({two[1][0]})", lambda row: either(two[0][1](row), two[1][1](row)))
        ),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(CONDITIONS, ROWS)
def test_a_condition_keeps_the_rows_for_which_it_is_true(condition, rows):
    text, true_of = condition
    table = pa.Table.from_pylist([{**row, "place": place} for place, row in enumerate(rows)], SCHEMA.append(PLACE))
    kept = table.filter(parse_filter(text, SCHEMA))["place"].to_pylist()
    assert kept == [place for place, row in enumerate(rows) if true_of(row) is True], text


PLACE = pa.field("place", pa.int32())
TABLE = pa.table({"a": [1, 2, 3], "b": [3, 2, 1], "c": [1, 1, 1]}, pa.schema([(name, pa.int32()) for name in "abc"]))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a = 1 or a = 2 and b = 9", [1]),
        ("not a = 1 and b = 1", [3]),
        ("a + b * 2 = 7", [1]),
        ("(a + b) * 2 = 8 and a - b - c = 1", [3]),
        ("a / 0 > 1", [1, 2, 3]),
        ("a < 3000000000", [1, 2, 3]),
    ],
)
def test_operators_bind_as_in_sql(text, kept):
    assert TABLE.filter(parse_filter(text, TABLE.schema))["a"].to_pylist() == kept


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("rewad > 0", 1, "did you mean 'reward'"),
        ("reward > 0 and q", 16, "columns are reward, weight_version"),
        ("reward", 1, "neither true nor false"),
        ("reward >", 9, "at its end: a column or a value is missing"),
        ("reward > 'x'", 8, "compares a number with a text"),
        ("(reward > 0", 12, "it ends what begins at position 1"),
        ("reward > 0 reward", 12, "should end here"),
        ("response_tokens > 3", 17, r"write length\(column\)"),
        ("finish_reason = 'a", 17, "close the quotation mark"),
        ("reward == null", 11, "is null"),
        ("reward ; drop", 8, "quotation marks"),
        ("", 1, "is missing"),
        ("seed > 99999999999999999999", 8, "64 bits"),
        ("reward in (1, 'a')", 15, "must be a number"),
        ("reward in 1", 11, "in parentheses"),
        ("reward not 1", 12, "belongs to 'in'"),
        ("reward is 1", 11, "is null"),
        ("finish_reason + 1 > 2", 1, "calculate with numbers"),
        ("finish_reason.x > 2", 15, "only a map has keys"),
        ("length(reward) > 2", 1, "only a list has a length"),
        ("__import__('os').system('x')", 1, "no such column"),
        ("(" * 200, 102, "more than 100 conditions"),
        ("not " * 200 + "true", 405, "more than 100 conditions"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_its_position(text, position, words):
    with pytest.raises(InputError, match=rf"position {position}, .*{words}"):
        parse_filter(text, SCHEMA)


def test_a_long_filter_works_up_to_its_limit():
    table = pa.table({"seed": pa.array([5, 6], pa.int64())})
    members = ", ".join(["1"] * 6000 + ["5"])
    assert table.filter(parse_filter(f"seed in ({members})", SCHEMA)).num_rows == 1
    chain = " or ".join(["seed=1"] * 1900 + ["seed=5"])
    assert table.filter(parse_filter(chain, SCHEMA)).num_rows == 1
    with pytest.raises(InputError, match="characters"):
        parse_filter(f"seed in ({members}, {members})", SCHEMA)


@pytest.mark.parametrize("text", ["reward = 0.1", "0.1 = reward", "reward in (3, 0.1)", "components.form = 0.1"])
def test_a_number_is_what_a_column_of_float32_stores_of_it(text):
    row = {"reward": 0.1, "components": [("form", 0.1)]}
    table = pa.Table.from_pylist([row, {"reward": 0.10001, "components": []}], SCHEMA)
    assert table.filter(parse_filter(text, SCHEMA))["reward"].to_pylist() == [rounded(0.1)]
