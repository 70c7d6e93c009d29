"""Protocol of one trainer rank, for the task layer. Importing this module imports neither torch nor Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer_core.batches.sequences import Samples, SupervisedExamples, TeacherScores, Vector
from trainer_core.config import MemoryConfig, OptimizerConfig
from trainer_core.state.facts import StateIdentity
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Form

Generators = Literal["continued", "restored", "reseeded"]
"""History of a rank's random generators since its last training: continued, or restored or reseeded by `load`."""


@dataclass(frozen=True)
class LoadedState:
    step: int  # updates since the model was imported
    rng: Generators  # history of the random generators: where the state left them, or reseeded
    optimizer: OptimizerConfig  # configuration of the optimizer that the state holds
    optimizer_updates: int  # updates of that optimizer
    identity: StateIdentity  # identity of the state that the ranks hold now, computed from their memory


@dataclass(frozen=True)
class Planned:
    """One rank's answer to `plan_weights`."""

    digest: str  # digest of plan, configuration and version; equal on all ranks
    plan: str | None  # the plan itself as JSON, on rank 0; None on the others
    exchanges: int  # exchanges of metadata between the ranks that it took; 0 with one rank


@dataclass(frozen=True)
class Sent:
    """One rank's answer to `send_weights`."""

    digests: dict[str, str]
    """`tensor_digest` of each tensor that this rank has sent, by name, computed from what was packed."""
    seconds: dict[str, float]  # time by what it was spent on: convert, wait, digest


@dataclass(frozen=True)
class SavedFiles:
    names: tuple[str, ...]  # names of the files that this rank has written and that must be stored
    identity: StateIdentity  # identity of the state, the same on every rank
    of_ranks: tuple[tuple[str, ...], ...] = ()  # the names by rank, where the answers of all ranks are together


class TrainerProtocol(Protocol):
    """One rank of the trainer. All methods but `identity`, `reference`, `generators` and `adopt` are collective: all
    ranks call them, in the same order, with the same arguments."""

    def identity(self) -> str | None:
        """Identity of the committed state that this rank holds; None once its weights differ from any."""
        ...

    def adopt(self, identity: str) -> None:
        """Record that what this rank holds has been committed, or was loaded, under this identity."""

    def generators(self) -> Generators:
        """History of the random generators since the last training."""
        ...

    def import_model(self) -> None:
        """Take the weights of the Hugging Face directory; optimizer, schedule, step counter and RNG start fresh."""

    def load(self, directory: Path) -> LoadedState:
        """Continue from a state that `save` wrote into a local folder, under the same or another layout. Under the same
        layout training continues bit for bit as if it had not been interrupted. Under another one the random generators
        are reseeded. Under other settings of the optimizer, as in a fork, its moments and the place in its schedule are
        kept, and the settings are those of this trainer. Raises StorageError if there is no state; InputError if it has
        another precision than this trainer, or Transformer Engine saved it and is not installed here, or vice versa."""
        ...

    def save(self, directory: Path) -> SavedFiles:
        """Write weights, optimizer, step counter and RNG into a local folder, over what was written there before. On
        return the files hold the state, and the trainer may change its own. The next save into the same folder changes
        the files. Raises StorageUnavailable: there is no room for the files."""
        ...

    def state_identity(self) -> StateIdentity:
        """Identity of the live state, as `save` returns it, the same on every rank."""
        ...

    def train_policy(self, samples: Samples, temperature: float, reference: bool = False) -> dict[str, float]:
        """Train on one iteration's samples with the objective of `TrainerConfig.policy`, by default GRPO.

        Advantages are taken within prompt groups, and old log-probabilities are this trainer's own, unless the
        objective says otherwise. Samples that are not usable, or that the objective leaves out, are ignored; if none is
        left, nothing is updated. A single update is a single pass; several have one scoring pass before them, as does a
        KL in the reward, a reference has one more, and measuring the KL another over `TrainerConfig.policy.kl_sample`
        samples. DPO has a scoring pass before each update. A critic values all samples first, and learns before the
        policy does.

        Args:
            samples: all samples of the iteration, on every rank.
            temperature: the temperature they were sampled at; the trainer's logits are divided by it.
            reference: whether to compare with the weights of `load_reference`; must be set if the objective
                needs one (`PolicyConfig.needs_reference`).

        Returns:
            The same on every rank. loss, grad_norm (before clipping), clip_fraction: means over updates;
            learning_rate of the last; entropy of the policy before the updates, in nats; kl: k3 estimate of
            KL(before || after) on `kl_sample` samples, in nats, if that is not 0; kl_reference: the same of
            KL(before || reference) on all, if requested; kl_teacher: the same of KL(before || teacher), with a teacher;
            engine_logprob_diff_mean and _max: |log-probability by trainer - by engine|, in nats; engine_kl: k3 estimate
            of KL(engine || trainer), in nats; correction_weight and correction_fraction, with a correction: mean weight
            and share of tokens out of range; pairs and preference_accuracy, with DPO, and with preference_margin of a
            reward model, which has no metric of the policy; auxiliary_loss, if routers are
            balanced: mean over updates of what is minimised beside loss, coefficient included; tokens: response tokens
            that were trained on; steps: updates. If no sample is left: grad_norm, steps and tokens, all 0. With a
            critic docs/algorithms.md names what is added; loss, grad_norm, clip_fraction and learning_rate are missing
            where it learns alone.

        Raises:
            InputError: if a sequence is longer than max_length, or a reference is needed and none is loaded.
            StageFailed: if no sample is usable.
            NumericsError: if a loss or gradient norm is not finite; that update is not applied.
        """
        ...

    def policy_logprobs(self) -> Vector:
        """Log-probabilities of all response tokens that count of the samples that `train_policy` was given last, flat,
        in nats, by the policy before its updates, under softmax(logits / temperature). NaN for the tokens of samples
        that were not trained on. The first rank has all, the others have none."""
        ...

    def train_supervised(
        self, examples: SupervisedExamples, steps: int, batch_size: int, optimizer: OptimizerConfig | None = None
    ) -> dict[str, float]:
        """Take `steps` updates of maximum likelihood on batches of `batch_size` examples in a seeded order.

        Args:
            examples: all examples, on every rank.
            steps: updates; 0 leaves the weights as they are.
            batch_size: examples per update, over all ranks.
            optimizer: if given, these updates use a fresh optimizer of this configuration, and afterwards the trainer
                holds a fresh one of `TrainerConfig.optimizer`, so that neither moments nor schedule leak from one phase
                into the next. If not, the trainer's optimizer continues.

        Returns:
            The same on every rank: first_loss and loss (mean nats per response token, of the first and last batch),
            grad_norm (mean), learning_rate (last), steps, tokens; auxiliary_loss as `train_policy`.

        Raises:
            NumericsError: if a loss or gradient norm is not finite; that update is not applied.
        """
        ...

    def logprobs(self, sequences: Sequence[NDArray[np.int32]], temperature: float = 1.0) -> list[NDArray[np.float32]]:
        """Log-probability of every token but the first of each sequence given those before it. Nats, float32,
        (len(sequence) - 1,) each, under softmax(logits / temperature); every rank gets all."""
        ...

    def reference(self) -> str | None:
        """Identity of the reference that this rank holds, or None."""
        ...

    def load_reference(self, directory: Path, identity: str) -> None:
        """Keep the weights of a saved state as the frozen reference of the KL term, under this `identity`, which
        `reference` returns from now on. `directory` holds at least the files that `facts.needed_for_weights` names.
        Raises StorageError if there is no state; InputError if Transformer Engine saved it and is not installed here,
        or vice versa."""

    def teacher_scores(self, directory: Path, samples: Samples, temperature: float) -> TeacherScores:
        """Log-probabilities of all response tokens of the usable samples by a frozen teacher, flat, in nats, under
        softmax(logits / temperature), and its `policy.distill.top_k` likeliest tokens there, of those that the policy
        has; 0 for tokens of other samples. `directory` is the Hugging Face directory of the
        teacher, whose content never changes; it is read at the first call. Neither the policy nor a random generator
        changes. Raises InputError: the teacher cannot be built in this layout, or a sequence is longer than max_length.
        """
        ...

    def plan_weights(self, version: int, arena_bytes: int, form: Form = "whole") -> Planned:
        """Plan an update of the engines from the live weights and buffers, to weight version `version`. A bucket has at
        most `arena_bytes`; a larger tensor has one of its own. Other forms than `whole` are those of a trainer with
        adapters: their plans name the frozen weights. Raises SyncMismatch if ranks disagree about the model, or a
        weight has no Hugging Face name."""
        ...

    def send_weights(self, digest: str, channel: Channel, stored: Path | None = None) -> Sent:
        """Convert the live weights and send them as the plan says that the last `plan_weights` made.

        Returns when every receiver has read everything that this rank sends. The plan is forgotten, however this ends,
        and by everything that changes weights.

        Args:
            digest: of that plan.
            channel: how.
            stored: local folder with at least the files of a saved state that `facts.needed_for_weights` names: its
                weights are sent instead. They take the place of the live ones for this call only; `identity` is
                afterwards what it was before, or None if the live weights could not be put back. The optimizer is not
                needed, and a trainer that holds nothing yet can do this too.

        Raises:
            SyncMismatch: there is no such plan, the model no longer fits it, or the receivers gave up.
            StorageUnavailable: there is no room for the arenas.
            StorageError: there is no state in `stored`.
            InputError: that state has another precision, or Transformer Engine saved it and is not installed here, or
                vice versa.
        """
        ...

    def release(self, memory: MemoryConfig) -> int:
        """Free device memory: what `memory` names, and the reserve of the allocator; returns the bytes freed on this
        rank. It comes back with the next operation that needs it, or with `resume`, and no operation gives other
        results. Memory that was freed before stays free, and a rank keeps its identity. Raises AccumulationPending if
        gradients are to be dropped that belong to an update that was not taken."""
        ...

    def resume(self) -> None:
        """Take back all memory that was freed."""

    def close(self) -> None:
        """Leave the process groups; the trainer cannot be used afterwards."""
