"""Conversion of rows of files to the columns of our tables."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from storage.errors import InputError
from storage.schema import REWARD, ROLLOUT
from storage.turns import UNKNOWN, of_each_token, one_turn
from tasks.importing.columns import KINDS, Column, FileRows, any_of, lengths_of

_INT32 = 2**31 - 1
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32
_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True)
class ImportOrder:
    files: tuple[str, ...]  # paths or URLs of .jsonl, .json or .parquet files
    run: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of the files by property of a sample; by default the column has our name."""
    temperature: float | None = None  # temperature of all samples, if no column has it
    logprobs: bool = True
    """The samples must have log-probabilities. Without, only losses that weigh no advantages train on them."""


def mapped(texts: Iterable[str]) -> dict[str, str]:
    """Columns by property, from texts WHAT=COLUMN. Raises InputError: one has another form, or comes twice."""
    columns: dict[str, str] = {}
    for text in texts:
        what, equals, column = text.partition("=")
        if not (what and equals and column):
            raise InputError(f"{text!r} is not of the form WHAT=COLUMN, as in prompt_tokens=input_ids")
        if what in columns:
            raise InputError(f"{what} is to be both {columns[what]!r} and {column!r}: give one column for it")
        columns[what] = column
    return columns


@dataclass(frozen=True)
class SampleRows:
    """Some rows of a file, as the columns of our tables."""

    batch: FileRows
    order: ImportOrder

    @property
    def found(self) -> dict[str, str]:
        """Columns that the file has, by property."""
        wanted = {name: self.order.columns.get(name, name) for name in KINDS}
        return {name: column for name, column in wanted.items() if column in self.batch.columns}

    def tokens(self, name: str) -> pa.ListArray:
        """Token ids, which every row must have: (N rows) of int32."""
        if (column := self._column(name)) is None:
            why = "samples are trained on as the token ids that were sampled, because a text of them may give others"
            repair = f"Name the column of token ids with --map {name}=COLUMN"
            raise InputError(f"{self.batch.file} has no {name}: {why}. {repair}")
        lists = column.array()
        column.refuse(lengths_of(lists) == 0, "is empty")
        flat = _flat(lists)
        column.refuse(any_of(lists, (flat < 0) | (flat > _INT32)), "holds a number that is not a token id")
        return lists.cast(pa.list_(pa.int32()))

    def logprobs(self, responses: pa.ListArray) -> pa.ListArray:
        """Log-probabilities of the response tokens; NaN where they are not known."""
        if (column := self._column("logprobs")) is None and self.order.logprobs:
            fact = f"{self.batch.file} has no logprobs: without the log-probabilities of the policy that sampled"
            why = "no objective but maximum likelihood and preferences can be computed"
            repair = "Name their column with --map logprobs=COLUMN, or import with --without-logprobs and train with"
            raise InputError(f'{fact}, {why}. {repair} train.policy.loss.type = "sft"')
        if column is None:
            unknown = pa.array(np.full(len(responses.flatten()), np.nan, np.float32))
            return pa.ListArray.from_arrays(responses.offsets.cast(pa.int32()), unknown)
        lists = column.array()
        given = lengths_of(lists)
        column.refuse(given != lengths_of(responses), "has another length than response_tokens")
        flat = _flat(lists)
        column.refuse(any_of(lists, ~((flat <= 0) & (flat >= -_LARGEST))), "has a value above 0 or not finite")
        return lists.cast(pa.list_(pa.float32()))

    def sampled(self, responses: pa.ListArray) -> pa.ListArray:
        """True for each token of the responses that the policy sampled; all of them by default."""
        if (column := self._column("sampled")) is None:
            return of_each_token(responses, pa.scalar(True))
        lists = column.array()
        column.refuse(lengths_of(lists) != lengths_of(responses), "has another length than response_tokens")
        return lists

    def versions(self, responses: pa.ListArray) -> pa.ListArray:
        """Weight version of each token of the responses."""
        if (column := self._column("weight_version")) is None:
            return of_each_token(responses, pa.scalar(UNKNOWN, pa.int32()))
        lists, lengths = column.array(), lengths_of(responses)
        given, values = lengths_of(lists), _flat(lists)
        column.refuse((given != 1) & (given != lengths), "has another length than response_tokens")
        column.refuse(any_of(lists, (values < UNKNOWN) | (values > _INT32)), f"holds none from {UNKNOWN} to {_INT32}")
        each = values.astype(np.int32).repeat(np.where(given == 1, lengths, 1).repeat(given))
        return pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int32()), pa.array(each))

    def turns(self, responses: pa.ListArray) -> pa.ListArray:
        """Turns of the responses; one of the assistant by default, with the finish reason of the sample."""
        if (column := self._column("turns")) is None:
            return one_turn(lengths_of(responses), self._reasons())
        lists = column.array()
        needed = [lists.flatten().field(name) for name in ("role", "begin", "end")]
        lacking = np.logical_or.reduce([one.is_null().to_numpy(zero_copy_only=False) for one in needed])  # (turns,)
        column.refuse(any_of(lists, lacking), "holds a turn without role, begin or end")
        column.refuse(_with_gaps(lists, lengths_of(responses)), "does not cover response_tokens, turn after turn")
        return lists

    def prompts(self) -> tuple[list[str], list[int], pa.ListArray]:
        """Ids of the prompts, by default equal for equal tokens; a digest of their tokens, and the tokens."""
        tokens = self.tokens("prompt_tokens")
        digests = list(_digests(tokens))
        if (column := self._column("prompt_id")) is None:
            return [f"{digest:032x}"[:16] for digest in digests], digests, tokens
        ids = column.array()
        column.refuse(pc.equal(ids, "").to_numpy(zero_copy_only=False), "is empty")  # pyright: ignore[reportAttributeAccessIssue]
        return ids.to_pylist(), digests, tokens

    def sample_ids(self) -> list[int] | None:
        """Numbers of the samples within their prompts' groups, if the file has them."""
        found = self._numbers("sample_id", lambda one: (one >= 0) & (one <= _INT32))
        return None if found is None else found.to_pylist()

    def prompt_error(self, row: int, name: str, first: int) -> InputError:
        """Error for a prompt whose id another prompt had before."""
        column = self._column("prompt_id")
        assert column is not None
        return column.error(row, f"is {name!r}, as of sample {first}, but its prompt_tokens are others")

    def constants(self, run: str, iteration: int) -> dict[str, pa.Array]:
        """Columns that a row need not have."""
        seed = self._numbers("seed", lambda one: one >= UNKNOWN)
        top_p = self._numbers("top_p", lambda one: (one.astype(np.float32) > 0) & (one <= 1))
        found = {"seed": seed, "top_p": top_p, "temperature": self._temperature()}
        given = {"run": run, "iteration": iteration, "position": UNKNOWN, "again": 0, "seed": UNKNOWN}
        given |= {"top_k": 0, "min_p": 0.0, "top_p": 1.0, "routes": None}
        own = {name: _repeated(name, one, self.batch.rows) for name, one in given.items()}
        return own | {name: one for name, one in found.items() if one is not None}

    def scores(self, ids: pa.Array, numbers: pa.Array) -> pa.Table:
        """Rewards as a table of scores; missing ones are null."""
        column, rows = self._column("reward"), self.batch.rows
        rewards = pa.nulls(rows, pa.float64()) if column is None else column.array()
        there = rewards.is_valid()
        if column is not None:
            finite = np.abs(rewards.to_numpy(zero_copy_only=False)) <= _LARGEST
            column.refuse(there.to_numpy(zero_copy_only=False) & ~finite, "is not finite as float32")
        columns = {field.name: pa.nulls(rows, field.type) for field in REWARD}
        columns |= {
            "prompt_id": ids,
            "sample_id": numbers,
            "reward": rewards.cast(pa.float32()),
            "status": pc.if_else(there, "ok", "error"),  # pyright: ignore[reportAttributeAccessIssue]
            "detail": pc.if_else(there, "", "imported without a reward"),  # pyright: ignore[reportAttributeAccessIssue]
            "reason": pc.if_else(there, None, pa.scalar("no_number")),  # pyright: ignore[reportAttributeAccessIssue]
        }
        return pa.Table.from_arrays([columns[name] for name in REWARD.names], schema=REWARD)

    def _column(self, name: str) -> Column | None:
        if (found := self.found.get(name)) is not None:
            return Column(self.batch, name, found)
        if name in self.order.columns:
            there = ", ".join(self.batch.names)
            fact = f"{self.batch.file} has no column {self.order.columns[name]!r} for {name}"
            raise InputError(f"{fact}: its columns are {there}")
        return None

    def _numbers(self, name: str, right: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> pa.Array | None:
        if (column := self._column(name)) is None:
            return None
        found = column.array()
        values = found.to_numpy(zero_copy_only=False)
        wrong = ~right(values)
        column.refuse(wrong, f"is {values[int(np.argmax(wrong))] if len(wrong) else 0}, which it cannot be")
        return found.cast(ROLLOUT.field(name).type)

    def _temperature(self) -> pa.Array:
        if (found := self._numbers("temperature", lambda one: (one >= 0) & (one <= _LARGEST))) is not None:
            return found
        if self.order.temperature is None:
            fact = f"{self.batch.file} does not say at which temperature the samples were drawn"
            repair = "name its column with --map temperature=COLUMN, or give --temperature"
            raise InputError(f"{fact}, without which log-probabilities mean nothing: {repair}")
        return _repeated("temperature", self.order.temperature, self.batch.rows)

    def _reasons(self) -> pa.Array:
        if (column := self._column("finish_reason")) is None:
            return pa.repeat("stop", self.batch.rows)
        found = column.array()
        known = pc.is_in(found, value_set=pa.array(_REASONS)).to_numpy(zero_copy_only=False)  # pyright: ignore[reportAttributeAccessIssue]
        column.refuse(~known, f"is none of {', '.join(_REASONS)}")
        return found


def check_temperature(temperature: float | None) -> None:
    """Refuse a temperature at which nothing can be sampled. Raises InputError: it is negative or not finite."""
    if temperature is not None and not (math.isfinite(temperature) and 0 <= temperature <= _LARGEST):
        raise InputError(f"--temperature {temperature} cannot be used: give a finite number of at least 0")


def _repeated(name: str, value: object, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, ROLLOUT.field(name).type), rows)


def _flat(lists: pa.ListArray) -> NDArray[Any]:
    return lists.flatten().to_numpy(zero_copy_only=False)


def _with_gaps(lists: pa.ListArray, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True for each sample whose turns do not follow one another from token 0 to its last, (N,)."""
    begins, ends = (lists.flatten().field(name).to_numpy(zero_copy_only=False) for name in ("begin", "end"))
    given = lengths_of(lists)
    last = np.cumsum(given) - 1
    before = np.append(0, ends)[:-1]  # where each should begin
    before[np.cumsum(given)[:-1][given[1:] > 0]] = 0
    wrong = any_of(lists, (begins != before) | (ends < begins)) | (given == 0)
    return wrong | (np.append(ends, 0)[last] != lengths)


def _digests(tokens: pa.ListArray) -> Iterator[int]:
    flat, offsets = _flat(tokens), tokens.offsets.to_numpy()
    starts = offsets - offsets[0]
    return (xxhash.xxh3_128_intdigest(flat[a:b].tobytes()) for a, b in itertools.pairwise(starts))
