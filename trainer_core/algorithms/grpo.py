"""The policy phase: one iteration's samples become optimizer updates."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from storage.errors import StageFailed
from trainer_core.algorithms.advantages import group_advantages
from trainer_core.algorithms.losses import kl_estimate, policy_loss, sequence_weights
from trainer_core.algorithms.update import Update, apply_loss
from trainer_core.batches.sequences import Samples, Vector
from trainer_core.config import PolicyConfig
from trainer_core.model import rng
from trainer_core.model.micro_batch import MicroBatch
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import Gradients, Objective, Passes, Scores
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

    def run(self, samples: Samples, reference_logprobs: Vector | None) -> dict[str, float]:
        """Update the policy and report, see `TrainerProtocol.train_policy`. Collective.

        A single update needs no pass but its own: before it, old log-probabilities are the current ones.

        Args:
            samples: of the iteration.
            reference_logprobs: of all response tokens, flat, by the reference.

        Raises:
            StageFailed: if no sample is usable.
            NumericsError: if a loss or gradient norm is not finite.
        """
        rows = np.flatnonzero(samples.usable)
        if not len(rows):
            raise StageFailed(f"none of the {len(samples)} samples has a reward; see the status column of the rewards")
        values = self._values(samples, reference_logprobs)
        if self.policy.epochs == self.policy.mini_batches == 1:
            update, gradients = self._update(samples, rows, values, report_entropy=True)
            updates, before = [update], gradients.scores()
        else:
            before = self.passes.score(samples, rows, self.temperature, "reported")
            values["old_logprobs"] = before.logprobs
            updates = [
                self._update(samples, mini_batch, values, report_entropy=False)[0]
                for _ in range(self.policy.epochs)
                for mini_batch in self._mini_batches(rows)
            ]
        counted = samples.per_response_token(samples.usable)
        report = {
            **_mean_of(updates),
            **_engine_difference(samples, before.logprobs, counted),
            "entropy": float(before.entropy[counted].mean()),
            "tokens": float(counted.sum()),
        }
        if self.policy.kl_sample:
            report["kl"] = self._kl_of_updates(samples, rows, before)
        if reference_logprobs is not None:
            report["kl_reference"] = _mean_kl((reference_logprobs - before.logprobs)[counted])
        return report

    def _kl_of_updates(self, samples: Samples, rows: NDArray[np.int64], before: Scores) -> float:
        """Estimate of KL(before || after) on `kl_sample` of the rows, evenly spread."""
        size = min(self.policy.kl_sample, len(rows))
        chosen = rows[np.linspace(0, len(rows) - 1, size).round().astype(np.int64)]
        with rng.undisturbed():  # what is measured must not change the training
            after = self.passes.score(samples, chosen, self.temperature)
        measured = samples.per_response_token(np.isin(np.arange(len(samples)), chosen))
        return _mean_kl((after.logprobs - before.logprobs)[measured])

    def _values(self, samples: Samples, reference_logprobs: Vector | None) -> dict[str, Vector]:
        advantages = group_advantages(samples.rewards, samples.groups, samples.usable, self.policy.normalize_by_std)
        values = {"advantages": samples.per_response_token(advantages)}
        if reference_logprobs is not None:
            values["reference_logprobs"] = reference_logprobs
        return values

    def _mini_batches(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        if self.policy.mini_batches > 1:
            rows = np.random.default_rng((*self.seed, self.optimizer.updates)).permutation(rows)
        parts = np.array_split(rows, self.policy.mini_batches)
        yield from (part for part in parts if len(part))

    def _update(
        self, samples: Samples, rows: NDArray[np.int64], values: dict[str, Vector], report_entropy: bool
    ) -> tuple[Update, Gradients]:
        weights = np.zeros(len(samples), dtype=np.float32)
        lengths, groups = samples.response_lengths[rows], samples.groups[rows]
        weights[rows] = sequence_weights(lengths, groups, self.policy.loss_aggregation)
        entropy = "reported" if report_entropy else "none"
        objective = Objective(
            self._loss, self.temperature, "differentiated" if self.policy.entropy_coefficient else entropy
        )
        return apply_loss(self.passes, self.optimizer, samples, rows, weights, values, objective)

    def _loss(self, batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> TokenLoss:
        return policy_loss(
            self.policy,
            logprobs,
            batch.values.get("old_logprobs"),
            batch.values["advantages"],
            entropy,
            batch.values.get("reference_logprobs"),
        )


def _mean_of(updates: list[Update]) -> dict[str, float]:
    return {
        "loss": float(np.mean([update.loss for update in updates])),
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "clip_fraction": float(np.mean([update.clip_fraction for update in updates])),
        "learning_rate": updates[-1].learning_rate,
        "steps": float(len(updates)),
    }


def _mean_kl(log_ratio: Vector) -> float:
    """Mean k3 estimate of KL(old || other) from log other - log old at the sampled tokens."""
    return float(kl_estimate(torch.from_numpy(log_ratio).double(), "k3").mean())


def _engine_difference(samples: Samples, logprobs: Vector, counted: NDArray[np.bool_]) -> dict[str, float]:
    difference = np.abs(samples.engine_logprobs - logprobs)[counted]
    return {
        "engine_logprob_diff_mean": float(difference.mean()),
        "engine_logprob_diff_max": float(difference.max()),
    }
