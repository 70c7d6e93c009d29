"""Reported figures of samples, by hand."""

import dataclasses
import math

import numpy as np
import pytest

from tests.trainer_core.models import random_samples
from tests.trainer_core.ranks import run_ranks


def differences(rank, world_size, store, samples, trainer, counted):
    from trainer_core.phases.policy import engine_difference

    return engine_difference(samples, trainer, counted)


def test_the_kl_of_the_engine_is_that_of_the_policy_that_drew_the_samples():
    """KL(engine || trainer) at the engine's samples by k3, r - 1 - log r with r = trainer / engine: not symmetric."""
    samples = random_samples()
    engine = np.full(len(samples.engine_logprobs), -2.0, np.float32)
    trainer, counted = engine.copy(), np.zeros(len(engine), dtype=bool)
    trainer[:2], counted[:2] = (-1.0, -2.5), True
    drawn = dataclasses.replace(samples, engine_logprobs=engine)
    (found,) = run_ranks(1, differences, drawn, trainer, counted)
    wanted, reversed_ = ([math.exp(sign * one) - 1 - sign * one for one in (1.0, -0.5)] for sign in (1, -1))
    assert found["engine_kl"] == pytest.approx(np.mean(wanted), rel=1e-6)
    assert found["engine_kl"] != pytest.approx(np.mean(reversed_), rel=0.1)
    assert found["engine_logprob_diff_mean"] == pytest.approx(0.75)
    assert found["engine_logprob_diff_max"] == pytest.approx(1.0)
