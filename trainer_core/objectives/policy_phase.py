"""The policy phase: one iteration's samples become optimizer updates."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from storage.errors import StageFailed
from trainer_core.batches.sequences import Samples, Vector
from trainer_core.model import rng
from trainer_core.model.micro_batch import MicroBatch
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import Gradients, Objective, Passes, Scores
from trainer_core.model.token_loss import TokenLoss
from trainer_core.objective_config import PolicyConfig
from trainer_core.objectives.advantages.composed import Scored, token_advantages
from trainer_core.objectives.advantages.overlong import shaped_rewards
from trainer_core.objectives.losses.aggregation import sequence_weights
from trainer_core.objectives.losses.composed import policy_loss
from trainer_core.objectives.losses.kl import kl_estimate
from trainer_core.objectives.losses.log_ratio import log_ratio
from trainer_core.objectives.losses.preference import preferred_pairs
from trainer_core.objectives.pairs import preference_report, preference_values
from trainer_core.objectives.report import NOTHING_LEARNED, correction_effect, engine_difference, mean_kl, mean_of
from trainer_core.objectives.selection import trained_on
from trainer_core.objectives.update import Update, apply_loss

Rows = NDArray[np.int64]
"""(n,) rows of samples, or (P, 2) pairs of them, of which a mini-batch holds some."""


@dataclass(frozen=True)
class PolicyPhase:
    """The objective of a configuration on the samples of one iteration."""

    passes: Passes
    optimizer: Optimizer
    policy: PolicyConfig
    temperature: float
    """Temperature the samples were drawn at; the trainer's logits are divided by it throughout."""
    seed: tuple[int, ...]
    """Seeds the shuffling into mini-batches; differs from iteration to iteration."""

    def run(self, samples: Samples, reference_logprobs: Vector | None) -> dict[str, float]:
        """Update the policy and report, see `TrainerProtocol.train_policy`. Collective.

        Args:
            samples: of the iteration.
            reference_logprobs: of all response tokens, flat, by the reference.

        Raises:
            StageFailed: if no sample is usable.
            NumericsError: if a loss or gradient norm is not finite.
        """
        if not samples.usable.any():
            raise StageFailed(f"none of the {len(samples)} samples has a reward; see the status column of the rewards")
        units = self._units(samples)
        rows = _rows(units)
        if not len(rows):
            return dict(NOTHING_LEARNED)
        updates, before = self._updates(samples, units, reference_logprobs)
        chosen = np.isin(np.arange(len(samples)), rows)
        counted = samples.per_response_token(chosen)
        report = {
            **mean_of(updates),
            **engine_difference(samples, before.logprobs, counted),
            **correction_effect(self.policy.correction, samples, before.logprobs, chosen),
            "entropy": float(before.entropy[counted].mean()),
            "tokens": float(counted.sum()),
        }
        if self.policy.kl_sample:
            report["kl"] = self._kl_of_updates(samples, rows, before)
        if self.policy.loss.type == "dpo" and reference_logprobs is not None:
            report |= preference_report(samples, units, before.logprobs - reference_logprobs)
        if reference_logprobs is not None:
            report["kl_reference"] = mean_kl((reference_logprobs - before.logprobs)[counted])
        return report

    def _units(self, samples: Samples) -> Rows:
        """What mini-batches are made of: rows, or pairs of them."""
        chosen = trained_on(self.policy, samples)
        if self.policy.loss.type != "dpo":
            return np.flatnonzero(chosen)
        rewards = shaped_rewards(self.policy.overlong, samples.rewards, samples.response_lengths)
        return preferred_pairs(self.policy.loss, rewards, samples.groups, chosen)

    def _updates(self, samples: Samples, units: Rows, reference_logprobs: Vector | None) -> tuple[list[Update], Scores]:
        """All updates, and the policy's values before them.

        A single update needs no pass but its own, unless what it minimises depends on the values.
        """
        several = self.policy.epochs * self.policy.mini_batches > 1
        if not (several or self._needs_scores):
            values = self._values(samples, units, None, reference_logprobs)
            update, gradients = self._update(samples, units, values, report_entropy=True)
            return [update], gradients.scores()
        before = self.passes.score(samples, _rows(units), self.temperature, "reported")
        values = self._values(samples, _rows(units), before, reference_logprobs)
        if several and self.policy.old_policy == "trainer":
            values["old_logprobs"] = before.logprobs
        now, updates = before, []
        for mini_batch in self.mini_batches(units):
            rows = _rows(mini_batch)
            if self.policy.loss.type == "dpo":
                now = now if not updates else self.passes.score(samples, rows, self.temperature)
                change = now.logprobs - values["reference_logprobs"]
                values |= preference_values(self.policy.loss, samples, mini_batch, change)
            updates.append(self._update(samples, rows, values, report_entropy=False)[0])
        return updates, before

    @property
    def _needs_scores(self) -> bool:
        policy = self.policy
        return policy.loss.type == "dpo" or (policy.kl_coefficient > 0 and policy.kl_in == "reward")

    def _kl_of_updates(self, samples: Samples, rows: NDArray[np.int64], before: Scores) -> float:
        """Estimate of KL(before || after) on `kl_sample` of the rows, evenly spread."""
        size = min(self.policy.kl_sample, len(rows))
        chosen = rows[np.linspace(0, len(rows) - 1, size).round().astype(np.int64)]
        with rng.undisturbed():  # what is measured must not change the training
            after = self.passes.score(samples, chosen, self.temperature)
        measured = samples.per_response_token(np.isin(np.arange(len(samples)), chosen))
        return mean_kl((after.logprobs - before.logprobs)[measured])

    def _values(
        self, samples: Samples, rows: NDArray[np.int64], before: Scores | None, reference_logprobs: Vector | None
    ) -> dict[str, Vector]:
        """What the loss needs of each response token, by the names of `policy_loss`."""
        values: dict[str, Vector] = {}
        if reference_logprobs is not None:
            values["reference_logprobs"] = reference_logprobs
        if self.policy.old_policy == "behaviour":
            values["old_logprobs"] = samples.engine_logprobs
        if self.policy.correction.type != "none":
            values["behaviour_logprobs"] = samples.engine_logprobs
        if self.policy.loss.type not in ("sft", "dpo"):
            usable = np.isin(np.arange(len(samples)), rows)
            scored = Scored(samples.rewards, samples.groups, usable, samples.response_lengths)
            penalties = self._penalties(samples.per_response_token(usable), before, reference_logprobs)
            values["advantages"] = token_advantages(self.policy, scored, penalties)
        return values

    def _penalties(
        self, counted: NDArray[np.bool_], before: Scores | None, reference_logprobs: Vector | None
    ) -> NDArray[np.float64] | None:
        """(R,) what the KL to the reference takes from the reward at each response token, 0 where none counts."""
        if before is None or reference_logprobs is None or self.policy.kl_in == "loss":
            return None
        found = np.zeros(len(counted))
        reference, own = (torch.from_numpy(values[counted]) for values in (reference_logprobs, before.logprobs))
        estimate = kl_estimate(log_ratio(reference, own).double(), self.policy.kl_estimator)
        found[counted] = self.policy.kl_coefficient * estimate.numpy()
        return found

    def mini_batches(self, units: Rows) -> Iterator[Rows]:
        for _ in range(self.policy.epochs):
            yield from self._of_epoch(units)

    def _of_epoch(self, units: Rows) -> Iterator[Rows]:
        if self.policy.mini_batches > 1:
            units = np.random.default_rng((*self.seed, self.optimizer.updates)).permutation(units)
        parts = np.array_split(units, self.policy.mini_batches)
        yield from (part for part in parts if len(part))

    def _update(
        self, samples: Samples, rows: NDArray[np.int64], values: dict[str, Vector], report_entropy: bool
    ) -> tuple[Update, Gradients]:
        weights = np.zeros(len(samples), dtype=np.float32)
        weights[rows] = self._weights(samples.response_lengths[rows], samples.groups[rows])
        entropy = "reported" if report_entropy else "none"
        objective = Objective(
            self._loss, self.temperature, "differentiated" if self.policy.entropy_coefficient else entropy
        )
        return apply_loss(self.passes, self.optimizer, samples, rows, weights, values, objective)

    def _weights(self, lengths: NDArray[np.int64], groups: NDArray[np.int32]) -> Vector:
        if self.policy.loss.type == "dpo":  # its values are shares of the mean over pairs already
            return np.full(len(lengths), lengths.sum(), dtype=np.float32)
        return sequence_weights(lengths, groups, self.policy.loss_aggregation, self.policy.loss_length)

    def _loss(self, batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> TokenLoss:
        return policy_loss(self.policy, logprobs, entropy, batch.values, batch.segments)


def _rows(units: Rows) -> NDArray[np.int64]:
    """The rows of a mini-batch, each once."""
    return units if units.ndim == 1 else np.unique(units)
