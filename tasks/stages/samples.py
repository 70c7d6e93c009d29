"""Samples of a rollout: sampling settings, seeds, increments that are kept, their table and its metrics."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from storage.backends.root import Root
from storage.schema import ROLLOUT
from storage.turns import finish_reasons, sampled_lengths
from storage.unfinished import Grown, IncrementRecord, find_increments, keep_increment, listed_increments
from tasks.engine.protocol import Begun, Every, Increment, Sampling
from tasks.stages.names import Stage
from tasks.stages.prepared import text_codec
from tasks.stages.stage import Work
from tasks.stages.views import Prepared
from tasks.workers.interface import EngineHandle
from tasks.workers.sampling import Batch, Growing, sample

WORLD, HELD_OUT_WORLD = -1, -2
"""Numbers of the samples that stand for the environment, which is the same for all samples of a prompt: of training,
and of evaluations."""


def sampling(work: Work, prepared: Prepared) -> Sampling:
    """Sampling parameters of the run."""
    given = work.config.rollout.model_dump(include=set(Sampling.model_fields))
    return Sampling(**given, stop_token_ids=text_codec(work.context, prepared).stop_tokens)


def sample_seed(run_seed: int, position: int, sample: int, again: int = 0, redrawn: int = 0) -> int:
    """Seed of one sample: 62 bits of a hash of its place in the run. `position` counts prompts since the start; `again`
    is the revision, if the rollout is done again with other seeds; the position was drawn so often before
    (`redrawn`)."""
    place = f"{run_seed}/{position}/{sample}" + (f"/{again}" if again else "") + (f"+{redrawn}" if redrawn else "")
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2


def reseeded(work: Work) -> int:
    """The revision whose rerun asked for other seeds of this rollout; 0 if none did."""
    number = work.writer.revision
    rerun = work.context.revisions.rerun(number) if number else None
    here = (work.iteration, Stage.ROLLOUT)
    return number if rerun is not None and rerun.new_seeds and (rerun.iteration, rerun.stage) == here else 0


def sample_table(work: Work, how: Sampling, columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> pa.Table:
    """The table `rollout` of samples with these columns; those that are the same for all are added."""
    values = {
        "run": work.writer.run,
        "iteration": work.iteration,
        "again": 0,
        "top_k": how.top_k,
        "min_p": how.min_p,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "max_tokens": how.max_tokens,
        "routes": None,
    }
    rows = len(columns["seed"])
    same = {name: pa.repeat(pa.scalar(value, ROLLOUT.field(name).type), rows) for name, value in values.items()}
    whole = {**same, **columns}
    return pa.table({name: whole[name] for name in ROLLOUT.names}).cast(ROLLOUT)


def rollout_metrics(table: pa.Table, seconds: float | None) -> dict[str, float]:
    """Metrics of a rollout table; `seconds` is None if not all of it was sampled in that time."""
    lengths = sampled_lengths(table["sampled"])
    routes = pc.sum(pc.binary_length(table["routes"])).as_py()  # pyright: ignore[reportAttributeAccessIssue]
    truncated = (finish_reasons(table["turns"]).to_numpy(zero_copy_only=False) == "length").mean()
    return {
        "tokens": float(lengths.sum()),
        **({} if seconds is None else {"tokens_per_second": float(lengths.sum()) / seconds}),
        "response_length": float(lengths.mean()),
        "truncated": float(truncated),
        **({"routes_bytes": float(routes)} if routes else {}),
    }


class Growth:
    """The increments of some pieces, by the place of a piece among them."""

    def __init__(self, root: Root, pieces: Sequence[str]) -> None:
        """Find what earlier processes have stored of the pieces with these keys."""
        self._root, self.pieces = root, pieces
        self._stored = find_increments(root, pieces)
        self._next = [len(records) for records in self._stored]

    def begun(self, place: int, before: Sequence[Begun]) -> list[Begun]:
        """The beginnings of the responses of a piece, which were there `before` it."""
        begun = list(before)
        for record in self._stored[place]:
            for one in record.grown():
                if one.first == len(begun[one.row].tokens):  # else another process was ahead of its writer
                    begun[one.row] = begun[one.row].grown(Begun(one.tokens, one.logprobs))
        return begun

    def keep(self, place: int, increments: Sequence[Increment]) -> None:
        """Store increments of a piece, all of one weight version."""
        self._next[place] = keep_increment(self._root, self.pieces[place], self._next[place], _record(increments))


def sample_batches(
    work: Work,
    engines: Sequence[EngineHandle],
    batches: Sequence[Batch],
    how: Sampling,
    ready: Callable[[int, pa.RecordBatch], None],
    version: int,
    growth: Growth | None,
) -> None:
    """`sample` as the run's configuration says, with increments that are kept as `growth`."""
    every, ahead = work.config.rollout.increments, 2 * work.config.engine.max_num_seqs
    growing = Growing(Every(every.tokens, every.seconds), growth.keep) if growth else None
    sample(engines, batches, how, ready, ahead, lambda _: work.context.go_on(), version, growing)


def keep_left(root: Root, engines: Sequence[EngineHandle]) -> None:
    """Store what engines have sampled of pieces for which nobody waits any more: others go on from there."""
    for engine in engines:
        for piece, left in engine.drop().items():
            keep_increment(root, piece, len(listed_increments(root, piece).get(piece, [])), _record(left))


def _record(increments: Sequence[Increment]) -> IncrementRecord:
    grown = [Grown(one.row, one.first, *one.grown) for one in increments]
    return IncrementRecord.of(grown, increments[0].weight_version)
