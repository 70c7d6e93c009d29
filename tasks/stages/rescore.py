"""Stage `rescore`: selected samples get new scores; those that they have stay where they are stored."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from storage.backends.root import Root, open_root
from storage.digest import value_digest
from storage.errors import InputError, StageFailed
from storage.manifest import Part, find
from storage.parts import read_parts
from storage.schema import PROMPTS, REWARD, SELECTION, fingerprint
from storage.selection import Source, read_sources
from storage.unfinished import find_piece, keep_piece
from tasks.config.reward import RewardSection
from tasks.data.tokenizer import TextCodec
from tasks.rewards.pool import Response
from tasks.rewards.resolve import find_reward
from tasks.rewards.scoring import score_responses
from tasks.stages.names import Stage
from tasks.stages.prepared import records_of, text_codec
from tasks.stages.scored import SOURCE, accepted, columns, responses_of
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import Prepared, Rescored, Selected

_NEEDED = ["prompt_id", "sample_id", "response_tokens", "finish_reason", "iteration", "source"]
_STAMP = 16  # characters of a digest
_TOGETHER = 8192  # samples that are scored by the same processes, and are in memory


@stage(Stage.RESCORE, ("prepare", "selection"), Rescored)
def rescore(work: Work, prepared: Prepared, selected: Selected) -> StageOutput:
    """Score each share with [reward], some thousand samples at a time, which are durable from then on.

    Raises:
        StageFailed: a function failed too often, or has changed since an earlier attempt scored the first shares.
    """
    scoring = _Scoring(work, text_codec(work.context, prepared), read_sources(work.root, selected.manifest))
    parts = scoring.scored(selected.shares)
    if len(stamps := {part.name.rpartition("-")[2] for part in parts}) > 1:
        raise StageFailed(
            f"the reward function has changed while it scored the selection ({len(stamps)} versions): put the former "
            "one back, or begin another run with `ratchet retrain`"
        )
    rewards = read_parts(work.root, parts, REWARD, ["reward"])["reward"]
    mean = float(np.mean(rewards.drop_null().to_numpy()))
    return StageOutput(
        parts=tuple(parts),
        schema_fingerprint=fingerprint(REWARD),
        facts={SOURCE: dict(scoring.made_of)} if scoring.made_of else {},
        metrics={"reward_mean": mean, "samples": float(len(rewards)), "unscored": float(rewards.null_count)},
    )


@dataclass
class _Scoring:
    work: Work
    codec: TextCodec
    sources: list[Source]
    made_of: dict[str, str] = field(default_factory=dict)
    """What the functions were made of; empty until a share was scored."""

    def scored(self, shares: Sequence[Part]) -> list[Part]:
        """The scores of each share."""
        pieces = [self._piece(number, part) for number, part in enumerate(shares)]
        found = {number: find_piece(self.work.writer, name) for number, name in enumerate(pieces)}
        missing = [number for number, part in found.items() if part is None]
        for block in _blocks(missing, shares):
            tables = [read_parts(self.work.root, [shares[number]], SELECTION, _NEEDED) for number in block]
            results = self._scores(tables, f"rescore of share {block[0]}")
            for number, result in zip(block, results, strict=True):
                name = f"rewards-{number:06d}-{value_digest(self.made_of)[:_STAMP]}"
                part = self.work.writer.write_table(name, result, REWARD)
                found[number] = keep_piece(self.work.writer, pieces[number], part)
        return [part for part in found.values() if part is not None]

    def _piece(self, number: int, part: Part) -> str:
        return f"{number:06d}-{value_digest([part.digest, _functions(self.work.config.reward)])[:_STAMP]}"

    def _scores(self, tables: Sequence[pa.Table], what: str) -> list[pa.Table]:
        """The scores of some shares, by the same processes: each costs a second to start."""
        section = self.work.config.reward
        responses = [response for table in tables for response in self._responses(table)]
        scored = score_responses(section, responses)
        scores = accepted(scored.scores, responses, section.max_failures, what)
        self.made_of = dict(scored.sources)
        ends = np.cumsum([table.num_rows for table in tables])
        return [
            pa.Table.from_arrays(
                [
                    *(table[name].combine_chunks() for name in ("prompt_id", "sample_id")),
                    *columns(scores[end - table.num_rows : end]),
                ],
                schema=REWARD,
            )
            for table, end in zip(tables, ends.tolist(), strict=True)
        ]

    def _responses(self, table: pa.Table) -> Iterator[Response]:
        texts = self.codec.decode_column(table["response_tokens"])
        sources = table["source"].to_numpy()
        for first, last in _runs(sources):
            source = self.sources[sources[first]]
            rows = table.slice(first, last - first)
            yield from responses_of(rows, texts[first:last], self._records(source), source.iteration)

    def _records(self, source: Source) -> Mapping[str, Mapping[str, Any]]:
        own = self.work.root
        return records_of(_prompts(own if source.root is None else open_root(source.root), source.run))


def _blocks(numbers: Sequence[int], shares: Sequence[Part]) -> Iterator[list[int]]:
    """The shares `numbers`, some together."""
    block, rows = list[int](), 0
    for number in numbers:
        block.append(number)
        rows += shares[number].rows or 0
        if rows >= _TOGETHER:
            yield block
            block, rows = [], 0
    if block:
        yield block


def _runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """First row, and the row after the last, of each run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return itertools.pairwise(edges)


def _functions(section: RewardSection) -> list[Any]:
    """What decides the scores, as far as it is known before."""
    targets = [find_reward(part.function) for part in section.parts]
    return [[target.name, target.version, target.text] for target in targets]


def _prompts(root: Root, run: str) -> pa.Table:
    prepared = find(root, run, 0, Stage.PREPARE)
    if prepared is None:
        raise InputError(
            f"the samples of run {run!r} cannot be scored again, because their prompts' records are not stored: it was "
            "imported. Import them with a score (--map reward=COLUMN), and leave retrain.rescore false"
        )
    return read_parts(root, [prepared.part("train.arrow")], PROMPTS)
