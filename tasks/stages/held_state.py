"""The trainer ranks as the stages use them: holding exactly the state that a manifest names."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from storage.layout import STATE
from storage.manifest import Part, need
from storage.parts import PartWriter, materialize, read_part
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.prepared import model_directory
from tasks.stages.stage import StageOutput, Work
from tasks.stages.views import Prepared, Trained
from tasks.workers.trainers import TrainerGroup
from trainer_core.config import OptimizerConfig
from trainer_core.state.facts import needed_for_weights


def trainers(context: RunContext, prepared: Prepared) -> TrainerGroup:
    """The run's trainer ranks, started if necessary. They may hold any state, or none.

    The engines are started with them: each process imports for ten seconds or more, and all are needed eventually.
    """
    config = context.config.train.model_copy(update={"seed": context.config.run.seed})
    directory = model_directory(context, prepared)
    context.workers.warm(directory, config)
    return context.workers.trainers(directory, config)


def ensure_state(context: RunContext, prepared: Prepared, state: Trained) -> TrainerGroup:
    """Trainer ranks that hold the train state `state`, loaded from storage unless they hold it already.

    What a rank holds is used only when its identity is the digest of the manifest. A state that a fork shares
    with its parent was made under another configuration: if the optimizer differs, the fork starts with a fresh one.
    """
    group = trainers(context, prepared)
    if group.identity() != state.digest:
        context.outbox.settle()  # ranks that died may have left a state that is not stored yet
        forked = state.manifest.origin is not None
        fresh = forked and _optimizer_of(context, state) != context.config.train.optimizer
        with local_copy(context, state, weights_only=fresh) as folder:
            group.load(folder, fresh)
        group.adopt(state.digest)
    return group


def ensure_reference(context: RunContext, prepared: Prepared, group: TrainerGroup) -> None:
    """Give the ranks the frozen reference of the KL term: the state before the first RL iteration."""
    if context.config.train.policy.kl_coefficient == 0:
        return
    reference = Trained(need(context.root, prepared.manifest.run, 0, Stage.TRAIN))
    if group.reference() != reference.digest:
        with local_copy(context, reference, weights_only=True) as folder:
            group.load_reference(folder, reference.digest)


def saved(work: Work, group: TrainerGroup, facts: Mapping[str, JsonValue], metrics: Mapping[str, float]) -> StageOutput:
    """The output of a stage that ends with a train state: the ranks write it to disk now, and it is stored later.

    The ranks adopt the state's identity as soon as its manifest has one, which may be before the state is stored;
    whatever is made from it is behind it in the outbox.
    """
    state = write_state(work, group)
    return StageOutput(
        parts=state.parts,
        facts=facts,
        metrics={**metrics, "save_seconds": state.seconds},
        store=state.store,
        identified=group.adopt,
    )


@dataclass(frozen=True)
class WrittenState:
    """A state that the ranks have written to a local folder, and that storage does not hold yet."""

    folder: Path
    writer: PartWriter
    parts: tuple[Part, ...]
    seconds: float
    """How long the ranks took; reading the files afterwards counts as storage."""

    def store(self) -> None:
        """Store the files and remove the folder."""
        self.writer.store_files(self.folder, self.parts, STATE)
        shutil.rmtree(self.folder)


def write_state(work: Work, group: TrainerGroup) -> WrittenState:
    """Let the ranks write their state into a local folder."""
    clock, writer = time.perf_counter(), work.writer
    folder = work.context.scratch / f"save-{writer.iteration:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = group.save(folder)
    seconds = time.perf_counter() - clock
    return WrittenState(folder, writer, writer.describe_files(folder, names, STATE), seconds)


def _optimizer_of(context: RunContext, state: Trained) -> OptimizerConfig:
    facts = json.loads(read_part(context.root, state.manifest.part(f"{STATE}trainer.json")))
    return OptimizerConfig.model_validate(facts["optimizer"])


@contextmanager
def local_copy(context: RunContext, state: Trained, weights_only: bool = False) -> Iterator[Path]:
    """A local directory with the files of a state, or with those its weights need, for the duration of a block."""
    folder = context.scratch / f"load-{state.digest[:16]}"
    try:
        yield materialize(context.root, state.manifest, folder, STATE, needed_for_weights if weights_only else None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
