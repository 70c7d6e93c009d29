"""Settings of one evaluation, beside the run whose weights answer."""

from typing import Literal

from pydantic import Field

from tasks.config.section import COLDEST, Section

PREFIX = "evaluation-"  # prefix of the stage names of evaluations; letters that stand for a digest follow
SETTINGS = "settings"  # name of the fact with what was asked
EXACT = "reward == 1"
"""The condition by which answers pass where none is given and the reward is only ever 0 or 1: its mean is the rate."""
SCORED_BY, ASKED, PASS = "scored_by", "asked", "pass"
"""Facts of an evaluation, the first also of a reward stage: identity of the reward, whose values are compared only with
each other; the other settings that the figures depend on; the condition by which answers pass."""
SOURCE = "reward_source"
"""Fact of each stage that scores: the reward functions by name, each with the digest of its source or its version."""


class EvaluationSettings(Section):
    """Settings of an evaluation. Two evaluations can be compared if these are equal."""

    table: Literal["held_out", "train"] = "held_out"
    """Prompts of the run to answer."""
    prompts: int = Field(default=256, ge=1)
    """Number of prompts, from the first."""
    samples: int = Field(default=0, ge=0, le=4096)
    """Sampled answers to each prompt, beside the greedy one."""
    temperature: float = Field(default=1.0, ge=COLDEST)
    """Temperature of the sampled answers."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the sampled answers."""
    top_k: int = Field(default=0, ge=0)
    """Likeliest tokens that can be drawn for them; 0 for all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Least probability of a token that can be drawn for them, as a share of the likeliest one's."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Limit on the tokens of an answer; by default the run's rollout.max_tokens."""
    passing: str | None = None
    """Condition by which answers pass, as in right >= 1; by default the run's evaluate.pass."""
    seed: int = Field(default=0, ge=0)
    """Seed of the sampled answers: each has one of its own, from this one and its place."""
    prompts_per_part: int = Field(default=64, ge=1)
    """Prompts whose answers are stored together; a crash costs one such part."""
