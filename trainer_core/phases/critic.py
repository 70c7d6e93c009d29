"""The critic of PPO: a second model over the ranks of the policy, which estimates the return of each token."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from storage.digest import value_digest
from storage.errors import RatchetError
from trainer_core.batches.micro_batching import BatchLimits
from trainer_core.batches.sequences import Samples, Vector
from trainer_core.config import ExpertsConfig, TrainerConfig
from trainer_core.model import rng
from trainer_core.model.mesh import Mesh
from trainer_core.model.micro_batch import MicroBatch
from trainer_core.model.model import Model, build_model, read_weights
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import Objective, Passes
from trainer_core.model.vocab_parallel import EntropyUse
from trainer_core.objectives.losses import preference_loss, value_loss
from trainer_core.objectives.objective_config import PolicyConfig
from trainer_core.objectives.preference import Pairs, preference_report, preference_values
from trainer_core.objectives.selection import sequence_weights
from trainer_core.objectives.tokens import TokenLoss, Tokens
from trainer_core.optimizer_config import CriticConfig
from trainer_core.phases.update import UpdateReport, apply_loss, mini_batches
from trainer_core.platform.platform import Platform
from trainer_core.state.checkpoint import Saver, load_state
from trainer_core.state.facts import StateFacts, StateIdentity, check_modules, read_facts


class Critic:
    """Model, optimizer and state of the critic on one rank. It takes turns with the policy on the same ranks."""

    def __init__(
        self, directory: str, config: TrainerConfig, critic: CriticConfig, mesh: Mesh, platform: Platform, fixed: bool
    ) -> None:
        """Build the model without weights, that of `directory` unless it has a source. Collective; `fixed` is
        `deterministic` of `build_model`, which says what it raises."""
        # what concerns the policy's output layer and routers alone is not the critic's
        megatron = config.megatron.model_copy(
            update={"output_gradient_accumulation_fusion": False, "cuda_graphs": False}
        )
        own = config.model_copy(update={"experts": ExpertsConfig(), "megatron": megatron})
        with rng.undisturbed():
            self.model = build_model(critic.source or directory, own, platform, fixed, "critic")
        self._config, self._mesh = critic, mesh
        limits = BatchLimits(config.micro_batch_tokens, config.micro_batch_size)
        self._passes = _ValuePasses(self.model, mesh, limits)
        self._saver = Saver(self.model, mesh)
        self._optimizer: Optimizer | None = None

    @property
    def optimizer(self) -> Optimizer:
        if self._optimizer is None:
            raise RatchetError("the critic holds no weights yet; call import_model or load first")
        return self._optimizer

    @property
    def warms_up(self) -> bool:
        """It has had too few updates for the policy to learn from it."""
        return self.optimizer.updates < self._config.updates_alone

    def begin(self, policy: Model) -> None:
        """Take the weights of `source`, or else the policy's with a value of 0 for every position, and begin an
        optimizer. Collective."""
        if self._config.source is None:
            self._copy(policy)
        else:
            read_weights(self.model)
        self._optimizer = Optimizer(self.model, self._config.optimizer, "train.critic")

    def _copy(self, policy: Model) -> None:
        with policy.weights("readable"), self.model.weights("writable"), torch.no_grad():
            for own, theirs in zip(self.model.modules, policy.modules, strict=True):
                given = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
                for name, tensor in (*own.named_parameters(), *own.named_buffers()):
                    if ".output_layer." in f".{name}":
                        tensor.zero_()
                    else:
                        tensor.copy_(given[name])

    def values(self, samples: Samples) -> Vector:
        """(R,) estimated return from each response token on, of samples that are usable; 0 for others."""
        return self._passes.score(samples, np.flatnonzero(samples.usable), 1.0).logprobs

    def learn(
        self, samples: Samples, rows: NDArray[np.int64], returns: Vector, seed: tuple[int, ...]
    ) -> dict[str, float]:
        """Take the updates of an iteration towards the (R,) returns of the rows; returns their report. Collective.
        Raises NumericsError: a loss or gradient norm is not finite."""
        assert samples.values is not None, "an iteration begins with the values of its samples"
        given, objective = {"returns": returns, "old_values": samples.values}, Objective(self._loss, 1.0, "none")
        weights = np.ones(len(samples), dtype=np.float32)
        updates = [
            apply_loss(self._passes, self.optimizer, samples, some, weights, given, objective)[0]
            for some in mini_batches(rows, self._config, self.optimizer, seed)
        ]
        counted = samples.per_response_token(np.isin(np.arange(len(samples)), rows))
        return _report(updates, samples.values[counted], returns[counted])

    def scores(self, samples: Samples, rows: NDArray[np.int64]) -> Vector:
        """(N,) value after the whole of each of the rows, prompt and response; 0 for others: a reward. Collective."""
        return self._passes.score(samples.ends, rows, 1.0).logprobs

    def rank(self, policy: PolicyConfig, samples: Samples, pairs: Pairs, seed: tuple[int, ...]) -> dict[str, float]:
        """Take the updates of an iteration by which `scores` order the pairs; returns their report. Collective. Raises
        NumericsError: a loss or gradient norm is not finite."""
        whole, rows = samples.ends, np.unique(pairs)
        before = now = self.scores(samples, rows)
        objective = Objective(
            lambda batch, scores, _: preference_loss(Tokens(scores, batch.segments, batch.values)), 1.0, "none"
        )
        updates: list[UpdateReport] = []
        for some in mini_batches(pairs, self._config, self.optimizer, seed):
            own = np.unique(some)
            now = now if not updates else self.scores(samples, own)
            weights, given = np.zeros(len(samples), np.float32), preference_values(policy, whole, some, now)
            weights[own] = sequence_weights(policy, whole.response_lengths[own], samples.groups[own])
            updates.append(apply_loss(self._passes, self.optimizer, whole, own, weights, given, objective)[0])
        return _ranking(updates, before[pairs], int(samples.response_lengths[rows].sum())) | preference_report(
            whole, pairs, before
        )

    def identity(self, facts: StateFacts) -> str:
        """Digest of its live state; `facts` are those of the policy's. Collective."""
        with self.model.weights("readable"):
            return _digest(self._saver.identity(self.optimizer, self._facts(facts)))

    def save(self, directory: Path, facts: StateFacts) -> tuple[list[str], str]:
        """Write its state into a folder; names of the files of this rank, and `identity`. Raises as `Saver.save`."""
        with self.model.weights("readable"):
            names, identity = self._saver.save(directory, self.optimizer, self._facts(facts))
        return names, _digest(identity)

    def load(self, directory: Path, transformer_engine: bool) -> str:
        """Continue from the state in a folder; its identity. Collective. Raises as `TrainerProtocol.load`."""
        facts = read_facts(directory)
        check_modules(directory, facts, transformer_engine)
        self._optimizer = Optimizer(self.model, self._config.optimizer, "train.critic")
        with self.model.weights("writable"):
            load_state(directory, self.model, self._optimizer, self._mesh, facts, restore_rng=False)
            return _digest(self._saver.identity(self._optimizer, facts))

    def _facts(self, policy: StateFacts) -> StateFacts:
        updates = self.optimizer.updates
        own = {"step": updates, "optimizer_updates": updates, "optimizer": self.optimizer.config}
        return policy.model_copy(update=own)

    def _loss(self, batch: MicroBatch, values: torch.Tensor, _: torch.Tensor) -> TokenLoss:
        return value_loss(values, batch.values["old_values"], batch.values["returns"], self._config.clip_values)


class _ValuePasses(Passes):
    """Passes whose output is a value instead of a log-probability, and an entropy of 0."""

    def _logprobs(
        self, batch: MicroBatch, logits: torch.Tensor, temperature: float, entropy: EntropyUse
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = logits.squeeze(1)  # (R, 1) -> (R,)
        return values, torch.zeros_like(values)


def _digest(identity: StateIdentity) -> str:
    """Identity of the critic's state without the random generators, which the policy's state has."""
    return value_digest([identity.tensors, identity.progress])


def _ranking(updates: list[UpdateReport], scores: NDArray[np.float32], tokens: int) -> dict[str, float]:
    """Metrics of an iteration of a reward model; the (P, 2) scores of its pairs are those before its updates."""
    return {
        "loss": float(np.mean([update.loss for update in updates])),
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "learning_rate": updates[-1].learning_rate,
        "critic_steps": float(len(updates)),
        "preference_margin": float((scores[:, 0] - scores[:, 1]).mean(dtype=np.float64)),
        "tokens": float(tokens),
        "steps": 0.0,
    }


def _report(updates: list[UpdateReport], values: Vector, returns: Vector) -> dict[str, float]:
    """Metrics of an iteration, whose `values` are those before its updates."""
    spread = returns.var(dtype=np.float64)
    return {
        "value_loss": float(np.mean([update.loss for update in updates])),
        "value_grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "value_clip_fraction": float(np.mean([update.clip_fraction for update in updates])),
        "value_mean": float(values.mean(dtype=np.float64)),
        "return_mean": float(returns.mean(dtype=np.float64)),
        "explained_variance": float(1 - (returns - values).var(dtype=np.float64) / spread) if spread else 0.0,
        "critic_learning_rate": updates[-1].learning_rate,
        "critic_steps": float(len(updates)),
    }
