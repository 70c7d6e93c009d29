"""The share of groups from which nothing can be learned."""

import pyarrow as pa
import pytest

from storage.schema import REWARD
from tasks.rewards.scoring import equal_groups


def table(**groups: list[float | None]) -> pa.Table:
    rows = [(name, number, score) for name, scores in groups.items() for number, score in enumerate(scores)]
    columns = {
        "prompt_id": [name for name, _, _ in rows],
        "sample_id": [number for _, number, _ in rows],
        "reward": [score for _, _, score in rows],
        "status": ["ok"] * len(rows),
        "detail": [""] * len(rows),
    }
    return pa.table({name: columns.get(name) for name in REWARD.names if name in columns}).cast(
        pa.schema([REWARD.field(name) for name in columns])
    )


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ({"a": [0.0, 0.0], "b": [1.0, 1.0, 1.0]}, 1.0),
        ({"a": [0.0, 0.0], "b": [0.0, 1.0]}, 0.5),
        ({"a": [0.0, 0.5], "b": [0.1, 0.2]}, 0.0),
        ({"a": [0.0, None], "b": [None, None], "c": [0.0, None, 1.0], "d": [1.0]}, 0.75),
    ],
)
def test_a_group_counts_if_no_sample_can_have_an_advantage(groups, share):
    assert equal_groups(table(**groups)) == share


def test_rows_of_a_group_may_be_apart():
    mixed = table(a=[0.0, 1.0], b=[1.0, 1.0]).take([2, 0, 3, 1])
    assert equal_groups(mixed) == 0.5
