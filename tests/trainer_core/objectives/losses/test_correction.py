"""Weights between the policy that drew the samples and the trainer's, against one of token by token."""

import math

import numpy as np
import pytest
import torch

from trainer_core.model.segments import Segments
from trainer_core.objective_config import MaskedCorrection, NoCorrection, TruncatedCorrection
from trainer_core.objectives.losses.correction import importance_weights

LENGTHS = [3, 1, 2]
CHANGES = [0.9, -1.2, 0.3, -0.5, 0.8, 0.6]  # log-probability by the trainer - by the behaviour
BEHAVIOUR = [-1.0, -0.2, -3.0, -2.0, -0.1, -0.7]


def weights(correction, changes=CHANGES):
    behaviour = torch.tensor(BEHAVIOUR, dtype=torch.float64)
    trainer = (behaviour + torch.tensor(changes, dtype=torch.float64)).requires_grad_()
    found = importance_weights(correction, trainer, behaviour, Segments(torch.tensor(LENGTHS)))
    assert not found.requires_grad
    return found.tolist()


def ratios(level):
    found = []
    for part in np.split(np.array(CHANGES), np.cumsum(LENGTHS)[:-1]):
        whole = {
            "token": part,
            "sequence": np.full_like(part, part.sum()),
            "sequence_mean": np.full_like(part, part.mean()),
        }
        found += np.exp(whole[level]).tolist()
    return found


def test_without_a_correction_all_count_alike():
    assert weights(NoCorrection()) == [1] * 6


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_truncated_weights(level):
    expected = [min(ratio, 1.5) for ratio in ratios(level)]
    assert 1.5 in expected
    assert weights(TruncatedCorrection(level=level, limit=1.5)) == pytest.approx(expected)


@pytest.mark.parametrize("weigh", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_masked_weights(level, weigh):
    low, high = (0.7, 1.9)
    expected = [(ratio if weigh else 1.0) if low <= ratio <= high else 0.0 for ratio in ratios(level)]
    assert 0 < expected.count(0.0) < 6
    assert weights(MaskedCorrection(level=level, low=low, high=high, weigh=weigh)) == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_ratios_beyond_measure_are_bounded(level):
    found = weights(TruncatedCorrection(level=level, limit=1e30), [1000.0] * 6)
    assert found == pytest.approx([math.exp(20)] * 6)
    assert weights(MaskedCorrection(level=level), [-math.inf] * 6) == [0] * 6
