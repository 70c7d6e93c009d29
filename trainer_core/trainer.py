"""One trainer rank. It imports Megatron, which needs the platform prepared: create one with `start_trainer`."""

import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.errors import InputError, RatchetError, SyncMismatch
from trainer_core.batches.micro_batching import BatchLimits
from trainer_core.batches.sequences import Samples, Sequences, SupervisedExamples, TeacherScores, Vector, as_sequences
from trainer_core.collector import paused
from trainer_core.config import MemoryConfig, OptimizerConfig, RankSpec, TrainerConfig
from trainer_core.model import rng
from trainer_core.model.mesh import join, leave
from trainer_core.model.model import Model, build_model, read_weights
from trainer_core.model.optimizer import Optimizer
from trainer_core.model.passes import Passes
from trainer_core.model.replay import Graphs, Recorders
from trainer_core.phases.critic import Critic
from trainer_core.phases.policy import PolicyPhase
from trainer_core.phases.reference import Reference
from trainer_core.phases.supervised import SupervisedPhase
from trainer_core.phases.teacher import Teacher
from trainer_core.platform.platform import Platform
from trainer_core.protocol import Generators, LoadedState, Planned, SavedFiles, Sent, TrainerProtocol
from trainer_core.state.checkpoint import Saver, base_digest, load_state
from trainer_core.state.facts import (
    CRITIC,
    LoraFacts,
    StateFacts,
    StateIdentity,
    check_base,
    check_critic,
    check_modules,
    read_facts,
)
from trainer_core.weights.channel import Channel, fail
from trainer_core.weights.exchange import agree
from trainer_core.weights.plan import Form
from trainer_core.weights.update import Update


class Trainer(TrainerProtocol):
    """Model, optimizer, random generators, reference and identity of one rank, as `TrainerProtocol` documents them."""

    def __init__(self, model_dir: str, config: TrainerConfig, rank: RankSpec, platform: Platform) -> None:
        """Meet the other ranks and build the model without weights; raises as `start_trainer`."""
        self._config, self._transformer_engine = config, platform.transformer_engine
        self._platform, self._deterministic = platform, rank.chooses_kernels
        self._mesh = join(rank, config.parallel, platform)
        rng.seed_rank(config.seed)
        self._model = build_model(model_dir, config, platform, rank.chooses_kernels)
        limits = BatchLimits(config.micro_batch_tokens, config.micro_batch_size)
        recorders = Recorders(Graphs(), Graphs()) if self._model.graphs else None
        self._passes = Passes(self._model, self._mesh, limits, recorders)
        self._saver = Saver(self._model, self._mesh)
        self._optimizer: Optimizer | None = None
        self._reference: Reference | None = None
        self._reference_identity: str | None = None
        self._critic: Critic | None = None
        if config.critic is not None:
            self._critic = Critic(model_dir, config, config.critic, self._mesh, platform, rank.chooses_kernels)
        self._teacher: tuple[Path, Teacher] | None = None
        self._identity: str | None = None
        self._lora: LoraFacts | None = None
        self._update: Update | None = None
        self._generators: Generators = "continued"
        self._policy_logprobs: Vector = np.zeros(0, dtype=np.float32)
        self._step = 0

    def identity(self) -> str | None:
        return self._identity

    def adopt(self, identity: str) -> None:
        self._identity = identity

    def generators(self) -> Generators:
        return self._generators

    def import_model(self) -> None:
        self._changes()
        self._read_model()
        with self._model.weights("writable"):
            for adapter in self._model.adapters.values():
                adapter.begin(self._config.seed)
        self._begin()
        rng.seed_rank(self._config.seed)
        self._generators, self._step = "continued", 0

    def load(self, directory: Path) -> LoadedState:
        self._changes()
        self._read_base()
        facts = self._checked_facts(directory)
        critic = check_critic(directory, self._critic is not None, self._config.policy.loss.trains_critic)
        restore_rng = facts.parallel == self._config.parallel.ranks
        rng.seed_rank(self._config.seed + facts.step)
        self._optimizer = Optimizer(self._model, self._config.optimizer)
        with self._model.weights("writable"):
            load_state(directory, self._model, self._optimizer, self._mesh, facts, restore_rng)
            identity = self._saver.identity(self._optimizer, facts)
        if self._critic is not None and critic:
            identity = identity.with_critic(self._critic.load(directory / CRITIC, self._transformer_engine))
        elif self._critic is not None:
            self._critic.begin(self._model)
        self._step = facts.step
        self._generators = "restored" if restore_rng else "reseeded"
        generators, updates = self._generators, facts.optimizer_updates
        return LoadedState(facts.step, generators, facts.optimizer, updates, identity)

    def save(self, directory: Path) -> SavedFiles:
        optimizer = self._live_optimizer()
        facts = self._facts(optimizer)
        with self._model.weights("readable"):
            names, identity = self._saver.save(directory, optimizer, facts)
        if self._critic is not None:
            more, digest = self._critic.save(directory / CRITIC, facts)
            names, identity = [*names, *(f"{CRITIC}/{name}" for name in more)], identity.with_critic(digest)
        return SavedFiles(tuple(names), identity)

    def state_identity(self) -> StateIdentity:
        optimizer = self._live_optimizer()
        facts = self._facts(optimizer)
        with self._model.weights("readable"):
            identity = self._saver.identity(optimizer, facts)
        return identity if self._critic is None else identity.with_critic(self._critic.identity(facts))

    def _facts(self, optimizer: Optimizer) -> StateFacts:
        return StateFacts(
            step=self._step,
            optimizer_updates=optimizer.updates,
            optimizer=optimizer.config,
            parallel=self._config.parallel.ranks,
            precision=self._config.precision,
            transformer_engine=self._transformer_engine,
            lora=self._lora,
        )

    def train_policy(self, samples: Samples, temperature: float, reference: bool = False) -> dict[str, float]:
        self._changes()
        self._check_length(samples)
        if self._model.replay is not None:
            self._model.replay.routing.check(samples.routes)
        optimizer, seed = self._live_optimizer(), (self._config.seed, self._step)
        phase = PolicyPhase(self._passes, optimizer, self._config.policy, temperature, seed, self._critic)
        reference_logprobs = self._reference_logprobs(samples, temperature) if reference else None
        if self._config.policy.needs_reference and reference_logprobs is None:
            raise InputError(
                f"policy.kl_coefficient is {self._config.policy.kl_coefficient} and policy.loss.type is "
                f"{self._config.policy.loss.type!r}, which need a reference, and none is used: load one, or set the "
                "coefficient to 0 and use a loss without reference"
            )
        learned = phase.run(samples, reference_logprobs)
        self._step += int(learned.report["steps"])
        self._generators, self._policy_logprobs = "continued", learned.logprobs
        return learned.report

    def policy_logprobs(self) -> Vector:
        return self._policy_logprobs if self._mesh.rank == 0 else np.zeros(0, dtype=np.float32)

    def train_supervised(
        self, examples: SupervisedExamples, steps: int, batch_size: int, optimizer: OptimizerConfig | None = None
    ) -> dict[str, float]:
        self._changes()
        self._check_length(examples)
        if optimizer is not None:
            self._optimizer = Optimizer(self._model, optimizer, "warmup.optimizer")
        phase = SupervisedPhase(self._passes, self._live_optimizer(), self._config.seed)
        report = phase.run(examples, steps, batch_size)
        if optimizer is not None:
            self._begin()
        self._step += int(report["steps"])
        return report

    def logprobs(self, sequences: Sequence[NDArray[np.int32]], temperature: float = 1.0) -> list[NDArray[np.float32]]:
        whole = as_sequences(sequences)
        self._check_length(whole)
        with rng.undisturbed():
            scores = self._passes.score(whole, np.arange(len(sequences)), temperature)
        return np.split(scores.logprobs, np.cumsum(whole.response_lengths)[:-1])

    def reference(self) -> str | None:
        return self._reference_identity

    def load_reference(self, directory: Path, identity: str) -> None:
        self._reference_identity = None
        facts = read_facts(directory)
        check_modules(directory, facts, self._transformer_engine)
        check_base(directory, facts, self._lora)
        self._reference = Reference(directory, self._model)
        self._reference_identity = identity

    def teacher_scores(self, directory: Path, samples: Samples, temperature: float) -> TeacherScores:
        self._check_length(samples)
        if self._teacher is None or self._teacher[0] != directory:
            self._teacher = None  # two would need more memory
            given = self._config, self._mesh, self._platform, self._deterministic, self._model.vocab_size
            self._teacher = directory, Teacher(str(directory), *given)
        return self._teacher[1].scores(samples, temperature)

    def plan_weights(self, version: int, arena_bytes: int, form: Form = "whole") -> Planned:
        self._update = None
        self._read_base()
        base = "" if form == "whole" or self._lora is None else self._lora.base
        with paused(), self._model.weights("readable"):
            update = Update(self._model, self._mesh, self._config, version, arena_bytes, form, base)
        self._update = update
        return Planned(update.digest, update.text if self._mesh.rank == 0 else None, update.exchanges)

    def send_weights(self, digest: str, channel: Channel, stored: Path | None = None) -> Sent:
        update, self._update = self._update, None
        if stored is not None:
            return self._send_stored(update, digest, channel, stored)
        with paused(), self._model.weights("readable"):
            return self._send(update, digest, channel)

    def release(self, memory: MemoryConfig) -> int:
        return sum(model.release(memory) for model in self._models)

    def resume(self) -> None:
        for model in self._models:
            model.residence.resume()

    def close(self) -> None:
        leave()
        gc.unfreeze()  # what this trainer leaves may go

    def _send(self, update: Update | None, digest: str, channel: Channel) -> Sent:
        unfit = None
        if update is None or update.digest != digest:
            held = "no plan is held" if update is None else f"the plan that is held has digest {update.digest}"
            unfit = SyncMismatch(f"an update of digest {digest} is to be sent, but {held}: plan it again")
        elif (problem := update.problem()) is not None:
            unfit = SyncMismatch(f"{problem}: plan the update again")
        self._agree(unfit, channel)
        assert update is not None  # all ranks agree that there is one
        sender = update.send(channel)
        return Sent(sender.digests, sender.seconds)

    def _agree(self, failure: RatchetError | None, channel: Channel) -> None:
        """Go on if all ranks can; else fail on every rank, and let the receivers know."""
        try:
            agree(failure, self._mesh)
        except RatchetError as error:
            fail(channel.folder, str(error))
            raise

    def _send_stored(self, update: Update | None, digest: str, channel: Channel, directory: Path) -> Sent:
        identity, self._identity = self._identity, None
        found: Reference | RatchetError
        try:
            self._checked_facts(directory)
            found = Reference(directory, self._model)
        except RatchetError as error:
            found = error
        self._identity = identity  # what was read has left the live weights as they were
        self._agree(found if isinstance(found, RatchetError) else None, channel)
        assert isinstance(found, Reference)  # all ranks agree that they have read them
        self._identity = None
        with found.in_place():
            try:
                sent = self._send(update, digest, channel)
            except RatchetError as error:
                sent = error
        self._identity = identity  # the live weights are back
        if isinstance(sent, RatchetError):
            raise sent
        return sent

    @property
    def _models(self) -> list[Model]:
        return [self._model] if self._critic is None else [self._model, self._critic.model]

    def _begin(self) -> None:
        """Give the live weights a fresh optimizer, and begin the critic with them."""
        self._optimizer = Optimizer(self._model, self._config.optimizer)
        if self._critic is not None:
            self._critic.begin(self._model)

    def _changes(self) -> None:
        """Forget the identity and the plan: the weights are about to change."""
        self._identity, self._update = None, None

    def _checked_facts(self, directory: Path) -> StateFacts:
        """Facts of a saved state whose weights this trainer can hold; raises as `load`."""
        facts = read_facts(directory)
        check_modules(directory, facts, self._transformer_engine)
        if facts.precision != self._config.precision:
            fact = f"the state is in {facts.precision}, but the trainer computes in {self._config.precision}"
            raise InputError(f"{fact}; use the state's precision")
        check_base(directory, facts, self._lora)
        return facts

    def _read_base(self) -> None:
        """Read the frozen weights, which no state brings, unless it was done."""
        if self._config.lora is not None and self._lora is None:
            self._read_model()

    def _read_model(self) -> None:
        read_weights(self._model)
        if self._config.lora is not None:
            base = base_digest(self._model, self._mesh)
            self._lora = LoraFacts(base=base, **self._config.lora.model_dump())

    def _reference_logprobs(self, samples: Samples, temperature: float) -> Vector:
        if self._reference is None:
            raise InputError("a reference is required, but none is loaded; call load_reference first")
        with self._reference.in_place():
            return self._passes.score(samples, np.flatnonzero(samples.usable), temperature).logprobs

    def _check_length(self, sequences: Sequences) -> None:
        longest = int(sequences.lengths.max(initial=0))
        if longest > self._config.max_length:
            fact = f"a sequence has {longest} tokens, but the trainer's max_length is {self._config.max_length}"
            raise InputError(f"{fact}; shorten prompts or responses, or raise max_length")

    def _live_optimizer(self) -> Optimizer:
        if self._optimizer is None:
            raise RatchetError("the trainer holds no weights yet; call import_model or load first")
        return self._optimizer
