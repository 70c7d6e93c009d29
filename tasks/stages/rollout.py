"""Stage `rollout`: the engines sample responses to the next prompts.

Prompt groups become durable piece by piece, so a crash costs the piece in work. Each sample has a seed of its own, made
from its place in the run, so that a piece generated again asks for the same samples.
"""

import hashlib
import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.manifest import Manifest, Part
from storage.parallel import each
from storage.parts import PartWriter, read_parts
from storage.schema import ROLLOUT, fingerprint
from storage.unfinished import find_piece, keep_piece
from tasks.data.prompts import draw, repetitions
from tasks.data.tokenizer import TextCodec
from tasks.engine.engine import Sampling
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.prepare import model_directory, prompts
from tasks.stages.served_weights import ensure_served
from tasks.stages.stage import StageOutput, StageResult
from tasks.workers.fleet import EngineHandle


def rollout(context: RunContext, iteration: int, prepared: Manifest, synced: Manifest) -> StageResult:
    """Sample `rollout.samples` responses to each of the next `rollout.prompts` prompts with the synced weights."""
    inputs = {"prepare": prepared, "weights": synced}
    return context.stage(iteration, Stage.ROLLOUT, inputs, lambda writer: _sample(context, writer, prepared, synced))


def sampling(context: RunContext, prepared: Manifest) -> Sampling:
    """How the run samples."""
    section = context.config.rollout
    stop = TextCodec.from_directory(model_directory(context, prepared)).stop_tokens
    return Sampling(
        temperature=section.temperature, top_p=section.top_p, max_tokens=section.max_tokens, stop_token_ids=stop
    )


def sample_seed(run_seed: int, position: int, sample: int) -> int:
    """Seed of one sample: 62 bits of a hash of its place in the run. `position` counts prompts since the start."""
    digest = hashlib.blake2b(f"{run_seed}/{position}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


def _sample(context: RunContext, writer: PartWriter, prepared: Manifest, synced: Manifest) -> StageOutput:
    section = context.config.rollout
    engines = ensure_served(context, prepared, synced)
    work = _Work(context, writer, synced, sampling(context, prepared))
    table = prompts(context, prepared, "train")
    cursor = number(synced.facts["cursor"])
    rows = draw(table.num_rows, cursor, section.prompts, context.config.run.seed, context.config.data.shuffle)
    repeats = repetitions(rows)
    starts = range(0, len(rows), section.groups_per_part)
    clock = time.perf_counter()

    def chosen(index: int) -> Chosen:
        place = slice(starts[index], starts[index] + section.groups_per_part)
        return Chosen(table.take(rows[place]), repeats[place], cursor + place.start)

    pieces = each(
        lambda index: work.piece(engines[index % len(engines)], index, chosen(index)), range(len(starts)), len(engines)
    )
    seconds = time.perf_counter() - clock
    parts = tuple(piece.part for piece in pieces)
    kept = next((index for index, piece in enumerate(pieces) if piece.kept), None)
    repeated = {} if kept is None else work.sample_again(engines[0], pieces[kept], chosen(kept))
    samples = pa.concat_tables([piece.table for piece in pieces])
    context.outbox.settle()  # they count only once the state that made them is durable
    return StageOutput(
        parts=parts,
        schema_fingerprint=fingerprint(ROLLOUT),
        facts={"cursor": cursor + section.prompts, "weight_version": synced.facts["weight_version"]},
        metrics={**rollout_metrics(samples, seconds if kept is None else None), **repeated},
    )


@dataclass(frozen=True)
class Chosen:
    """The prompts of one piece."""

    prompts: pa.Table
    repeats: NDArray[np.int64]
    """(groups,) how often each prompt stands earlier in this rollout: its samples are numbered on from there."""
    position: int
    """Prompts drawn since the run began, before the first of these."""


@dataclass(frozen=True)
class Piece:
    """A part of a rollout, its samples, and whether an earlier process made it."""

    part: Part
    table: pa.Table
    kept: bool


@dataclass(frozen=True)
class _Work:
    """What every piece of one rollout has in common."""

    context: RunContext
    writer: PartWriter
    synced: Manifest
    how: Sampling

    def piece(self, engine: EngineHandle, index: int, chosen: Chosen) -> Piece:
        """One piece: taken from storage if it was generated before with the same weights, else generated now."""
        name = f"{index:05d}-{self.synced.digest[:12]}"
        kept = find_piece(self.writer, name)
        if kept is not None:
            return Piece(kept, self._stored(kept), kept=True)
        table = self._generate(engine, chosen)
        part = self.writer.write_table(f"groups-{index:05d}.arrow", table, ROLLOUT)
        first = keep_piece(self.writer, name, part)
        return Piece(first, table if first == part else self._stored(first), kept=False)

    def _stored(self, part: Part) -> pa.Table:
        return read_parts(self.writer.root, [part], ROLLOUT)

    def sample_again(self, engine: EngineHandle, kept: Piece, chosen: Chosen) -> dict[str, float]:
        """Generate a piece of an earlier process once more, and count the samples that come out bit for bit the same.

        What a crash lost cannot be compared; what the same process left can, so it is known whether the engine gives
        the same samples for the same seeds.
        """
        columns = ["response_tokens", "logprobs", "finish_reason"]
        before = kept.table.select(columns).combine_chunks()
        again = self._generate(engine, chosen).select(columns).combine_chunks()
        equal = sum(before.slice(row, 1).equals(again.slice(row, 1)) for row in range(before.num_rows))
        return {"sampled_again": float(before.num_rows), "sampled_again_equal": float(equal)}

    def _generate(self, engine: EngineHandle, chosen: Chosen) -> pa.Table:
        config, groups = self.context.config, range(chosen.prompts.num_rows)
        n, first = config.rollout.samples, chosen.position
        repeated = chosen.prompts.take(np.repeat(np.arange(len(groups)), n))
        seeds = [sample_seed(config.run.seed, first + group, sample) for group in groups for sample in range(n)]
        batch = engine.generate(repeated["prompt_tokens"].to_pylist(), seeds, self.how)
        columns = {
            "prompt_id": repeated["prompt_id"],
            "prompt_tokens": repeated["prompt_tokens"],
            "sample_id": pa.array((chosen.repeats[:, None] * n + np.arange(n)).reshape(-1)),  # (groups * n,)
            "seed": pa.array(seeds, pa.int64()),
            **{name: batch.column(name) for name in ("response_tokens", "logprobs", "finish_reason")},
            **self._constants(len(seeds)),
        }
        return pa.Table.from_arrays([_plain(columns[field.name], field.type) for field in ROLLOUT], schema=ROLLOUT)

    def _constants(self, rows: int) -> dict[str, pa.Array]:
        values = {
            "run": self.writer.run,
            "iteration": self.writer.iteration,
            "weight_version": self.synced.facts["weight_version"],
            "temperature": self.how.temperature,
            "top_p": self.how.top_p,
            "max_tokens": self.how.max_tokens,
        }
        return {name: pa.repeat(pa.scalar(value, ROLLOUT.field(name).type), rows) for name, value in values.items()}


def _plain(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    chunked = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    return chunked.cast(kind)


def rollout_metrics(table: pa.Table, seconds: float | None) -> dict[str, float]:
    """Figures for people about a rollout table; `seconds` is None if not all of it was sampled in that time."""
    lengths = table["response_tokens"].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    truncated = (table["finish_reason"].to_numpy() == "length").mean()
    return {
        "tokens": float(lengths.sum()),
        **({} if seconds is None else {"tokens_per_second": float(lengths.sum()) / seconds}),
        "response_length": float(lengths.mean()),
        "truncated": float(truncated),
    }


def number(value: object) -> int:
    """A whole number from a manifest's facts."""
    if not isinstance(value, int):
        raise TypeError(f"a whole number was stored, {value!r} was read")
    return value
