"""Scores of responses by a run's reward functions, in this process or in others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.digest import bytes_digest
from tasks.config.environment import without_secrets
from tasks.config.reward import RewardFunction, RewardSection
from tasks.rewards.calling import Caller, NotFinite, weighted
from tasks.rewards.judge import Judges, judged
from tasks.rewards.pool import Response, Scored, ScoringOrder, score_in_processes, source_in_process
from tasks.rewards.resolve import find_reward, own_function, values_of
from tasks.rewards.reward_model import valued
from tasks.rewards.sample import Score, failed

EXAMPLES = 3  # failures that a message shows; so many are collected before scoring ends early
_ROUNDING = 1e-6  # 0.29 * 100 is below 29


@dataclass(frozen=True)
class Scores:
    scores: list[Score | None]
    """In the order of the responses; None where scoring ended before, because too many had failed."""
    sources: Mapping[str, str]
    """By name of a function: the digest of its file and of the user's own that it imports, or the version of ours."""


def score_responses(
    section: RewardSection, responses: Sequence[Response], patient: bool = False, judges: Judges | None = None
) -> Scores:
    """Score all responses with all functions of the section; `patient` goes on when more have failed than
    `reward.max_failures` allows. `judges` has what was asked before, and an engine. Raises InputError (a function
    cannot be found, or a secret is not set), StageFailed (a function cannot be imported), or WorkerLost (the engine
    that judges has died)."""
    allowed = None if patient else max(failures_allowed(section.max_failures, len(responses)), EXAMPLES - 1)
    judges = judges or Judges()
    found = {part.name: _scored(section, part, responses, allowed, judges) for part in section.parts}
    sources = _by_function(section, {name: one.source for name, one in found.items()})
    if not section.functions:
        return Scores(found[""].scores, sources)
    together = zip(*(found[part.name].scores for part in section.parts), strict=True)
    return Scores([_summed(section.parts, scores) for scores in together], sources)


def sources_of(section: RewardSection) -> dict[str, str]:
    """Digests of the functions by name, as recorded with scores made now, by importing. Raises as `score_responses`."""
    return _by_function(section, {part.name: _source(order_of(section, part)) for part in section.parts})


def failures_allowed(share: float, responses: int) -> int:
    """Number of responses that may remain without a score."""
    return math.floor(share * responses + _ROUNDING)


def order_of(section: RewardSection, part: RewardFunction) -> ScoringOrder:
    """Order for the processes of one function of the section. Raises InputError: the function cannot be found."""
    target = find_reward(part.function, part.key)
    return ScoringOrder(target, part.arguments, part.weights, part.batch, section.deadline_s, section.start_deadline_s)


def scoring_processes(section: RewardSection) -> int:
    """Number of processes that score at once; 0 if the calling process does."""
    return section.processes or int(any(find_reward(part.function).traits.needs_process for part in section.parts))


def notices(section: RewardSection) -> list[str]:
    """Notices for people about the scoring of responses."""
    if section.tried and own_judges(section):
        kind = "reward model" if any(find_reward(part.function).traits.values for part in section.parts) else "judge"
        return [f"the reward is not called on records before the run: its {kind} is an engine that starts with the run"]
    return [] if section.tried else ["reward.try is false: the reward is not called on records before the run"]


def own_judges(section: RewardSection) -> list[RewardFunction]:
    """The functions of the section that ask the run's engine `[engines.judge]`, a judge or a reward model."""
    asking = [part for part in section.parts if find_reward(part.function, part.key).traits.asks]
    return [part for part in asking if "url" not in part.arguments]


def is_valued(section: RewardSection) -> bool:
    """True if a reward model on the run's engine gives values."""
    return any(find_reward(part.function, part.key).traits.values for part in own_judges(section))


def equal_groups(rewards: pa.Table) -> float:
    """Share of the prompt groups of a reward table in which no sample can have an advantage: all scores are equal, or
    fewer than two samples have one. 0 to 1."""
    return float(np.mean(~_with_spread(rewards)))


def useful_groups(rewards: pa.Table) -> int:
    """Number of the other prompt groups of a reward table: their scores differ."""
    return int(np.count_nonzero(_with_spread(rewards)))


def _with_spread(rewards: pa.Table) -> NDArray[np.bool_]:
    names = rewards["prompt_id"].combine_chunks().dictionary_encode()
    scores = rewards["reward"].cast(pa.float64()).to_numpy()  # NaN where there is none
    groups, scored = names.indices.to_numpy(), np.isfinite(scores)
    highest, lowest = np.full(len(names.dictionary), -np.inf), np.full(len(names.dictionary), np.inf)
    np.maximum.at(highest, groups[scored], scores[scored])
    np.minimum.at(lowest, groups[scored], scores[scored])
    return highest > lowest


def _source(order: ScoringOrder) -> str:
    if order.target.version is not None:
        return f"version {order.target.version}"
    text = order.target.text
    alone = text is not None and "import" not in text  # otherwise files that it imports may change
    return bytes_digest(text.encode()) if text is not None and alone else source_in_process(order)


def _by_function(section: RewardSection, sources: Mapping[str, str]) -> dict[str, str]:
    """Sources by the names of functions. Of two files with one name, the second is named after its part too."""
    found: dict[str, str] = {}
    for part, name in [(part.name, find_reward(part.function).name) for part in section.parts]:
        if found.setdefault(name, sources[part]) != sources[part]:
            found[f"{part}: {name}"] = sources[part]
    return found


def _scored(
    section: RewardSection, part: RewardFunction, responses: Sequence[Response], allowed: int | None, judges: Judges
) -> Scored:
    order = order_of(section, part)
    version, traits = f"version {order.target.version}", order.target.traits
    if traits.values:
        return Scored([*valued([one.whole for one in responses], judges.model)], version)
    if traits.asks:
        asked = [(one.record, one.text) for one in responses]
        return Scored(judged(values_of(order.arguments), asked, judges, allowed, without_secrets), version)
    if section.processes or order.target.traits.needs_process:
        scored = score_in_processes(order, responses, max(section.processes, 1), allowed)
        return scored if order.target.version is None else replace(scored, source=version)
    return Scored(_scored_here(order, responses), version)


def _scored_here(order: ScoringOrder, responses: Sequence[Response]) -> list[Score | None]:
    caller = Caller(own_function(order.target), values_of(order.arguments), order.weights, order.batch)
    if order.batch:
        scores = caller.batch([one.record for one in responses], [one.text for one in responses], None)
    else:
        scores = [caller.one(one.record, one.text, None) for one in responses]
    return [replace(score, detail=without_secrets(score.detail)) if score.detail else score for score in scores]


def _summed(parts: Sequence[RewardFunction], scores: Sequence[Score | None]) -> Score | None:
    values: dict[str, tuple[float, float]] = {}
    inner: dict[str, float] = {}
    for part, score in zip(parts, scores, strict=True):
        if score is None or score.reward is None:
            return None if score is None else replace(score, detail=f"{part.name}: {score.detail}", components=None)
        values[part.name] = (score.reward, part.weight)
        inner |= {f"{part.name}/{key}": value for key, value in (score.components or {}).items()}
    try:
        reward = weighted(values)
    except NotFinite as flaw:
        return failed("non_finite", str(flaw))
    return Score(reward, "ok", components={name: value for name, (value, _) in values.items()} | inner)
