"""The trainer ranks as the stages use them: holding exactly the state that a manifest names."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage.layout import STATE
from storage.manifest import Manifest, Part, need
from storage.parts import PartWriter, materialize, read_part
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.prepare import model_directory
from tasks.stages.stage import StageResult
from tasks.workers.trainers import TrainerGroup
from trainer_core.config import OptimizerConfig
from trainer_core.state.facts import needed_for_weights


def learner(context: RunContext, prepared: Manifest) -> TrainerGroup:
    """The run's trainer ranks, started if they are not there; what they hold is another question.

    The engines are started beside them: each process imports for ten seconds and more, and all are needed in the end.
    """
    config = context.config.train.model_copy(update={"seed": context.config.run.seed})
    directory = model_directory(context, prepared)
    context.fleet.warm(directory, config)
    return context.fleet.trainers(directory, config)


def ensure_state(context: RunContext, prepared: Manifest, state: Manifest) -> TrainerGroup:
    """Trainer ranks that hold the state of the train stage `state`: as they are, or loaded from storage.

    What a rank holds is used only when its identity is the digest of the manifest. A state that a fork shares
    with its parent was made under another meaning: if that includes the optimizer, the fork starts with a fresh one.
    """
    group = learner(context, prepared)
    if group.identity() != state.digest:
        context.outbox.settle()  # ranks that died may have left a state that is not stored yet
        fresh = state.origin is not None and _optimizer_of(context, state) != context.config.train.optimizer
        with local_copy(context, state, weights_only=fresh) as folder:
            group.call("load", str(folder), fresh)
        group.call("adopt", state.digest)
    return group


def adopted(context: RunContext, result: StageResult) -> StageResult:
    """Tell the ranks which state they hold after a train stage; a reused stage left them as they were.

    It may still be on its way to storage. Whoever asks for it has its manifest, so stands behind it in the outbox.
    """
    if not result.reused:
        context.fleet.adopt(result.manifest.digest)
    return result


def ensure_reference(context: RunContext, prepared: Manifest, group: TrainerGroup) -> None:
    """Give the ranks the frozen reference of the KL term: the state before the first RL iteration."""
    if context.config.train.policy.kl_coefficient == 0:
        return
    reference = need(context.root, prepared.run, 0, Stage.TRAIN)
    if group.reference() != reference.digest:
        with local_copy(context, reference, weights_only=True) as folder:
            group.call("load_reference", str(folder), reference.digest)


@dataclass(frozen=True)
class SavedState:
    """A state that the ranks have written to a local folder, and that storage does not hold yet."""

    folder: Path
    writer: PartWriter
    parts: tuple[Part, ...]
    seconds: float
    """How long the ranks took; what the files were read for afterwards is counted as storage."""

    def store(self) -> None:
        """Bring the files to storage and give up the folder."""
        self.writer.store_files(self.folder, self.parts, STATE)
        shutil.rmtree(self.folder)


def save_state(context: RunContext, group: TrainerGroup, writer: PartWriter) -> SavedState:
    """Let the ranks write their state down; storing it is left to whoever has the time."""
    clock = time.perf_counter()
    folder = context.scratch / f"save-{writer.iteration:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = sorted({name for owned in group.call("save", str(folder)) for name in owned})
    seconds = time.perf_counter() - clock
    return SavedState(folder, writer, writer.describe_files(folder, names, STATE), seconds)


def _optimizer_of(context: RunContext, state: Manifest) -> OptimizerConfig:
    facts = json.loads(read_part(context.root, state.part(f"{STATE}trainer.json")))
    return OptimizerConfig.model_validate(facts["optimizer"])


@contextmanager
def local_copy(context: RunContext, state: Manifest, weights_only: bool = False) -> Iterator[Path]:
    """A local directory with the files of a state, or what its weights need of them, for as long as it is read."""
    folder = context.scratch / f"load-{state.digest[:16]}"
    try:
        yield materialize(context.root, state, folder, STATE, needed_for_weights if weights_only else None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
