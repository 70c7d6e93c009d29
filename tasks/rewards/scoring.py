"""Scores of samples by a run's reward function, in this process or in others."""

from collections.abc import Sequence

from tasks.config.reward import RewardSection
from tasks.rewards.pool import Sample, Score, ScoringOrder, score_in_processes
from tasks.rewards.resolve import resolve_reward
from tasks.rewards.worker import score


def score_samples(section: RewardSection, samples: Sequence[Sample]) -> list[Score]:
    """Scores of (prompt record, response text) pairs, in order."""
    if section.processes:
        order = ScoringOrder(section.function, section.arguments, section.deadline_s)
        return score_in_processes(order, samples, section.processes)
    function = resolve_reward(section.function, section.arguments)
    return [Score(**score(function, dict(record), response)) for record, response in samples]
