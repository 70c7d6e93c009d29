"""The policy phase: one iteration's samples become optimizer updates."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from storage.errors import StageFailed
from trainer_core.algorithms.losses import group_advantages, kl_estimate, policy_loss, token_weights
from trainer_core.algorithms.update import Update, apply_loss
from trainer_core.batches.sequences import Matrix, Padded, Samples, per_position
from trainer_core.config import PolicyConfig
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import MicroBatch, Passes
from trainer_core.model.token_loss import TokenLoss


@dataclass(frozen=True)
class PolicyPhase:
    """GRPO on the samples of one iteration."""

    passes: Passes
    optimizer: Optimizer
    policy: PolicyConfig
    temperature: float
    """Temperature the samples were drawn at; the trainer's logits are divided by it throughout."""
    seed: tuple[int, ...]
    """Seeds the shuffling into mini-batches; differs from iteration to iteration."""

    def run(self, samples: Samples, reference_logprobs: Matrix | None) -> dict[str, float]:
        """Update the policy and report, see `TrainerProtocol.train_policy`. Collective.

        Raises:
            StageFailed: if no sample is usable.
            NumericsError: if a loss or gradient norm is not finite.
        """
        rows = np.flatnonzero(samples.usable)
        if not len(rows):
            raise StageFailed(f"none of the {len(samples)} samples has a reward; see the status column of the rewards")
        padded = samples.padded()
        old = self.passes.score(padded, rows, self.temperature)
        extras = self._extras(samples, padded, old.logprobs, reference_logprobs)
        updates = [
            self._update(padded, mini_batch, extras)
            for _ in range(self.policy.epochs)
            for mini_batch in self._mini_batches(rows)
        ]
        new = self.passes.score(padded, rows, self.temperature)
        counted = padded.mask & samples.usable[:, None]  # (N, S)
        report = {
            **_mean_of(updates),
            **_engine_difference(samples, old.logprobs, counted),
            "entropy": float(old.entropy[counted].mean()),
            "kl": _mean_kl((new.logprobs - old.logprobs)[counted]),
            "tokens": float(counted.sum()),
        }
        if reference_logprobs is not None:
            report["kl_reference"] = _mean_kl((reference_logprobs - old.logprobs)[counted])
        return report

    def _extras(
        self, samples: Samples, padded: Padded, old_logprobs: Matrix, reference_logprobs: Matrix | None
    ) -> dict[str, Matrix]:
        advantages = group_advantages(samples.rewards, samples.groups, samples.usable, self.policy.normalize_by_std)
        extras = {"old_logprobs": old_logprobs, "advantages": per_position(advantages, padded)}
        if reference_logprobs is not None:
            extras["reference_logprobs"] = reference_logprobs
        return extras

    def _mini_batches(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        if self.policy.mini_batches > 1:
            rows = np.random.default_rng((*self.seed, self.optimizer.updates)).permutation(rows)
        parts = np.array_split(rows, self.policy.mini_batches)
        yield from (part for part in parts if len(part))

    def _update(self, padded: Padded, rows: NDArray[np.int64], extras: dict[str, Matrix]) -> Update:
        weights = np.zeros(padded.mask.shape, dtype=np.float32)
        weights[rows] = token_weights(padded.mask[rows], self.policy.loss_aggregation)
        return apply_loss(
            self.passes, self.optimizer, padded, rows, {**extras, "weight": weights}, self.temperature, self._loss
        )

    def _loss(self, batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> TokenLoss:
        return policy_loss(
            self.policy,
            logprobs,
            batch.extras["old_logprobs"],
            batch.extras["advantages"],
            entropy,
            batch.extras.get("reference_logprobs"),
        )


def _mean_of(updates: list[Update]) -> dict[str, float]:
    return {
        "loss": float(np.mean([update.loss for update in updates])),
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "clip_fraction": float(np.mean([update.clip_fraction for update in updates])),
        "learning_rate": updates[-1].learning_rate,
        "steps": float(len(updates)),
    }


def _mean_kl(log_ratio: NDArray[np.float32]) -> float:
    """Mean k3 estimate of KL(old || other) from log other - log old at the sampled tokens."""
    return float(kl_estimate(torch.from_numpy(log_ratio).double(), "k3").mean())


def _engine_difference(samples: Samples, logprobs: Matrix, counted: NDArray[np.bool_]) -> dict[str, float]:
    difference = np.abs(samples.spread(samples.engine_logprobs, logprobs.shape[1]) - logprobs)[counted]
    return {
        "engine_logprob_diff_mean": float(difference.mean()),
        "engine_logprob_diff_max": float(difference.max()),
    }
