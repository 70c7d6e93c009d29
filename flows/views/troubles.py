"""Signs in an iteration's metrics that the model cannot learn from it, or that its scores are not what they seem."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from tasks.stages.names import Stage

Metrics = Mapping[str, Mapping[str, float | None]]
"""Metrics of an iteration, by stage and name."""


class Trouble(StrEnum):
    """A sign that an iteration teaches nothing."""

    EQUAL_GROUPS = "equal-groups"
    ZERO_GRADIENT = "zero-gradient"
    TRUNCATED = "truncated"
    NEVER_STOPPED = "never-stopped"
    """Of a run: every iteration was truncated."""


_TEXTS = {
    Trouble.EQUAL_GROUPS: "in every group all rewards are equal, so no sample has an advantage and nothing is learned. "
    "Check the reward function (ratchet samples shows what it was given), take other prompts, or raise rollout.samples "
    "or rollout.temperature",
    Trouble.ZERO_GRADIENT: "the gradient is zero, so nothing is learned. Check the rewards and the learning rate",
    Trouble.TRUNCATED: "every response was cut off at rollout.max_tokens. Raise it, or check that the model ends its "
    "answers",
    Trouble.NEVER_STOPPED: "no response has ever ended with a stop token. Check the stop tokens of the model, or raise "
    "rollout.max_tokens",
}
_WHOLE = 1.0


def troubles_of(metrics: Metrics) -> tuple[Trouble, ...]:
    """The troubles of one iteration. A metric that is not there is no sign of any."""
    found = {
        Trouble.EQUAL_GROUPS: metrics.get(Stage.REWARD, {}).get("equal_groups") == _WHOLE,
        Trouble.ZERO_GRADIENT: metrics.get(Stage.TRAIN, {}).get("grad_norm") == 0,
        Trouble.TRUNCATED: metrics.get(Stage.ROLLOUT, {}).get("truncated") == _WHOLE,
    }
    return tuple(trouble for trouble, there in found.items() if there and metrics.get(Stage.ROLLOUT))


def explanation(trouble: Trouble) -> str:
    """Meaning of a sign, and possible remedies."""
    return _TEXTS[trouble]


def run_troubles(troubles: Sequence[tuple[int, Sequence[Trouble]]]) -> tuple[str, ...]:
    """The troubles of a run in a line each, given those of each of its RL iterations that has sampled."""
    lines = []
    for trouble in (Trouble.EQUAL_GROUPS, Trouble.ZERO_GRADIENT, Trouble.TRUNCATED):
        numbers = [iteration for iteration, found in troubles if trouble in found]
        if not numbers:
            continue
        meant = trouble
        if trouble is Trouble.TRUNCATED and len(numbers) == len(troubles):
            meant = Trouble.NEVER_STOPPED
        lines.append(f"{len(numbers)} of {len(troubles)} iterations, last {numbers[-1]}: {explanation(meant)}")
    return tuple(lines)
