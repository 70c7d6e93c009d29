"""The trainer ranks as the stages use them: holding exactly the state that a manifest names."""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from storage.errors import CommitConflict, DigestMismatch, StorageError, StorageUnavailable
from storage.layout import STATE
from storage.manifest import Part
from tasks.stages.context import RunContext, await_start
from tasks.stages.names import Stage
from tasks.stages.prepared import model_directory, other_directory, other_parts
from tasks.stages.stage import StageOutput, Work
from tasks.stages.training_set import recorded
from tasks.stages.views import IDENTITY, Prepared, Trained
from tasks.workers.interface import TrainerGroup
from trainer_core.config import TrainerConfig
from trainer_core.protocol import LoadedState, SavedFiles
from trainer_core.state.facts import needed_for_weights

logger = logging.getLogger(__name__)

_FOLDER, _SAVED = "state", "saved.digest"


def trainers(context: RunContext, prepared: Prepared) -> TrainerGroup:
    """The run's trainer ranks, started if necessary. They may hold any state, or none. The engines are started with
    them: each process imports for ten seconds or more, and all are needed eventually, unless the run trains on stored
    samples. Where trainer and engines take turns, they wait for theirs."""
    config = _begun_alike(context, prepared).model_copy(update={"seed": context.config.run.seed})
    directory = model_directory(context, prepared)
    if context.config.retrain is None and not config.memory.in_use:
        context.workers.warm(directory, config)
    return context.workers.trainers(directory, config)


def _begun_alike(context: RunContext, prepared: Prepared) -> TrainerConfig:
    """The trainer's configuration, whose critic begins with the model that the run has stored for it. Raises
    InputError: it is to, and the run has stored none."""
    config, stored = context.config.train, other_parts(prepared.manifest, "critic")
    if config.critic is None or not (stored or config.critic.source):
        return config
    source = str(other_directory(context, prepared, "critic"))
    return config.model_copy(update={"critic": config.critic.model_copy(update={"source": source})})


def ensure_state(context: RunContext, prepared: Prepared, state: Trained) -> TrainerGroup:
    """Trainer ranks that hold the train state `state`, loaded from storage unless they hold it already. What a rank
    holds is used only when its identity is the digest of the manifest. What it has loaded is identified again, in its
    memory, and compared with what the manifest records. A state that a fork shares with its parent may have been made
    with other settings of the optimizer: its moments continue under the settings of the fork. Raises DigestMismatch:
    the ranks hold something else than the manifest records after they have loaded it."""
    group = trainers(context, prepared)
    await_start(context, group, "the trainer ranks", group.identity)
    if group.identity() != state.digest:
        if not _loaded_from_memory(context, group, state):
            context.outbox.settle()  # ranks that died may have left a state that is not stored yet
            group = trainers(context, prepared)  # if only some could read what is in memory, the group was ended
            stored = _stored(context, state)
            if stored.manifest.parts:
                with local_copy(context, stored) as folder:
                    loaded = group.load(folder)
                _compare(stored, loaded)
            else:
                group = _made_again(context, prepared, stored)
        group.adopt(state.digest)
    return group


def _made_again(context: RunContext, prepared: Prepared, state: Trained) -> TrainerGroup:
    """Trainer ranks that have taken the updates again which made a state that is not stored (`storage.save_every`),
    from the state before it and the samples that are recorded. Raises DigestMismatch: it is not the state that the
    manifest records."""
    at, run = state.manifest.iteration, state.manifest.run
    before = Trained(context.need(at - 1, Stage.TRAIN))
    group = ensure_state(context, prepared, before)
    context.say(f"the state of iteration {at} is not stored: it is trained again from that of iteration {at - 1}")
    given, policy = recorded(context, state, before), context.config.train.policy
    with context.turn:
        resume(context, group)
        ensure_reference(context, prepared, group)
        group.train_policy(given.samples, given.temperature, policy.needs_reference)
    if differing := state.identity.differences(group.state_identity(), generators=True):
        stored = next(one for one in range(at, -1, -1) if context.need(one, Stage.TRAIN).parts)
        raise DigestMismatch(
            f"the state of iteration {at} of run {run} is not stored, and trained again it is not what its manifest "
            f"records: {' and '.join(differing)} differ. Another layout, processor or version adds numbers in another "
            f"order: go on with those that trained it, or train again from iteration {stored}: `ratchet rerun "
            f"{run}@{stored + 1}:train --reason TEXT`"
        )
    return group


def _loaded_from_memory(context: RunContext, group: TrainerGroup, state: Trained) -> bool:
    """Load what ranks that are gone have saved in shared memory, if it is this state and whole. They may have been
    ended while they wrote, and the process that drove the run too; what was loaded decides."""
    folder = context.memory / _FOLDER if context.memory is not None else None
    if folder is None or _saved_in(folder) != state.digest:
        return False
    try:
        _compare(state, group.load(folder))
    except StorageError as error:
        (folder / _SAVED).unlink(missing_ok=True)  # so that it is not tried again
        logger.warning("the state in %s is not used, it is loaded from the store: %s", folder, error)
        return False
    logger.info("the state of iteration %d was loaded from shared memory", state.manifest.iteration)
    return True


def _saved_in(folder: Path) -> str | None:
    """Digest of the manifest of the state in a folder; None while it is written, or if there is none."""
    try:
        return (folder / _SAVED).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _stored(context: RunContext, state: Trained) -> Trained:
    """The state as it is published: the view that its stage returned may be from before its files were stored."""
    if state.manifest.parts:
        return state
    published = Trained(context.need(state.manifest.iteration, Stage.TRAIN))
    if published.digest != state.digest:
        raise CommitConflict(
            f"the state of iteration {state.manifest.iteration} was published as {published.digest}, but this process "
            f"had trained {state.digest}: another process has done the stage. Start again to continue from its result"
        )
    return published


def _compare(state: Trained, loaded: LoadedState) -> None:
    recorded = state.identity
    if differing := recorded.differences(loaded.identity, generators=loaded.rng == "restored"):
        raise DigestMismatch(
            f"the state of iteration {state.manifest.iteration} of run {state.manifest.run} is not what its manifest "
            f"records: {' and '.join(differing)} differ after it was loaded ({loaded.identity.model_dump()} against "
            f"{recorded.model_dump()}). It was damaged before it was stored: fork the run at an earlier iteration"
        )


def ensure_reference(context: RunContext, prepared: Prepared, group: TrainerGroup) -> None:
    """Give the ranks the frozen reference of the KL term: the state before the first RL iteration."""
    if not context.config.train.policy.needs_reference:
        return
    reference = Trained(context.need(0, Stage.TRAIN))
    if group.reference() != reference.digest:
        with local_copy(context, reference, weights_only=True) as folder:
            group.load_reference(folder, reference.digest)


def saved(
    work: Work,
    group: TrainerGroup,
    facts: Mapping[str, JsonValue],
    metrics: Mapping[str, float],
    last: int = 0,
    beside: Callable[[], tuple[Part, ...]] = tuple,
) -> StageOutput:
    """The output of a stage that ends with a train state: the ranks copy it into files, which are stored later, and
    then the parts that `beside` stores. The ranks adopt the state's identity as soon as its manifest has one, which is
    before the state is stored; whatever is made from it is behind it in the outbox. At most one state is on its way:
    the files of the next are the same. A state that `storage.save_every` passes over is only identified, but for that
    of iteration `last`."""
    began = time.perf_counter()
    if not stores(work, last):
        identity = group.state_identity()
        return StageOutput(
            facts={**facts, IDENTITY: identity.model_dump(mode="json")},
            metrics={**metrics, "save_seconds": time.perf_counter() - began},
            content=IDENTITY,
            identified=group.adopt,
        )
    if not work.context.outbox.idle:
        work.context.outbox.settle()
    clock = time.perf_counter()
    folder, files = _write(work.context, group)
    storing = work.context.folders.storing(work.writer, folder, files, STATE)
    return StageOutput(
        facts={**facts, IDENTITY: files.identity.model_dump(mode="json")},
        metrics={**metrics, "save_seconds": time.perf_counter() - clock, "state_wait_seconds": clock - began},
        content=IDENTITY,
        store=lambda: (*storing(), *beside()),
        identified=partial(_identified, group, folder),
    )


def stores(work: Work, last: int) -> bool:
    """True if `storage.save_every` lets the state of this iteration be stored, in a run whose last one is `last`."""
    return work.iteration % work.config.storage.save_every == 0 or work.iteration == last


def _identified(group: TrainerGroup, folder: Path, digest: str) -> None:
    """Record the identity of the saved state at the ranks and in the folder."""
    (folder / _SAVED).write_text(digest, encoding="utf-8")
    group.adopt(digest)


def _write(context: RunContext, group: TrainerGroup) -> tuple[Path, SavedFiles]:
    """Let the ranks write their state: into shared memory, or where that has no room, once and for all, to scratch."""
    on_disk = context.scratch / _FOLDER
    if context.memory is not None and not on_disk.exists():
        try:
            return context.memory / _FOLDER, group.save(_made(context.memory / _FOLDER))
        except StorageUnavailable as error:
            logger.warning("train states are written to %s before they are stored: %s", on_disk, error)
            shutil.rmtree(context.memory / _FOLDER)
    return on_disk, group.save(_made(on_disk))


def _made(folder: Path) -> Path:
    """The folder, which from now on holds no state, until one is written into it and identified."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SAVED).unlink(missing_ok=True)
    return folder


@contextmanager
def local_copy(context: RunContext, state: Trained, weights_only: bool = False) -> Iterator[Path]:
    """A directory on each host with the files of a state, or with those its weights need, for a block."""
    folder = context.scratch / f"load-{state.digest[:16]}"
    try:
        wanted = needed_for_weights if weights_only else None
        yield context.folders.fetch(context.root, state.manifest, folder, STATE, wanted)
    finally:
        context.folders.remove(folder)


def release(context: RunContext, group: TrainerGroup, weights: bool = True) -> dict[str, float]:
    """Let the ranks release what the configuration names; returns metrics, none if it names nothing. A state that was
    saved is in files by then, whether or not it is stored, so that nothing reads the released memory. Without `weights`
    these are kept: they are still to be exported."""
    memory = context.config.train.memory
    if not weights:
        memory = memory.model_copy(update={"offload_parameters": False})
    if not memory.in_use:
        return {}
    clock = time.perf_counter()
    return {"released_bytes": float(group.release(memory)), "release_seconds": time.perf_counter() - clock}


def resume(context: RunContext, group: TrainerGroup) -> dict[str, float]:
    """Let the ranks restore what they released; returns metrics, none if the configuration releases nothing. Memory
    that they released under an earlier configuration is restored when it is needed."""
    if not context.config.train.memory.in_use:
        return {}
    clock = time.perf_counter()
    group.resume()
    return {"resume_seconds": time.perf_counter() - clock}


def summed(metrics: Iterable[dict[str, float]]) -> dict[str, float]:
    """The sums of what `release` has returned several times."""
    pairs = [pair for one in metrics for pair in one.items()]
    return {name: sum(value for other, value in pairs if other == name) for name, _ in pairs}
