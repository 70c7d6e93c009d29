"""The policy phase: one iteration's samples become optimizer updates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from storage.errors import InputError, StageFailed
from trainer_core.batches.sequences import Samples, Vector
from trainer_core.model import rng
from trainer_core.model.micro_batch import MicroBatch
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import Gradients, Objective, Passes, TokenScores
from trainer_core.objectives.advantages import token_advantages, token_returns
from trainer_core.objectives.losses import correction_effect, distilled, kl_estimate, policy_loss
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.preference import preference_report, preference_values
from trainer_core.objectives.registry import loss_of
from trainer_core.objectives.scored import scored_of
from trainer_core.objectives.selection import Units, sequence_weights, units_of
from trainer_core.objectives.tokens import TokenLoss, Tokens, bounded_log_ratio
from trainer_core.phases.critic import Critic
from trainer_core.phases.update import UpdateReport, apply_loss, mean_auxiliary_loss, mini_batches

NOTHING_LEARNED = {"grad_norm": 0.0, "steps": 0.0, "tokens": 0.0}
"""Report of an iteration of which no sample is left to train on."""


@dataclass(frozen=True)
class Learned:
    report: dict[str, float]  # that of `TrainerProtocol.train_policy`
    logprobs: Vector  # that of `TrainerProtocol.policy_logprobs`


@dataclass(frozen=True)
class PolicyPhase:
    """The objective of a configuration on the samples of one iteration."""

    passes: Passes
    optimizer: Optimizer
    policy: PolicyConfig
    temperature: float  # temperature the samples were drawn at; the trainer's logits are divided by it throughout
    seed: tuple[int, ...]  # seeds the shuffling into mini-batches; differs from iteration to iteration
    critic: Critic | None = None  # gives the values of generalised advantages, and learns from what they become

    def run(self, samples: Samples, reference_logprobs: Vector | None) -> Learned:
        """Update the policy. Collective. The reference's log-probabilities are those of all response tokens, flat.
        Raises InputError: a function of the user's own fails, or returns something else than is expected. Raises
        StageFailed: no sample is usable. Raises NumericsError: a loss or gradient norm is not finite."""
        self._check(samples)
        units = units_of(self.policy, samples)
        rows = np.unique(units)
        if not len(rows):
            return Learned(dict(NOTHING_LEARNED), np.full_like(samples.engine_logprobs, np.nan))
        if self.critic is not None and self.policy.loss.trains_critic:
            report = self.critic.rank(self.policy, samples, units, self.seed)
            return Learned(report, np.full_like(samples.engine_logprobs, np.nan))
        if self.critic is not None:
            samples = replace(samples, values=self.critic.values(samples))
        warms_up = self.critic is not None and self.critic.warms_up
        before, values = self._before(samples, units, reference_logprobs, warms_up)
        learned: dict[str, float] = {}
        if self.critic is not None:
            learned = self.critic.learn(samples, rows, values.pop("returns"), self.seed)
        updates, before = ([], before) if warms_up else self._updates(samples, units, before, values)
        assert before is not None  # the updates have found it
        chosen = np.isin(np.arange(len(samples)), rows)
        counted = samples.per_response_token(chosen)
        report = {
            **(mean_of(updates) if updates else {"steps": 0.0}),
            **learned,
            **engine_difference(samples, before.logprobs, counted),
            **correction_effect(self.policy.correction, samples, before.logprobs, chosen),
            "entropy": float(before.entropy[counted].mean()),
            "tokens": float(counted.sum()),
        }
        if self.policy.kl_sample:
            report["kl"] = self._kl_of_updates(samples, rows, before)
        if reference_logprobs is not None:
            change = before.logprobs - reference_logprobs
            report["kl_reference"] = mean_kl(-change[counted])
            if self.policy.loss.paired:
                report |= preference_report(samples, units, change)
        if samples.teacher_logprobs is not None:
            report["kl_teacher"] = mean_kl((samples.teacher_logprobs - before.logprobs)[counted])
        return Learned(report, np.where(counted, before.logprobs, np.float32(np.nan)))

    def _check(self, samples: Samples) -> None:
        if not samples.usable.any():
            lacking = "a reward; see the status column of the rewards" if self.policy.needs_rewards else "a response"
            raise StageFailed(f"none of the {len(samples)} samples has {lacking}")
        if self.policy.distill is not None and samples.teacher_logprobs is None:
            raise InputError("train.policy.distill needs the teacher's log-probabilities: call teacher_scores first")

    def _before(
        self, samples: Samples, units: Units, reference_logprobs: Vector | None, scores: bool
    ) -> tuple[TokenScores | None, dict[str, NDArray]]:
        """The policy's values before all updates, and what the loss needs. The former come from a pass of their own,
        which is only taken where the loss needs it, or if it `scores` for another reason."""
        several = self.policy.epochs * self.policy.mini_batches > 1
        before, rows = None, np.unique(units)
        if several or scores or self.policy.scores_first:
            before = self.passes.score(samples, rows, self.temperature, "reported")
        values = self._values(samples, rows, before, reference_logprobs)
        if before is not None and several and self.policy.old_policy == "trainer":
            values["old_logprobs"] = before.logprobs
        return before, values

    def _updates(
        self, samples: Samples, units: Units, before: TokenScores | None, values: dict[str, NDArray]
    ) -> tuple[list[UpdateReport], TokenScores]:
        """All updates, and the policy's values before them, which a single update finds itself."""
        if before is None:
            update, gradients = self._update(samples, units, values, report_entropy=True)
            return [update], gradients.scores()
        now, updates = before, []
        for mini_batch in mini_batches(units, self.policy, self.optimizer, self.seed):
            rows = np.unique(mini_batch) if self.policy.loss.paired else mini_batch
            if self.policy.loss.paired:
                now = now if not updates else self.passes.score(samples, rows, self.temperature)
                change = now.logprobs - values["reference_logprobs"]
                values |= preference_values(self.policy, samples, mini_batch, change)
            updates.append(self._update(samples, rows, values, report_entropy=False)[0])
        return updates, before

    def _kl_of_updates(self, samples: Samples, rows: NDArray[np.int64], before: TokenScores) -> float:
        """Estimate of KL(before || after) on `kl_sample` of the rows, evenly spread."""
        size = min(self.policy.kl_sample, len(rows))
        chosen = rows[np.linspace(0, len(rows) - 1, size).round().astype(np.int64)]
        with rng.undisturbed():  # a measurement must not change the training
            after = self.passes.score(samples, chosen, self.temperature)
        measured = samples.per_response_token(np.isin(np.arange(len(samples)), chosen))
        return mean_kl((after.logprobs - before.logprobs)[measured])

    def _values(
        self, samples: Samples, rows: NDArray[np.int64], before: TokenScores | None, reference_logprobs: Vector | None
    ) -> dict[str, NDArray]:
        """Values of each response token that the loss needs, by the names of `Tokens`."""
        values: dict[str, NDArray] = {}
        if reference_logprobs is not None:
            values["reference_logprobs"] = reference_logprobs
        if self.policy.old_policy == "behaviour":
            values["old_logprobs"] = samples.engine_logprobs
        if self.policy.weighs_behaviour:
            values["behaviour_logprobs"] = samples.engine_logprobs
        if self.policy.compares_top:
            assert samples.teacher_top is not None  # found with the log-probabilities
            values["top_tokens"] = samples.teacher_top.tokens.astype(np.int64)
            values["top_logprobs"] = samples.teacher_top.logprobs
        if self.policy.needs_advantages:
            values |= self._advantages(samples, rows, before, reference_logprobs)
        return values

    def _advantages(
        self, samples: Samples, rows: NDArray[np.int64], before: TokenScores | None, reference_logprobs: Vector | None
    ) -> dict[str, Vector]:
        """(R,) advantage of each response token from rewards, from the teacher, or from both; with a critic the (R,)
        returns too."""
        usable, found = np.isin(np.arange(len(samples)), rows), np.zeros(0, dtype=np.float32)
        counted, returns = samples.per_response_token(usable), dict[str, Vector]()
        if self.policy.needs_rewards:
            penalties = self._penalties(counted, before, reference_logprobs)
            scored = scored_of(samples, usable)
            found = token_advantages(self.policy, scored, penalties)
            if self.critic is not None:
                returns["returns"] = token_returns(self.policy, scored, penalties)
        if self.policy.distill is None or self.policy.compares_top:
            weight = 1.0 if self.policy.distill is None else self.policy.distill.reward_weight
            return {"advantages": found if weight == 1 else weight * found, **returns}
        own = samples.engine_logprobs if self.policy.old_policy == "behaviour" or before is None else before.logprobs
        assert samples.teacher_logprobs is not None  # `run` has refused that
        found = distilled(self.policy.distill, found, samples.teacher_logprobs, own, counted)
        return {"advantages": found, **returns}

    def _penalties(
        self, counted: NDArray[np.bool_], before: TokenScores | None, reference_logprobs: Vector | None
    ) -> NDArray[np.float64] | None:
        """(R,) share of the KL to the reference in the reward of each response token, 0 where the sample is unused."""
        if before is None or reference_logprobs is None or self.policy.kl_in == "loss":
            return None
        found = np.zeros(len(counted))
        reference, own = (torch.from_numpy(values[counted]) for values in (reference_logprobs, before.logprobs))
        estimate = kl_estimate(bounded_log_ratio(reference, own).double(), self.policy.kl_estimator)
        found[counted] = self.policy.kl_coefficient * estimate.numpy()
        return found

    def _update(
        self, samples: Samples, rows: NDArray[np.int64], values: dict[str, NDArray], report_entropy: bool
    ) -> tuple[UpdateReport, Gradients]:
        weights = np.zeros(len(samples), dtype=np.float32)
        of_rows = samples.response_lengths[rows], samples.groups[rows], samples.owners[rows]
        weights[rows] = sequence_weights(self.policy, *of_rows)
        needed, loss = self.policy.needs_entropy, loss_of(self.policy)

        def token_loss(batch: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> TokenLoss:
            known = {**batch.values, "entropy": entropy} if needed else batch.values
            return policy_loss(self.policy, loss, Tokens(logprobs, batch.segments, known))

        entropy_use = "differentiated" if needed else "reported" if report_entropy else "none"
        objective = Objective(token_loss, self.temperature, entropy_use, self.policy.compares_top)
        return apply_loss(self.passes, self.optimizer, samples, rows, weights, values, objective)


def mean_of(updates: Sequence[UpdateReport]) -> dict[str, float]:
    names = ("loss", "grad_norm", "clip_fraction")
    means = {name: float(np.mean([vars(update)[name] for update in updates])) for name in names}
    last = {"learning_rate": updates[-1].learning_rate, "steps": float(len(updates))}
    return means | last | mean_auxiliary_loss(updates)


def mean_kl(change: Vector) -> float:
    """Mean k3 estimate of KL(old || other) from log other - log old at the tokens drawn by old."""
    return float(kl_estimate(torch.from_numpy(change).double(), "k3").mean())


def engine_difference(samples: Samples, logprobs: Vector, counted: NDArray[np.bool_]) -> dict[str, float]:
    """Distance between the policy that drew the samples and the trainer's, over the counted tokens."""
    engine, trainer = samples.engine_logprobs[counted], logprobs[counted]
    difference = np.abs(engine - trainer)
    change = bounded_log_ratio(torch.from_numpy(trainer).double(), torch.from_numpy(engine).double())
    return {
        "engine_logprob_diff_mean": float(difference.mean()),
        "engine_logprob_diff_max": float(difference.max()),
        "engine_kl": float(kl_estimate(change, "k3").mean()),
    }
