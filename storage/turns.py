"""Turns of samples, and what follows from them and from the columns of tokens of the table `rollout`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from storage.schema import TURN

UNKNOWN = -1
"""Weight version of a token that was not sampled or whose weights are not known; seed and position of such a sample."""


def one_turn(lengths: NDArray[np.int64], reasons: pa.Array) -> pa.ListArray:
    """Turns of plain answers with these lengths and finish reasons, (N,): one of the assistant for each."""
    rows = len(lengths)
    known = {
        "role": pa.repeat("assistant", rows),
        "begin": pa.array(np.zeros(rows, np.int32)),
        "end": pa.array(lengths.astype(np.int32)),
        "finish_reason": reasons,
    }
    columns = [known.get(field.name, pa.nulls(rows, field.type)) for field in TURN]
    turns = pa.StructArray.from_arrays(columns, fields=list(TURN))
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), turns)


def of_each_token(responses: pa.ListArray, value: pa.Scalar) -> pa.ListArray:
    offsets = responses.offsets.to_numpy()
    starts = pa.array(offsets - offsets[0], pa.int32())
    return pa.ListArray.from_arrays(starts, pa.repeat(value, int(offsets[-1] - offsets[0])))


def finish_reasons(turns: pa.ChunkedArray) -> pa.Array:
    """The finish reason of the last turn of each sample that has one, (N,): how it ended. Null if none has."""
    column = turns.combine_chunks()
    reasons = column.flatten().field("finish_reason")
    there = np.flatnonzero(reasons.is_valid().to_numpy(zero_copy_only=False))
    last = np.full(len(column), UNKNOWN)
    last[_rows(column)[there]] = there  # of several the last one stays
    return reasons.take(pa.array(last, mask=last < 0))


def with_finish_reasons(samples: pa.Table) -> pa.Table:
    """The table with a column `finish_reason` more: how each sample ended."""
    return samples.append_column("finish_reason", finish_reasons(samples["turns"]))


def sampled_lengths(sampled: pa.ChunkedArray) -> NDArray[np.int64]:
    """Number of sampled tokens of each sample, (N,)."""
    column = sampled.combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return np.bincount(_rows(column)[flat], minlength=len(column))


def weight_versions(table: pa.Table) -> tuple[pa.Array, pa.Array]:
    """The oldest and the newest weight version that sampled a token of each sample, (N,) each; null where none did."""
    column, sampled = (table[name].combine_chunks() for name in ("weight_version", "sampled"))
    versions = column.flatten().to_numpy(zero_copy_only=False)
    begins = np.append(0, np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False)))
    if not pc.all(sampled.flatten()).as_py():  # pyright: ignore[reportAttributeAccessIssue] - made at import
        own = sampled.flatten().to_numpy(zero_copy_only=False)
        versions, begins = versions[own], np.append(0, np.cumsum(own))[begins]
    # begins: (N + 1,) places among the sampled tokens
    there = np.diff(begins) > 0
    oldest, newest = np.zeros((2, len(column)), np.int32)
    if there.any():
        oldest[there] = np.minimum.reduceat(versions, begins[:-1][there])
        newest[there] = np.maximum.reduceat(versions, begins[:-1][there])
    return pa.array(oldest, mask=~there), pa.array(newest, mask=~there)


def ended_by(row: Mapping[str, Any]) -> str | None:
    """The finish reason of a row of the table `rollout`, as in `finish_reasons`."""
    return next((one["finish_reason"] for one in reversed(row["turns"]) if one["finish_reason"]), None)


def sampled_by(row: Mapping[str, Any]) -> tuple[int, ...]:
    """The weight versions that sampled a row of the table `rollout`, oldest first."""
    return tuple(sorted({one for one, own in zip(row["weight_version"], row["sampled"], strict=True) if own}))


def _rows(column: pa.ListArray) -> NDArray[np.int64]:
    """Row of each value of a list column, (sum of lengths,)."""
    return np.repeat(np.arange(len(column)), column.value_lengths().to_numpy(zero_copy_only=False))
