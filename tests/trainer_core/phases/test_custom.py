"""An objective of a user in a real rank: the same result as ours, and nothing changes when it fails."""

import numpy as np
import pytest

from tests.trainer_core.models import random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_trainers
from trainer_core.config import OptimizerConfig, PolicyConfig, TrainerConfig

SOURCE = """
import numpy as np, torch

def grouped(scored):
    found = np.zeros(len(scored.rewards))
    for group in np.unique(scored.groups):
        rows = np.flatnonzero(scored.usable & (scored.groups == group))
        scores = scored.rewards[rows].astype(np.float64)
        if len(rows) > 1 and np.ptp(scores) > 0:
            found[rows] = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    return found

class Clip:
    def __init__(self, width):
        self.width = width

    def __call__(self, tokens):
        ratio = torch.exp(tokens.log_ratio)
        plain = -tokens.advantages * ratio
        limited = -tokens.advantages * ratio.clamp(1 - self.width, 1 + self.width)
        return torch.maximum(plain, limited), limited > plain

def failing(tokens):
    return tokens.logprobs / 0
"""
STEPS = {"mini_batches": 2, "epochs": 2, "kl_coefficient": 0.1}


def objectives(trainer, policies, folder):
    """Metrics of an iteration with each objective from the imported weights, or the reason for their absence."""
    from storage.errors import RatchetError
    from trainer_core.phases.policy import PolicyPhase

    samples = random_samples(3)
    reference = samples.engine_logprobs - np.float32(0.1)
    found = {}
    for name, policy in policies.items():
        trainer.import_model()
        phase = PolicyPhase(trainer._passes, trainer._optimizer, policy, 0.8, (0,))
        try:
            found[name] = phase.run(samples, reference).report
        except RatchetError as error:
            found[name] = f"{type(error).__name__}: {error}"
        export(trainer, f"{folder}/{name}")
    return found


@pytest.fixture(scope="module")
def found(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("custom")
    (folder / "mine.py").write_text(SOURCE)
    mine = {"type": "custom", "function": f"{folder}/mine.py:Clip", "arguments": {"width": 0.05}}
    failing = {"type": "custom", "function": f"{folder}/mine.py:failing"}
    policies = {
        "ours": {"clip_low": 0.05, "clip_high": 0.05},
        "mine": {"advantage": {"type": "custom", "function": f"{folder}/mine.py:grouped"}, "loss": mine},
        "failing": {"loss": failing},
    }
    given = {name: PolicyConfig.model_validate({**STEPS, **policy}) for name, policy in policies.items()}
    settings = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64, micro_batch_tokens=20)
    (metrics,) = run_trainers(model_dir, settings, objectives, given, str(folder))
    return metrics, {name: read_export(folder / name) for name in policies}


def test_the_same_formula_gives_the_same_bits(found):
    metrics, weights = found
    assert metrics["mine"] == metrics["ours"]
    assert metrics["ours"]["clip_fraction"] > 0
    assert all(np.array_equal(weights["mine"][name], weights["ours"][name]) for name in weights["ours"])


def test_a_loss_that_fails_leaves_the_weights_as_they_were(found, model_dir):
    metrics, weights = found
    assert metrics["failing"].startswith("NumericsError: train.policy.loss.function 'mine.py:failing' returns")
    assert metrics["failing"].endswith("that are not finite as float32 (mine.py, line 23)")
    original = read_export(model_dir)
    assert all(np.array_equal(weights["failing"][name], original[name]) for name in original)
