"""The score of a conversation: the sum of the rewards of its answers, or the failure for which it has none."""

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, JsonValue

from tasks.rewards.calling import NotFinite, weighted
from tasks.rewards.sample import Reason, Score, failed


class Failure(BaseModel, frozen=True, extra="forbid"):
    reason: Reason
    detail: str


class PlayedScore(BaseModel, frozen=True, extra="forbid"):
    """Rewards of one sample."""

    rewards: tuple[float | None, ...]  # of its answers, in order; None where there is none
    failure: Failure | None = None  # the last failure, if there were too many
    rewritten: int = 0
    """Number of observations at which the chat template would write earlier turns in another way than the policy has
    seen and sampled them."""

    @property
    def score(self) -> Score:
        """The reward; an answer without one adds nothing."""
        if self.failure is not None:
            return failed(self.failure.reason, self.failure.detail)
        try:
            return Score(weighted({f"{at}": (one or 0.0, 1.0) for at, one in enumerate(self.rewards)}), "ok")
        except NotFinite as flaw:
            return failed("non_finite", str(flaw))


class Course(BaseModel, frozen=True, extra="forbid"):
    """Course of one conversation, which may differ between two runs with the same result."""

    failures: tuple[Failure, ...]  # of all its environments, in order
    environment_s: tuple[float, ...]
    """Seconds of the last environment: of its beginning, and of each answer; of a function that drives, in all."""
    failed_s: float = 0.0  # seconds of the environments that failed, but for turns that another one went on with
    sampling_s: float  # seconds of waiting for the engines, for the answers that are in its row
    eligible_blocks: int = 0
    """Full blocks of tokens before its later answers that the prefix cache of an engine had from an earlier one."""
    cached_blocks: int = 0  # those of them that were there


class Branched(BaseModel, frozen=True, extra="forbid"):
    """Another branch of a conversation: its values in the table `rollout` where they are not those of the row."""

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]
    weight_version: tuple[int, ...]
    turns: tuple[dict[str, JsonValue], ...]


class Kept(BaseModel, frozen=True, extra="forbid"):
    """A conversation beside its row."""

    score: PlayedScore
    course: Course
    branches: tuple[Branched, ...] = ()

    def document(self) -> dict[str, JsonValue]:
        """As it is stored with its piece."""
        return self.model_dump(mode="json")


def read_scores(content: bytes) -> list[PlayedScore]:
    """The scores of a rollout, in the order of its rows."""
    return [PlayedScore.model_validate(one) for one in json.loads(content)]


def branches_of(samples: pa.Table, kept: Sequence[Kept]) -> pa.Table:
    """The table `rollout` of all other branches of conversations, whose rows are `samples`, in their order."""
    others = [one for each in kept for one in each.branches]
    table = samples.take(np.repeat(np.arange(len(kept)), [len(one.branches) for one in kept]))
    for name in Branched.model_fields:
        place, values = table.schema.get_field_index(name), [vars(one)[name] for one in others]
        table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    return table


def play_metrics(kept: Sequence[Kept]) -> dict[str, float]:
    """Metrics of conversations: turns are answers of the policy; `rewritten` counts conversations with earlier turns
    that the chat template would rewrite; seconds are summed over conversations, many of which are played at a time; a
    failure that was not the last one of its conversation was retried; `branches` counts those beside the rows, and
    `branch_tokens` what was sampled in them; `prefix_cache_hits` is the share of the full blocks of earlier turns that
    engines did not compute again."""
    turns = [len(one.score.rewards) for one in kept]
    reasons = Counter(failure.reason for one in kept for failure in one.course.failures)
    eligible, cached = (sum(vars(one.course)[f"{name}_blocks"] for one in kept) for name in ("eligible", "cached"))
    lost, branches = sum(one.score.failure is not None for one in kept), [b for one in kept for b in one.branches]
    further = {"branches": len(branches), "branch_tokens": sum(sum(one.sampled) for one in branches)}
    return {
        "turns_mean": sum(turns) / len(turns),
        "turns_max": float(max(turns)),
        "rewritten": float(sum(one.score.rewritten > 0 for one in kept)),
        "environment_s": sum(sum(one.course.environment_s) + one.course.failed_s for one in kept),
        "sampling_s": sum(one.course.sampling_s for one in kept),
        "environment_failures": float(reasons.total()),
        "environment_failures_retried": float(reasons.total() - lost),
        **({"prefix_cache_hits": cached / eligible} if eligible else {}),
        **({name: float(count) for name, count in further.items()} if branches else {}),
        **{f"environment_failures_{reason}": float(count) for reason, count in sorted(reasons.items())},
    }
