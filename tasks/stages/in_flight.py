"""Responses that new weights find in flight (`rollout.updates = "in-flight"`): a rollout goes on with those that the
one before it has left open.

Open responses grow in rounds of `rollout.pause_tokens` tokens each, until `rollout.prompts` groups are complete. These
are the rollout's samples, in the order in which they were complete; the others are stored with it, for the next one. So
lengths alone decide which weights sample a token, and not time."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.digest import value_digest
from storage.manifest import Part
from storage.parts import list_column, read_parts, row_views
from storage.schema import ROLLOUT, fingerprint
from storage.turns import finish_reasons, of_each_token, one_turn
from storage.unfinished import find_piece, keep_piece, piece_key
from tasks.engine.protocol import NOTHING, Begun, Sampling, TokenIds
from tasks.stages.context import Portion
from tasks.stages.draws import drawn
from tasks.stages.names import Stage
from tasks.stages.samples import Growth, reseeded, rollout_metrics, sample_batches, sample_seed, sample_table
from tasks.stages.stage import StageOutput, Work
from tasks.stages.views import IN_FLIGHT, Prepared, Rollouts, Served
from tasks.workers.interface import EngineHandle
from tasks.workers.sampling import Batch


class ResponseInFlight(NamedTuple):
    """A response, as far as it is sampled."""

    seed: int
    begun: Begun = NOTHING
    versions: NDArray[np.int32] = np.empty(0, np.int32)  # weight version of each token
    reason: str | None = None  # its end; None while it is open


@dataclass(frozen=True)
class GroupInFlight:
    """The responses to one prompt."""

    prompt_id: str
    prompt: TokenIds
    position: int
    again: int  # number of earlier draws of the position
    responses: tuple[ResponseInFlight, ...]

    @property
    def complete(self) -> bool:
        """True if every response has ended."""
        return all(one.reason is not None for one in self.responses)

    @property
    def length(self) -> int:
        """Tokens of each of its open responses: they began together."""
        return max(len(one.versions) for one in self.responses if one.reason is None)

    def staleness(self, iteration: int) -> int:
        """Updates by which its oldest token is behind the weights that an iteration trains; 0 without a token."""
        oldest = min((int(one.versions.min()) for one in self.responses if len(one.versions)), default=iteration - 1)
        return iteration - 1 - oldest


SAMPLED_AS = "sampled_as"  # fact of a rollout
Row = tuple[GroupInFlight, int, ResponseInFlight]  # a response with its number within its group, or its prompt


class _Piece(NamedTuple):
    name: str
    limit: int  # tokens at which its responses pause
    rows: list[Row]  # its open responses, with their numbers


@dataclass(frozen=True)
class Flight:
    """The responses of one rollout, and the weights that it samples with."""

    work: Work
    prepared: Prepared
    served: Served
    before: Prepared | Rollouts
    how: Sampling

    @cached_property
    def _carried(self) -> list[GroupInFlight]:
        """Groups that the rollout before has left."""
        left = self.before.manifest
        return _groups(self._read(left.part(IN_FLIGHT))) if IN_FLIGHT in left.part_names else []

    @cached_property
    def sampled_as(self) -> str:
        """Digest of what a response keeps to its end: its settings and numbers of sampling, and its seed's source."""
        config = self.work.config
        numbers = [config.engine.numbers, config.rollout.samples, config.run.seed]
        return value_digest([self.how.model_dump(mode="json"), *numbers])

    @cached_property
    def left_out(self) -> list[GroupInFlight]:
        """Groups that are too old; all, if they were begun under other settings, or other seeds are asked for."""
        if reseeded(self.work) or self.before.manifest.facts.get(SAMPLED_AS) != self.sampled_as:
            return self._carried
        bound = self.work.config.rollout.max_staleness
        return [one for one in self._carried if bound is not None and one.staleness(self.work.iteration) > bound]

    @property
    def drawn(self) -> int:
        """Number of prompts that are drawn for the first time."""
        return max(0, self.work.config.rollout.in_flight - len(self._carried))

    def fly(self, engines: Sequence[EngineHandle]) -> StageOutput:
        """Let responses grow until `rollout.prompts` groups are complete."""
        section, clock, tokens, kept = self.work.config.rollout, time.perf_counter(), 0, False
        arrived, still_open = _parted(self.begin())
        for number in itertools.count():
            self._tell(len(arrived), tokens, time.perf_counter() - clock)
            if len(arrived) >= section.prompts:
                break
            grown = self._grow(engines, still_open, number)
            complete, still_open = _parted(grown.groups)
            arrived, tokens, kept = [*arrived, *complete], tokens + grown.tokens, kept or grown.kept
        seconds = time.perf_counter() - clock
        done, left = arrived[: section.prompts], [*arrived[section.prompts :], *still_open]
        speed = {"tokens_per_second": tokens / seconds} if tokens and not kept else {}
        return self._output(done, left, speed)

    def _tell(self, arrived: int, tokens: int, seconds: float) -> None:
        section = self.work.config.rollout
        done, wanted = (min(count, section.prompts) * section.samples for count in (arrived, section.prompts))
        at = self.work.iteration, Stage.ROLLOUT
        self.work.context.page.advanced(Portion(*at, done, wanted, "samples", tokens, seconds))

    def _output(
        self, done: Sequence[GroupInFlight], left: Sequence[GroupInFlight], speed: Mapping[str, float]
    ) -> StageOutput:
        iteration, write = self.work.iteration, self.work.writer.write_table
        earlier = Counter[str]()  # samples of a prompt that was drawn twice are numbered on
        rows: list[Row] = []
        for group in done:
            rows += [(group, earlier[group.prompt_id] + at, one) for at, one in enumerate(group.responses)]
            earlier[group.prompt_id] += len(group.responses)
        size = self.work.config.rollout.groups_per_part * self.work.config.rollout.samples
        tables = [self.table(some) for some in itertools.batched(rows, size)]
        parts = [write(f"groups-{place:05d}.arrow", table, ROLLOUT) for place, table in enumerate(tables)]
        carried = write(
            IN_FLIGHT, self.table([(one, *row) for one in left for row in enumerate(one.responses)]), ROLLOUT
        )
        stale = [one.staleness(iteration) for one in done]
        return StageOutput(
            parts=(*parts, carried.model_copy(update={"rows": None})),  # the tables with rows are the samples
            schema_fingerprint=fingerprint(ROLLOUT),
            facts={
                "cursor": self.before.cursor + self.drawn,
                "weight_version": self.served.weight_version,
                SAMPLED_AS: self.sampled_as,
                "left_out": [[one.position, one.again] for one in self.left_out],
            },
            metrics={
                **rollout_metrics(pa.concat_tables(tables), None),
                **speed,
                "staleness": float(max(stale)),
                "staleness_mean": float(np.mean(stale)),
                "groups_left_out": float(len(self.left_out)),
                "groups_in_flight": float(len(left)),
                "mixed_versions": float(np.mean([len(set(one.versions.tolist())) > 1 for _, _, one in rows])),
            },
        )

    def begin(self) -> list[GroupInFlight]:
        """All groups in flight: complete ones in the order of completion, then the open ones by position."""
        again = [self._fresh(one.prompt_id, one.prompt, one.position, one.again + 1) for one in self.left_out]
        places = {one.position for one in again}
        go_on = [one for one in self._carried if one.position not in places]
        found = drawn(self.work, self.prepared, self.before.cursor, 0, self.drawn) if self.drawn else []
        tables = [(one.prompts["prompt_id"].to_pylist(), one.prompts["prompt_tokens"], one.positions) for one in found]
        new = [
            self._fresh(name, tokens, position, 0)
            for names, column, positions in tables
            for name, tokens, position in zip(names, row_views(column), positions, strict=True)
        ]
        still_open = sorted((*(one for one in go_on if not one.complete), *again, *new), key=lambda one: one.position)
        return [*(one for one in go_on if one.complete), *still_open]

    def _fresh(self, name: str, prompt: TokenIds, position: int, again: int) -> GroupInFlight:
        config, other = self.work.config, reseeded(self.work)
        seeds = (sample_seed(config.run.seed, position, one, other, again) for one in range(config.rollout.samples))
        return GroupInFlight(name, prompt, position, again, tuple(map(ResponseInFlight, seeds)))

    def _grow(self, engines: Sequence[EngineHandle], groups: Sequence[GroupInFlight], number: int) -> "Round":
        """Let the open responses of groups grow by one round."""
        pieces = list(self._pieces(groups, number))
        stored = {place: kept for place, one in enumerate(pieces) if (kept := find_piece(self.work.writer, one.name))}
        tables = {place: self._read(part) for place, part in stored.items()}
        missing = [place for place in range(len(pieces)) if place not in tables]

        def store(one: int, table: pa.Table) -> None:
            place, writer = missing[one], self.work.writer
            part = writer.write_table(f"round-{number:04d}-{place:05d}.arrow", table, ROLLOUT)
            first = keep_piece(writer, pieces[place].name, part)
            tables[place] = table if first == part else self._read(first)

        self._sample(engines, [pieces[place] for place in missing], store)
        rows = itertools.chain.from_iterable(
            zip(one.rows, _responses(tables[place]), strict=True) for place, one in enumerate(pieces)
        )
        now = {(group.position, sample): response for (group, sample, _), response in rows}
        whole = [
            replace(
                group, responses=tuple(now.get((group.position, at), one) for at, one in enumerate(group.responses))
            )
            for group in groups
        ]
        tokens = sum(len(one.versions) for one in now.values())
        return Round(whole, tokens - sum(len(row[2].versions) for one in pieces for row in one.rows), bool(stored))

    def _pieces(self, groups: Sequence[GroupInFlight], number: int) -> Iterator[_Piece]:
        section = self.work.config.rollout
        for length, some in itertools.groupby(sorted(groups, key=lambda one: one.length), key=lambda one: one.length):
            limit = min(length + section.pause_tokens, section.max_tokens)
            for part in itertools.batched(some, section.groups_per_part):
                rows = [(group, at, one) for group in part for at, one in enumerate(group.responses) if not one.reason]
                yield _Piece(self._name(part, number, limit), limit, rows)

    def _name(self, groups: Sequence[GroupInFlight], number: int, limit: int) -> str:
        """The round and the groups of a piece, and a digest of everything else that decides its samples."""
        places = [[one.position, one.again] for one in groups]
        stamp = value_digest([self.served.digest, self.before.digest, self.work.config.engine.numbers, limit, places])
        return f"{number:04d}-{groups[0].position:06d}-{stamp[:16]}"

    def _read(self, part: Part) -> pa.Table:
        return read_parts(self.work.root, [part], ROLLOUT)

    def _sample(
        self, engines: Sequence[EngineHandle], pieces: Sequence[_Piece], store: Callable[[int, pa.Table], None]
    ) -> None:
        work = self.work
        growth = Growth(work.root, [piece_key(work.writer, one.name) for one in pieces])
        batches = [
            Batch(
                [group.prompt for group, _, _ in piece.rows],
                [one.seed for _, _, one in piece.rows],
                growth.begun(place, [one.begun for _, _, one in piece.rows]),
                growth.pieces[place],
                piece.limit,
            )
            for place, piece in enumerate(pieces)
        ]

        def ready(number: int, found: pa.RecordBatch) -> None:
            store(number, self._sampled(pieces[number], found))

        sample_batches(work, engines, batches, self.how, ready, self.served.weight_version, growth)

    def _sampled(self, piece: _Piece, completions: pa.RecordBatch) -> pa.Table:
        """The open responses of a piece as they are now."""
        found = pa.Table.from_batches([completions])
        tokens, logprobs = (row_views(found[name]) for name in ("response_tokens", "logprobs"))
        reasons = found["finish_reason"].to_pylist()
        rows = zip(piece.rows, tokens, logprobs, reasons, strict=True)
        return self.table(
            [
                (group, at, self._grown(one, Begun(ids, values), self._end(piece, group, ids, why)))
                for (group, at, one), ids, values, why in rows
            ]
        )

    def _grown(self, before: ResponseInFlight, whole: Begun, reason: str | None) -> ResponseInFlight:
        more = np.full(len(whole.tokens) - len(before.versions), self.served.weight_version, np.int32)
        return ResponseInFlight(before.seed, whole, np.concatenate([before.versions, more]), reason)

    def _end(self, piece: _Piece, group: GroupInFlight, tokens: NDArray[np.int32], reason: str) -> str | None:
        """End of a response; None if it pauses."""
        longest = min(self.how.max_tokens, self.work.config.engine.max_model_len - len(group.prompt))
        return None if reason == "length" and piece.limit <= len(tokens) < longest else reason

    def table(self, rows: Sequence[Row]) -> pa.Table:
        """The table of responses with their numbers within their prompts."""
        responses = list_column([one.begun.tokens for _, _, one in rows], pa.int32())
        reasons = pa.array([one.reason for _, _, one in rows], pa.string())
        columns = {
            "prompt_id": pa.array([group.prompt_id for group, _, _ in rows]),
            "sample_id": pa.array([number for _, number, _ in rows]),
            "position": pa.array([group.position for group, _, _ in rows]),
            "again": pa.array([group.again for group, _, _ in rows]),
            "prompt_tokens": list_column([np.asarray(group.prompt) for group, _, _ in rows], pa.int32()),
            "response_tokens": responses,
            "sampled": of_each_token(responses, pa.scalar(True)),
            "logprobs": list_column([one.begun.logprobs for _, _, one in rows], pa.float32()),
            "weight_version": list_column([one.versions for _, _, one in rows], pa.int32()),
            "turns": one_turn(responses.value_lengths().to_numpy(), reasons),
            "seed": pa.array([one.seed for _, _, one in rows], pa.int64()),
        }
        return sample_table(self.work, self.how, columns)


class Round(NamedTuple):
    """Groups after a round, tokens that it added, and whether an earlier process has sampled any of them."""

    groups: list[GroupInFlight]
    tokens: int
    kept: bool


def _parted(groups: Iterable[GroupInFlight]) -> tuple[list[GroupInFlight], list[GroupInFlight]]:
    """Complete groups, and open ones."""
    ordered = sorted(groups, key=lambda one: not one.complete)
    count = sum(one.complete for one in ordered)
    return ordered[:count], ordered[count:]


def _groups(table: pa.Table) -> list[GroupInFlight]:
    prompts = row_views(table["prompt_tokens"])
    columns = (table[name].to_pylist() for name in ("position", "again", "prompt_id"))
    found = zip(*columns, prompts, _responses(table), strict=True)
    return [
        GroupInFlight(first[2], first[3], first[0], first[1], tuple(one[4] for one in (first, *others)))
        for _, (first, *others) in itertools.groupby(found, key=lambda one: one[0])
    ]


def _responses(table: pa.Table) -> list[ResponseInFlight]:
    tokens, logprobs, versions = (row_views(table[name]) for name in ("response_tokens", "logprobs", "weight_version"))
    found = zip(
        table["seed"].to_pylist(), tokens, logprobs, versions, finish_reasons(table["turns"]).to_pylist(), strict=True
    )
    return [ResponseInFlight(seed, Begun(ids, values), by, why) for seed, ids, values, by, why in found]
