"""Rows of files as the columns of our tables."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from storage.errors import InputError
from storage.schema import REWARD
from tasks.importing.files import Batch

UNKNOWN = -1
"""Weight version and seed of a sample that does not say them."""


@dataclass(frozen=True)
class ImportOrder:
    """What is asked for."""

    files: tuple[str, ...]
    """Paths or URLs of .jsonl or .parquet files."""
    run: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of the files by what it becomes; what is not named is looked for under our own name."""
    temperature: float | None = None
    """At which all samples were drawn, if no column says so."""
    logprobs: bool = True
    """Whether the samples must have log-probabilities. Without, only maximum likelihood can be trained on them."""


def mapped(text: str) -> tuple[str, str]:
    """Read WHAT=COLUMN: the column that a property is in.

    Raises:
        InputError: it has another form.
    """
    what, equals, column = text.partition("=")
    if not (what and equals and column):
        raise InputError(f"{text!r} is not of the form WHAT=COLUMN, as in prompt_tokens=input_ids")
    return what, column


@dataclass
class Rows:
    """Some rows of a file, as the columns of our tables."""

    batch: Batch
    order: ImportOrder
    found: dict[str, str] = field(default_factory=dict)

    def column(self, name: str) -> pa.Array | None:
        """The column that becomes `name`, if the file has it."""
        wanted = self.order.columns.get(name, name)
        if wanted in self.batch.table.column_names:
            self.found[name] = wanted
            return self.batch.table[wanted].combine_chunks()
        if name in self.order.columns:
            there = ", ".join(self.batch.names)
            raise InputError(f"{self.batch.file} has no column {wanted!r} for {name}: its columns are {there}")
        return None

    def lists(self, name: str, kind: pa.DataType) -> pa.Array:
        """A list column that every row must have."""
        column = self.column(name)
        if column is None:
            raise InputError(
                f"{self.batch.file} has no {name}: samples are trained on as the token ids that were sampled, because "
                f"a text made of them may give others. Name the column of token ids with --map {name}=COLUMN"
            )
        return self._cast(name, column, pa.list_(kind), required=True)

    def logprobs(self, responses: pa.Array) -> pa.Array:
        """Log-probabilities of the response tokens; NaN where they are not known."""
        column = self.column("logprobs")
        if column is None and self.order.logprobs:
            raise InputError(
                f"{self.batch.file} has no logprobs: without the log-probabilities of the policy that sampled, no "
                "objective but maximum likelihood and preferences can be computed. Name their column with --map "
                "logprobs=COLUMN, "
                'or import with --without-logprobs and train with train.policy.loss.type = "sft"'
            )
        if column is None:
            unknown = pa.array(np.full(len(responses.flatten()), np.nan, np.float32))
            return pa.ListArray.from_arrays(responses.offsets.cast(pa.int32()), unknown)
        values = self._cast("logprobs", column, pa.list_(pa.float32()), required=True)
        lengths = (pc.list_value_length(one).to_numpy() for one in (values, responses))  # pyright: ignore[reportAttributeAccessIssue]
        self._refuse(np.not_equal(*lengths), "logprobs has another length than response_tokens")
        flat = values.flatten().to_numpy(zero_copy_only=False)
        wrong = ~(flat <= 0) | ~np.isfinite(flat)
        self._refuse(_any_of(values, wrong), "a log-probability is above 0 or not finite")
        return values

    def texts(self, name: str) -> list[str] | None:
        column = self.column(name)
        return None if column is None else self._cast(name, column, pa.string(), required=True).to_pylist()

    def numbers(self, name: str, kind: pa.DataType, default: float | None) -> pa.Array | None:
        column = self.column(name)
        if column is not None:
            return self._cast(name, column, kind, required=True)
        return None if default is None else pa.repeat(pa.scalar(default, kind), self.batch.table.num_rows)

    def constants(self, run: str, iteration: int) -> dict[str, pa.Array]:
        """The columns that a row need not have."""
        rows = self.batch.table.num_rows
        reasons = self.texts("finish_reason") or ["stop"] * rows
        return {
            "run": pa.repeat(run, rows),
            "iteration": pa.repeat(pa.scalar(iteration, pa.int32()), rows),
            "finish_reason": pa.array(reasons),
            "weight_version": self.numbers("weight_version", pa.int32(), UNKNOWN),
            "seed": self.numbers("seed", pa.int64(), UNKNOWN),
            "temperature": self._temperature(),
            "top_p": self.numbers("top_p", pa.float32(), 1.0),
        }

    def scores(self, ids: pa.Array, numbers: pa.Array) -> pa.Table:
        """Rewards as a table of scores; those that are not there or not finite are null."""
        column = self.column("reward")
        kind, rows = pa.float32(), self.batch.table.num_rows
        given = pa.nulls(rows, kind) if column is None else self._cast("reward", column, kind, required=False)
        rewards = pc.if_else(pc.is_finite(given), given, None)  # pyright: ignore[reportAttributeAccessIssue]
        columns = {field.name: pa.nulls(rows, field.type) for field in REWARD}
        there = rewards.is_valid()
        columns |= {
            "prompt_id": ids,
            "sample_id": numbers,
            "reward": rewards,
            "status": pc.if_else(there, "ok", "error"),  # pyright: ignore[reportAttributeAccessIssue]
            "detail": pc.if_else(there, "", "imported without a finite reward"),  # pyright: ignore[reportAttributeAccessIssue]
            "reason": pc.if_else(there, None, pa.scalar("no_number")),  # pyright: ignore[reportAttributeAccessIssue]
        }
        return pa.Table.from_arrays([columns[name] for name in REWARD.names], schema=REWARD)

    def _temperature(self) -> pa.Array:
        found = self.numbers("temperature", pa.float32(), self.order.temperature)
        if found is None:
            raise InputError(
                f"{self.batch.file} does not say at which temperature the samples were drawn, and log-probabilities "
                "mean nothing without: name its column with --map temperature=COLUMN, or give --temperature"
            )
        return found

    def _cast(self, name: str, column: pa.Array, kind: pa.DataType, *, required: bool) -> pa.Array:
        try:
            cast = column.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InputError(
                f"{self.batch.file}: {self.found[name]!r} cannot become {name} ({kind}): {error}"
            ) from None
        if required:
            self._refuse(cast.is_null().to_numpy(zero_copy_only=False), f"{name} is null")
        if pa.types.is_list(kind) and required:
            nulls = cast.flatten().is_null().to_numpy(zero_copy_only=False)
            self._refuse(_any_of(cast, nulls), f"{name} holds a null")
        return cast

    def _refuse(self, wrong: NDArray[np.bool_], fact: str) -> None:
        if wrong.any():
            row = self.batch.first + int(np.argmax(wrong)) + 1
            raise InputError(f"{self.batch.file}, sample {row}: {fact}. Correct the file, or leave that sample out")


def prompt_ids(prompts: pa.Array) -> list[str]:
    """Ids of prompts that have none: equal for equal tokens."""
    flat, offsets = prompts.flatten().to_numpy(), prompts.offsets.to_numpy()
    starts = offsets - offsets[0]
    return [xxhash.xxh3_128_hexdigest(flat[a:b].tobytes())[:16] for a, b in itertools.pairwise(starts)]


def _any_of(lists: pa.Array, wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether any value of a row is wrong: (sum of lengths,) -> (N,)."""
    lengths = pc.list_value_length(lists).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    rows = np.repeat(np.arange(len(lists)), lengths)
    return np.bincount(rows[wrong], minlength=len(lists)) > 0
