"""Shared parts of the stages that score: judges, responses, the limit on failures, columns and metrics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from storage.digest import value_digest
from storage.errors import InputError, StageFailed
from storage.exchanges import RunExchanges
from storage.manifest import Manifest
from storage.parts import row_views
from tasks.config.identity import meaning
from tasks.config.reward import RewardSection
from tasks.data.tokenizer import TextCodec
from tasks.rewards.engine_judge import EngineJudge
from tasks.rewards.judge import Judges
from tasks.rewards.pool import Response
from tasks.rewards.reward_model import RewardModel
from tasks.rewards.sample import Score
from tasks.rewards.scoring import EXAMPLES, Scores, failures_allowed, is_valued
from tasks.stages.context import RunContext
from tasks.stages.prepared import Records, other_directory, other_parts
from tasks.stages.views import Prepared
from tasks.workers.interface import EngineHandle

_COLUMNS = ("reward", "status", "detail", "reason", "components")
REPLACED = "reward_source_replaced"
"""Fact of a reward stage: the former sources of the functions that have changed since the iteration before."""

_EXCERPT = 80


def responses_of(table: pa.Table, codec: TextCodec, records: Records, iteration: int) -> list[Response]:
    """The responses of a table with `prompt_id`, `sample_id`, `response_tokens` and `finish_reason`."""
    tokens, named = table["response_tokens"], ("prompt_id", "sample_id", "finish_reason")
    rows = zip(
        *(table[name].to_pylist() for name in named), codec.decode_column(tokens), row_views(tokens), strict=True
    )
    return [
        Response(records[one], text, one, number, iteration, end, ids, records.tokens(one))
        for one, number, end, text, ids in rows
    ]


def scored_by(section: RewardSection, sources: Mapping[str, str]) -> str:
    """Identity of a reward: its functions as they were, their arguments and weights."""
    return value_digest([meaning({"reward": section.model_dump(mode="json")})["reward"], dict(sources)])


def unchanged(scored: Scores, sources: Mapping[str, str], what: str) -> Scores:
    """The scores, if the functions that gave them are made of `sources`, so that a stage never mixes two versions.
    Raises StageFailed: a function has changed since the stage began."""
    if scored.sources != sources:
        changed = [name for name in scored.sources if scored.sources[name] != sources.get(name)]
        fact = f"{what}: the reward function {', '.join(changed)} has changed while it scored"
        raise StageFailed(f"{fact}. Nothing was committed: start again, and everything is scored by the new one")
    return scored


def accepted(scores: Sequence[Score | None], responses: Sequence[Response], limit: float, what: str) -> list[Score]:
    """The scores. Raises StageFailed, with three examples of `what`: a larger share than `limit` has none."""
    tried = [score for score in scores if score is not None]
    bad = [place for place, score in enumerate(scores) if score is not None and score.reward is None]
    if not scores:
        raise StageFailed(f"{what}: there are no responses to score")
    if len(tried) == len(scores) and not too_many(tried, limit):
        return tried
    examples = "\n".join(f"  {_example(responses[place], scores[place])}" for place in _chosen(bad, scores))
    counts = metrics(tried)
    of = f"{len(tried)} responses" + ("" if len(tried) == len(scores) else f", tried so far of {len(scores)},")
    kinds = f"{counts['errors']:.0f} errors, {counts['non_finite']:.0f} not finite, {counts['timeouts']:.0f}"
    raise StageFailed(
        f"{what}: {len(bad)} of {of} have no score ({kinds} time-outs), but reward.max_failures = "
        f"{limit:g} allows {failures_allowed(limit, len(scores))} of {len(scores)}. For example:\n{examples}\n"
        "Nothing was trained on them. Fix the function (`ratchet reward` tries it on stored samples), or change "
        "reward.max_failures: neither begins another run. Other settings of [reward] can be changed until an iteration "
        "is scored"
    )


def too_many(scores: Sequence[Score], limit: float) -> bool:
    """True if no response has a score, or a larger share than `limit` has none."""
    unscored = sum(score.reward is None for score in scores)
    return unscored == len(scores) or unscored > failures_allowed(limit, len(scores))


def with_scores(
    table: pa.Table, scores: Sequence[Score], schema: pa.Schema, more: Mapping[str, pa.Array] | None = None
) -> pa.Table:
    """The table of scores in a schema, whose other columns are those of `table` and `more`."""
    values: dict[str, list[Any]] = {name: list(map(attrgetter(name), scores)) for name in _COLUMNS}
    values["components"] = [None if one is None else list(one.items()) for one in values["components"]]
    every = {name: pa.array(column, schema.field(name).type) for name, column in values.items()} | dict(more or {})
    every = {name: every[name] if name in every else table[name].combine_chunks() for name in schema.names}
    return pa.Table.from_arrays(list(every.values()), schema=schema)


def metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Counts of what has no score, and the mean of each component over the scores that have it. `unscored` is the sum
    of `errors`, `non_finite` (the function returned such a number) and `timeouts`."""
    reasons = Counter(score.reason for score in scores if score.reward is None)
    parts: dict[str, list[float]] = {}
    for score in scores:
        for name, value in (score.components or {}).items():
            parts.setdefault(name, []).append(value)
    return {
        "errors": float(reasons.total() - reasons["timeout"] - reasons["non_finite"]),
        "timeouts": float(reasons["timeout"]),
        "non_finite": float(reasons["non_finite"]),
        "unscored": float(reasons.total()),
        **{f"reward/{name}": float(np.mean(values)) for name, values in sorted(parts.items())},
    }


def _chosen(places: Sequence[int], scores: Sequence[Score | None]) -> list[int]:
    """Examples, of different reasons first."""
    first: dict[str | None, int] = {}
    for place in places:
        first.setdefault(score.reason if (score := scores[place]) is not None else None, place)
    return list(dict.fromkeys([*first.values(), *places]))[:EXAMPLES]


def _example(response: Response, score: Score | None) -> str:
    text = response.text if len(response.text) <= _EXCERPT else f"{response.text[:_EXCERPT]}..."
    detail = "" if score is None else f"{score.reason}: {score.detail}"
    return f"prompt {response.prompt_id!r}, response {text!r}: {detail}"


def judges_of(context: RunContext, prepared: Prepared) -> Judges:
    """Exchanges and engine of the judges of a run. The engine starts when it is first asked; what is kept asks none."""
    kept, section = RunExchanges(context.root, context.run), context.config.engines
    if section is None:
        return Judges(kept)

    def start() -> EngineHandle:
        return context.workers.judge(other_directory(context, prepared, "judge"))

    if is_valued(context.config.reward):
        return Judges(kept, model=RewardModel(section.judge.max_model_len, lambda some: start().values(some)))
    engine = EngineJudge(
        model=_identity(prepared.manifest, section.judge.precision),
        longest=section.judge.max_model_len,
        questions=context.questions,
        read=lambda: TextCodec.from_directory(other_directory(context, prepared, "judge"), left_out=None),
        start=start,
    )
    return Judges(kept, engine)


def _identity(prepared: Manifest, precision: str) -> str:
    """Identity of what answers. Raises InputError: the run has stored no judge."""
    if not (parts := other_parts(prepared, "judge")):
        raise InputError(
            f"iteration 0 of run {prepared.run!r} has stored no judge (engines.judge): start a new run, or give the "
            "reward `judge` a url"
        )
    return value_digest([{name: part.digest for name, part in parts.items()}, precision])
