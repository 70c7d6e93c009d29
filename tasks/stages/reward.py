"""Stages that score: `reward` gives every stored response a score, or a record of why it has none; `rescore` gives
selected samples new ones, and those that they have stay where they are stored."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from storage.digest import value_digest
from storage.manifest import Part
from storage.parts import read_part, read_parts, read_table
from storage.schema import REWARD, ROLLOUT, SELECTION, fingerprint
from storage.selection import Source, read_prompts, read_sources
from storage.turns import with_finish_reasons
from storage.unfinished import find_piece, keep_piece
from tasks.config.evaluation import SCORED_BY, SOURCE
from tasks.config.identity import settings_digest
from tasks.data.tokenizer import TextCodec
from tasks.environments.scores import read_scores
from tasks.rewards.pool import Response
from tasks.rewards.scoring import Scores, equal_groups, score_responses, sources_of
from tasks.stages.draws import scorable, scored_before
from tasks.stages.names import Stage
from tasks.stages.prepared import Records, text_codec
from tasks.stages.scored import REPLACED, accepted, judges_of, metrics, responses_of, scored_by, unchanged, with_scores
from tasks.stages.stage import StageOutput, Work, stage
from tasks.stages.views import ENVIRONMENT, SCORES, Prepared, Rescored, Rewards, Rollouts, Selected

_NEEDED = ["prompt_id", "sample_id", "response_tokens", "turns"]
_OF_SELECTION = [*_NEEDED, "iteration", "source"]
_STAMP = 16  # characters of a digest
_TOGETHER = 8192  # samples that are scored by the same processes, and are in memory


@stage(Stage.REWARD, ("prepare", "rollout"), Rewards)
def reward(work: Work, prepared: Prepared, rollouts: Rollouts) -> StageOutput:
    """Score the responses of one rollout stage."""
    section = work.config.reward
    table = read_table(work.root, rollouts.manifest, ROLLOUT, _NEEDED)
    responses = scorable(work, prepared, table)
    if work.config.environment is not None:  # environments gave the scores, which are stored with the rollout
        found = read_scores(read_part(work.root, rollouts.manifest.part(SCORES)))
        sources = cast(Mapping[str, str], rollouts.manifest.facts.get(ENVIRONMENT))
        scored = Scores([one.score for one in found], sources)
    else:
        scored = scored_before(work, rollouts)
    if scored is None:
        scored = score_responses(section, responses, judges=judges_of(work.context, prepared))
    scores = accepted(scored.scores, responses, section.max_failures, f"reward of iteration {work.iteration}")
    result = with_scores(table, scores, REWARD)
    mean = np.mean(result["reward"].drop_null().to_numpy())
    return StageOutput(
        parts=(work.writer.write_table("rewards.arrow", result, REWARD),),
        schema_fingerprint=fingerprint(REWARD),
        facts=_facts(work, scored.sources),
        metrics={"reward_mean": float(mean), "equal_groups": equal_groups(result), **metrics(scores)},
    )


def _facts(work: Work, sources: Mapping[str, str]) -> dict[str, JsonValue]:
    """Sources of the functions, and those that have changed since the previous iteration, which is reported."""
    # they may not be published yet; a train state that was added since takes longer, and is not waited for
    work.context.outbox.settle((work.iteration - 1, Stage.REWARD))
    earlier = work.context.find(work.iteration - 1, Stage.REWARD) if work.iteration > 1 else None
    before = earlier.facts.get(SOURCE) if earlier is not None else None
    known = before if isinstance(before, dict) else {}
    replaced = {name: known[name] for name in sources if name in known and known[name] != sources[name]}
    for name, old in replaced.items():
        work.context.say(
            f"reward function {name} has changed ({str(old)[:12]} -> {sources[name][:12]}): it applies from iteration "
            f"{work.iteration}, and earlier ones stay scored as they are"
        )
    own = {SOURCE: dict(sources), SCORED_BY: scored_by(work.config.reward, sources)}
    return {**own, **({REPLACED: replaced} if replaced else {})}


@stage(Stage.RESCORE, ("prepare", "selection"), Rescored)
def rescore(work: Work, prepared: Prepared, selected: Selected) -> StageOutput:
    """Score each share with [reward], some thousand samples at a time, which are durable from then on. Raises
    StageFailed: a function failed too often, or has changed while it scored."""
    made_of = sources_of(work.config.reward)
    parts = _Scoring(work, prepared, selected, read_sources(work.root, selected.manifest), made_of).scored()
    rewards = read_parts(work.root, parts, REWARD, ["reward"])["reward"]
    mean = float(np.mean(rewards.drop_null().to_numpy()))
    return StageOutput(
        parts=tuple(parts),
        schema_fingerprint=fingerprint(REWARD),
        facts={SOURCE: dict(made_of)},
        metrics={"reward_mean": mean, "samples": float(len(rewards)), "unscored": float(rewards.null_count)},
    )


@dataclass(frozen=True)
class _Scoring:
    work: Work
    prepared: Prepared
    selected: Selected
    sources: list[Source]
    made_of: Mapping[str, str]
    """Sources of the functions, by name. Names of pieces depend on them, so pieces of other versions are not found."""
    readings: dict[str, tuple[TextCodec, Records]] = field(default_factory=dict)
    """Of the sources that were read so far, by the identity of their stage `prepare`."""

    def scored(self) -> list[Part]:
        shares, writer = self.selected.shares, self.work.writer
        settings = settings_digest(self.work.config.model_dump(mode="json"), Stage.RESCORE)
        stamp = value_digest([self.selected.digest, settings, dict(self.made_of)])[:_STAMP]
        pieces = [f"{number:06d}-{stamp}" for number in range(len(shares))]
        found = {number: find_piece(writer, name) for number, name in enumerate(pieces)}
        for block in _blocks(shares):
            if None not in [found[number] for number in block]:
                continue
            read = (read_parts(self.work.root, [shares[number]], SELECTION, _OF_SELECTION) for number in block)
            tables = [with_finish_reasons(table) for table in read]
            results = self._scores(tables, f"rescore of share {block[0]}")
            for number, result in zip(block, results, strict=True):
                part = writer.write_table(f"rewards-{number:06d}.arrow", result, REWARD)
                found[number] = keep_piece(writer, pieces[number], part)
        return [part for part in found.values() if part is not None]

    def _scores(self, tables: Sequence[pa.Table], what: str) -> list[pa.Table]:
        """The scores of some shares, by the same processes: each costs a second to start."""
        section = self.work.config.reward
        responses = [response for table in tables for response in self._responses(table)]
        judges = judges_of(self.work.context, self.prepared)
        scored = unchanged(score_responses(section, responses, judges=judges), self.made_of, what)
        scores = accepted(scored.scores, responses, section.max_failures, what)
        ends = np.cumsum([table.num_rows for table in tables])
        pairs = zip(tables, ends.tolist(), strict=True)
        return [with_scores(table, scores[end - table.num_rows : end], REWARD) for table, end in pairs]

    def _responses(self, table: pa.Table) -> Iterator[Response]:
        sources = table["source"].to_numpy()
        for first, last in _runs(sources):
            source = self.sources[sources[first]]
            rows = table.slice(first, last - first)
            yield from responses_of(rows, *self._reading(source), source.iteration)

    def _reading(self, source: Source) -> tuple[TextCodec, Records]:
        """The texts and the records as the run that sampled has them, from the selection alone."""
        prepare = source.prepare or ""  # `select` refuses imported samples
        if prepare not in self.readings:
            codec = text_codec(self.work.context, self.prepared, source.stop_tokens)
            records = Records(read_prompts(self.work.root, self.selected.manifest, prepare))
            self.readings[prepare] = (codec, records)
        return self.readings[prepare]


def _blocks(shares: Sequence[Part]) -> Iterator[list[int]]:
    """The numbers of shares that are scored together, whatever of them is stored: a batch is one call for all."""
    block, rows = list[int](), 0
    for number, share in enumerate(shares):
        block.append(number)
        rows += share.rows or 0
        if rows >= _TOGETHER:
            yield block
            block, rows = [], 0
    if block:
        yield block


def _runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """First row, and the row after the last, of each run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return itertools.pairwise(edges)
