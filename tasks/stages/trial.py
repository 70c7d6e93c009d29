"""Trying a reward on stored samples: what it would score, beside what is stored. Writes nothing."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, computed_field

from storage.backends.root import Root
from storage.errors import InputError
from storage.exchanges import RunExchanges
from storage.manifest import find, need
from storage.parts import read_parts, read_table
from storage.revisions import Revisions, read_revisions
from storage.schema import PROMPTS, REWARD, ROLLOUT
from storage.turns import with_finish_reasons
from tasks.config.reward import RewardSection
from tasks.rewards.judge import Judges
from tasks.rewards.pool import Response
from tasks.rewards.sample import Score
from tasks.rewards.scoring import score_responses
from tasks.stages.names import Stage
from tasks.stages.prepared import Records, stored_codec
from tasks.stages.scored import metrics, responses_of, too_many
from tasks.stages.views import Prepared

_NEEDED = ["prompt_id", "sample_id", "response_tokens", "turns"]
_EXAMPLES = 5


class Example(BaseModel, frozen=True, extra="forbid"):
    prompt_id: str
    sample_id: int
    response: str  # its text
    stored: float | None  # the stored reward; None if there is none
    reward: float | None  # score of the function; None if there is none
    components: dict[str, float] | None
    detail: str  # reason for a missing score


class Trial(BaseModel, frozen=True, extra="forbid"):
    """Scores of a reward on the stored samples of an iteration."""

    run: str
    iteration: int
    sources: dict[str, str]  # by name of a function: the digest of its file, or the version of one of ours
    samples: int
    unscored: int  # samples without a score
    reasons: dict[str, int]  # number of unscored samples by reason: exception, exit, no_number, non_finite or timeout
    too_many: bool  # True if the stage would fail with so many
    mean: float | None  # mean reward of the samples with a score
    components: dict[str, float]  # mean of each component
    stored_mean: float | None  # mean of the stored rewards; None if the iteration is not scored
    changed: int | None  # samples whose stored reward is another; None if the iteration is not scored
    examples: tuple[Example, ...]  # of what failed, else of what has changed, else the first


class Trials(BaseModel, frozen=True, extra="forbid"):
    """Trials of one reward on several iterations."""

    trials: tuple[Trial, ...]  # oldest first

    @computed_field
    @property
    def samples(self) -> int:
        return sum(one.samples for one in self.trials)

    @computed_field
    @property
    def changed(self) -> int:
        """Samples whose stored reward is another, of the iterations that are scored."""
        return sum(one.changed or 0 for one in self.trials)


def try_reward(root: Root, run: str, iteration: int, section: RewardSection, judges: Judges | None = None) -> Trial:
    """Score the stored samples of an iteration; `judges` has the engine of a judge without a URL. Raises InputError
    (the iteration has no samples, or the function cannot be found) or StageFailed (the function cannot be imported)."""
    seen = read_revisions(root, run)  # once: samples and scores of one revision
    responses = _stored_responses(root, run, iteration, seen)
    scored = score_responses(section, responses, patient=True, judges=judges or Judges(RunExchanges(root, run)))
    scores = [score for score in scored.scores if score is not None]
    before = _stored_rewards(root, run, iteration, seen)
    counted = metrics(scores)
    stored = [before.get((one.prompt_id, one.sample_id)) for one in responses]
    return Trial(
        run=run,
        iteration=iteration,
        sources=dict(scored.sources),
        samples=len(responses),
        unscored=int(counted["unscored"]),
        reasons=dict(Counter(score.reason for score in scores if score.reason is not None)),
        too_many=too_many(scores, section.max_failures),
        mean=_mean([score.reward for score in scores]),
        components={name.removeprefix("reward/"): one for name, one in counted.items() if name.startswith("reward/")},
        stored_mean=_mean(stored),
        changed=sum(map(_differs, stored, scores)) if before else None,
        examples=_examples(responses, scores, stored if before else None),
    )


def _stored_responses(root: Root, run: str, iteration: int, seen: Revisions) -> list[Response]:
    if (rollout := find(root, run, iteration, Stage.ROLLOUT, seen)) is None:
        raise InputError(f"run {run!r} has no samples of iteration {iteration}: `ratchet show {run}` lists what it has")
    prepared = need(root, run, 0, Stage.PREPARE, seen)
    table = with_finish_reasons(read_table(root, rollout, ROLLOUT, _NEEDED))
    records = Records(read_parts(root, [prepared.part("train.arrow")], PROMPTS))
    return responses_of(table, stored_codec(root, Prepared(prepared)), records, iteration)


def _stored_rewards(root: Root, run: str, iteration: int, seen: Revisions) -> dict[tuple[str, int], float | None]:
    if (reward := find(root, run, iteration, Stage.REWARD, seen)) is None:
        return {}
    names = ["prompt_id", "sample_id", "reward"]
    columns = [read_table(root, reward, REWARD, names)[name].to_pylist() for name in names]
    return {(prompt, sample): value for prompt, sample, value in zip(*columns, strict=True)}


def _mean(rewards: Sequence[float | None]) -> float | None:
    there = [np.float32(reward) for reward in rewards if reward is not None]
    return float(np.mean(there)) if there else None


def _differs(stored: float | None, score: Score) -> bool:
    given = None if score.reward is None else pa.scalar(score.reward, pa.float32()).as_py()
    return given != stored


def _examples(
    responses: Sequence[Response], scores: Sequence[Score], stored: Sequence[float | None] | None
) -> tuple[Example, ...]:
    places = range(len(scores))
    failed = [place for place in places if scores[place].reward is None]
    changed = [] if stored is None else [place for place in places if _differs(stored[place], scores[place])]
    chosen = list(dict.fromkeys([*failed, *changed, *places]))[:_EXAMPLES]
    return tuple(
        Example(
            prompt_id=one.prompt_id,
            sample_id=one.sample_id,
            response=one.text,
            stored=before,
            reward=score.reward,
            components=None if score.components is None else dict(score.components),
            detail=score.detail,
        )
        for one, score, before in ((responses[at], scores[at], None if stored is None else stored[at]) for at in chosen)
    )
