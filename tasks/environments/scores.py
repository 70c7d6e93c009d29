"""The score of a conversation: the sum of the rewards of its answers, or the failure for which it has none."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from tasks.rewards.calling import NotFinite, weighted
from tasks.rewards.sample import Reason, Score, failed


class Failure(NamedTuple):
    """A failure of an environment."""

    reason: str  # of `Reason`
    detail: str


class PlayedScore(NamedTuple):
    """Rewards and failures of one sample."""

    rewards: Sequence[float | None]  # of its answers, in order; None where there is none
    failures: Sequence[Failure]  # of all its environments, in order
    ended: bool  # False if there were too many failures

    def document(self) -> dict[str, Any]:
        """As it is stored."""
        return {**self._asdict(), "failures": [one._asdict() for one in self.failures]}

    @classmethod
    def read(cls, document: Any) -> "PlayedScore":
        """From what is stored."""
        return cls(**{**document, "failures": [Failure(**one) for one in document["failures"]]})

    @property
    def score(self) -> Score:
        """The reward; an answer without one adds nothing."""
        if not self.ended:
            return failed(cast(Reason, self.failures[-1].reason), self.failures[-1].detail)
        try:
            return Score(weighted({f"{at}": (one or 0.0, 1.0) for at, one in enumerate(self.rewards)}), "ok")
        except NotFinite as flaw:
            return failed("non_finite", str(flaw))


def read_scores(content: bytes) -> list[PlayedScore]:
    """The scores of a rollout, in the order of its rows."""
    return [PlayedScore.read(one) for one in json.loads(content)]
