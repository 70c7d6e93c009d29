"""Stage `rollout`: the engines sample responses to the next prompts. Prompt groups become durable piece by piece, so a
crash costs only the piece in progress. Each sample has its own seed, derived from its place in the run, so that a piece
generated again requests the same samples."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from storage.digest import value_digest
from storage.errors import StageFailed
from storage.manifest import Part
from storage.parts import read_parts, row_views
from storage.schema import BRANCHES, ROLLOUT, fingerprint
from storage.turns import of_each_token, one_turn, sampled_lengths
from storage.unfinished import find_piece, find_scores, keep_piece, piece_key
from tasks.engine.protocol import NOTHING, ROUTES, Sampling
from tasks.environments.conversation import Played, Task
from tasks.environments.scores import Kept, branches_of
from tasks.environments.trajectory import columns_of
from tasks.stages.context import Portion
from tasks.stages.conversations import environment_source, play, tasks_of
from tasks.stages.draws import Groups, Refill, drawn
from tasks.stages.in_flight import Flight
from tasks.stages.names import Stage
from tasks.stages.prepared import model_directory, text_codec
from tasks.stages.samples import (
    WORLD,
    Growth,
    reseeded,
    rollout_metrics,
    sample_batches,
    sample_seed,
    sample_table,
    sampling,
)
from tasks.stages.served_weights import ensure_served
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import ENVIRONMENT, PLAYED, SCORES, Prepared, Rollouts, Served
from tasks.workers.interface import EngineHandle
from tasks.workers.sampling import Batch

_SAMPLED = ["response_tokens", "logprobs", "turns", "routes"]


@stage(Stage.ROLLOUT, ("prepare", "weights", "drawn"), Rollouts)
def rollout(work: Work, prepared: Prepared, served: Served, before: Prepared | Rollouts) -> StageOutput:
    """Sample `rollout.samples` responses to each of the `rollout.prompts` prompts that follow those of the rollout
    `before`, or the first ones, with the served weights; with `rollout.most_prompts` also to further prompts. With
    `rollout.updates = "in-flight"` the responses that the rollout before has left open go on."""
    engines = ensure_served(work.context, prepared, served)
    work.context.sampling()
    if work.config.rollout.updates == "in-flight":
        return Flight(work, prepared, served, before, sampling(work, prepared)).fly(engines)
    sampler = _Sampler(work, prepared, served, before.cursor, sampling(work, prepared))
    refill, tally = Refill(work, prepared, sampler.decides), _Tally(work)
    pieces, seconds = list[Piece](), 0.0
    while count := refill.next:
        some = drawn(work, prepared, before.cursor, refill.drawn, count)
        clock = time.perf_counter()
        made = sampler.pieces(engines, some, tally.of(count), len(pieces))
        seconds += time.perf_counter() - clock
        refill.add(some, pa.concat_tables([piece.table for piece in made]), sampler.played(some))
        pieces += made
    groups = refill.groups
    kept = next((index for index, piece in enumerate(pieces) if piece.kept), None)
    repeated = (
        {} if kept is None or work.config.environment else sampler.sample_again(engines, pieces[kept], groups[kept])
    )
    samples = pa.concat_tables([piece.table for piece in pieces])
    _check_rows(samples, groups, work.config.rollout.samples)
    ahead = work.config.rollout.ahead
    if not ahead:  # samples count only once the state that made them is durable; else the outbox keeps the order
        work.context.outbox.settle()
    stale = {"staleness": float(work.iteration - 1 - served.weight_version)} if ahead else {}
    return StageOutput(
        parts=(*(piece.part for piece in pieces), *sampler.parts_of(samples, refill.played), *refill.parts),
        schema_fingerprint=fingerprint(ROLLOUT),
        facts={
            "cursor": before.cursor + refill.drawn,
            "weight_version": served.weight_version,
            **refill.facts,
            **({ENVIRONMENT: dict(sampler.sources)} if sampler.sources else {}),
        },
        metrics={**rollout_metrics(samples, seconds if kept is None else None), **repeated, **stale, **refill.metrics},
    )


@dataclass(frozen=True)
class Piece:
    """A part of a rollout, its samples, and whether an earlier process made it."""

    part: Part
    table: pa.Table
    kept: bool


class _Tally:
    """Tells how many samples there are of those that are wanted, after each piece."""

    def __init__(self, work: Work) -> None:
        self._work, self._clock, self._lock = work, time.perf_counter(), threading.Lock()
        self._wanted = self._done = self._tokens = 0

    def of(self, prompts: int) -> Callable[[Piece], Piece]:
        """Counter of pieces when so many more prompts are drawn."""
        self._wanted += prompts * self._work.config.rollout.samples
        return self._count

    def _count(self, piece: Piece) -> Piece:
        with self._lock:
            self._done += piece.table.num_rows
            self._tokens += 0 if piece.kept else int(sampled_lengths(piece.table["sampled"]).sum())
            self._work.context.page.advanced(
                Portion(
                    self._work.iteration, Stage.ROLLOUT, self._done, self._wanted, "samples",
                    self._tokens, time.perf_counter() - self._clock,
                )
            )  # fmt: skip
        return piece


@dataclass(frozen=True)
class _Sampler:
    """The sampling of one rollout, piece by piece."""

    work: Work
    prepared: Prepared
    served: Served
    cursor: int  # prompts drawn before
    how: Sampling

    def pieces(
        self, engines: list[EngineHandle], groups: list[Groups], told: Callable[[Piece], Piece], before: int
    ) -> list[Piece]:
        """All pieces: read from storage if the same inputs were sampled before, else sampled and stored now."""
        pieces = {index: told(piece) for index, one in enumerate(groups) if (piece := self._kept(one)) is not None}
        missing = [index for index in range(len(groups)) if index not in pieces]

        def store(number: int, found: Mapping[str, pa.Array], scores: Sequence[dict[str, JsonValue]] = ()) -> None:
            index = missing[number]
            pieces[index] = told(self._store(before + index, groups[index], self._table(groups[index], found), scores))

        wanted = [groups[index] for index in missing]
        if self.work.config.environment is not None:
            self._play(engines, wanted, store)
        else:
            growth = Growth(self.work.root, [self._key(one) for one in wanted])
            self._sample(engines, wanted, lambda number, found: store(number, self._answers(found)), growth)
        return [pieces[index] for index in range(len(groups))]

    def _kept(self, groups: Groups) -> Piece | None:
        kept = find_piece(self.work.writer, self._name(groups))
        return None if kept is None else Piece(kept, read_parts(self.work.root, [kept], ROLLOUT), kept=True)

    def played(self, groups: list[Groups]) -> list[Kept]:
        """Scores and courses of conversations in the order of their rows; none without environments."""
        if self.work.config.environment is None:
            return []
        documents = [one for some in groups for one in find_scores(self.work.writer, self._name(some))]
        return [Kept.model_validate(one) for one in documents]

    def parts_of(self, samples: pa.Table, played: Sequence[Kept]) -> list[Part]:
        """The parts with the rewards that environments gave for the samples, with how that went, and with the other
        branches if there are any; none without environments."""
        if not played:
            return []
        scores, courses = zip(*((one["score"], one["course"]) for one in map(Kept.document, played)), strict=True)
        write = self.work.writer.write_bytes
        course = write(PLAYED, json.dumps(courses).encode()).model_copy(update={"measured": True})
        parts = [write(SCORES, json.dumps(scores).encode()), course]
        if (branches := branches_of(samples, played)).num_rows:  # the tables with rows are the samples
            table = self.work.writer.write_table(BRANCHES, branches, ROLLOUT)
            parts.append(table.model_copy(update={"rows": None}))
        return parts

    def _store(self, index: int, groups: Groups, table: pa.Table, scores: Sequence[dict[str, JsonValue]]) -> Piece:
        part = self.work.writer.write_table(f"groups-{index:05d}.arrow", table, ROLLOUT)
        first = keep_piece(self.work.writer, self._name(groups), part, scores)
        return Piece(first, table if first == part else read_parts(self.work.root, [first], ROLLOUT), kept=False)

    def _name(self, groups: Groups) -> str:
        """The groups of a piece, and a digest of everything else that decides its samples: the run's configuration and
        its prompts are fixed."""
        first = groups.position - self.cursor
        return f"{first:06d}-{first + groups.prompts.num_rows:06d}-{value_digest(self.decides)[:16]}"

    @property
    def decides(self) -> list[JsonValue]:
        """Values that decide the samples and may change between two starts."""
        return [self.served.digest, self.work.config.engine.numbers, *self.sources.values()]

    @cached_property
    def sources(self) -> dict[str, str]:
        """`environment_source` of the run, read once for all pieces."""
        return environment_source(self.work.config)

    def _key(self, groups: Groups) -> str:
        return piece_key(self.work.writer, self._name(groups))

    def sample_again(self, engines: list[EngineHandle], kept: Piece, groups: Groups) -> dict[str, float]:
        """Sample a piece of an earlier process again, and count the samples that are bit-for-bit identical: whether the
        engine gives the same samples for the same seeds. Those that were lost in a crash cannot be compared."""
        again: list[pa.Table] = []
        self._sample(engines, [groups], lambda _, found: again.append(self._table(groups, self._answers(found))))
        before, after = (table.select(_SAMPLED).combine_chunks() for table in (kept.table, *again))
        equal = sum(before.slice(row, 1).equals(after.slice(row, 1)) for row in range(before.num_rows))
        return {"sampled_again": float(before.num_rows), "sampled_again_equal": float(equal)}

    def _sample(
        self,
        engines: list[EngineHandle],
        groups: list[Groups],
        ready: Callable[[int, pa.RecordBatch], None],
        growth: Growth | None = None,
    ) -> None:
        batches: list[Batch] = []
        for place, one in enumerate(groups):
            rows = row_views(self._repeated(one)["prompt_tokens"])
            begun, name = (growth.begun(place, [NOTHING] * len(rows)), growth.pieces[place]) if growth else ((), "")
            batches.append(Batch(rows, self._seeds(one), begun, name))
        sample_batches(self.work, engines, batches, self.how, ready, self.served.weight_version, growth)

    def _play(self, engines: list[EngineHandle], groups: list[Groups], store: Callable[..., None]) -> None:
        context, codec = self.work.context, text_codec(self.work.context, self.prepared)
        tasks = [(self._key(one), self._tasks(one)) for one in groups]

        def ready(number: int, played: list[Played]) -> None:
            store(number, columns_of([one.trajectory for one in played]), [one.kept.document() for one in played])

        model = model_directory(context, self.prepared)
        version, go_on = self.served.weight_version, context.go_on
        play(context.root, engines, version, context.config, codec, self.how, model, tasks, ready, go_on)

    def _tasks(self, groups: Groups) -> list[Task]:
        seed, again, samples = self.work.config.run.seed, reseeded(self.work), self.work.config.rollout.samples
        worlds = [sample_seed(seed, place, WORLD, again) for place in groups.positions for _ in range(samples)]
        return tasks_of(self._repeated(groups), groups.sample_ids(samples).tolist(), self._seeds(groups), worlds)

    def _repeated(self, groups: Groups) -> pa.Table:
        """The prompts with a row for each sample."""
        return groups.prompts.take(np.repeat(np.arange(groups.prompts.num_rows), self.work.config.rollout.samples))

    def _seeds(self, groups: Groups) -> list[int]:
        config, again = self.work.config, reseeded(self.work)
        samples = range(config.rollout.samples)
        return [sample_seed(config.run.seed, place, one, again) for place in groups.positions for one in samples]

    def _answers(self, completions: pa.RecordBatch) -> dict[str, pa.Array]:
        """Columns of plain answers."""
        responses = completions.column("response_tokens")
        return {
            "response_tokens": responses,
            "sampled": of_each_token(responses, pa.scalar(True)),
            "logprobs": completions.column("logprobs"),
            "weight_version": of_each_token(responses, pa.scalar(self.served.weight_version, pa.int32())),
            "turns": one_turn(responses.value_lengths().to_numpy(), completions.column("finish_reason")),
            **{name: completions.column(name) for name in completions.schema.names if name == ROUTES.name},
        }

    def _table(self, groups: Groups, sampled: Mapping[str, pa.Array]) -> pa.Table:
        repeated, seeds = self._repeated(groups), self._seeds(groups)
        columns = {
            "prompt_id": repeated["prompt_id"],
            "prompt_tokens": repeated["prompt_tokens"],
            "sample_id": pa.array(groups.sample_ids(self.work.config.rollout.samples)),
            "seed": pa.array(seeds, pa.int64()),
            "position": pa.array(np.repeat(groups.positions, self.work.config.rollout.samples)),
            **sampled,
        }
        return sample_table(self.work, self.how, columns)


def _check_rows(samples: pa.Table, groups: list[Groups], count: int) -> None:
    """Raises StageFailed: samples do not match the requested ones one to one."""
    names = pa.concat_tables([one.prompts.select(["prompt_id"]) for one in groups])["prompt_id"]
    expected = names.take(np.repeat(np.arange(len(names)), count)).combine_chunks()
    numbers = np.concatenate([one.sample_ids(count) for one in groups])
    same = samples["prompt_id"].combine_chunks().equals(expected)
    if not (same and np.array_equal(samples["sample_id"].to_numpy(), numbers)):
        raise StageFailed(
            f"the pieces of this rollout hold {samples.num_rows} samples that are not the {len(expected)} "
            "requested; nothing was committed. Check the pieces with `ratchet verify`, and report this as a bug"
        )
