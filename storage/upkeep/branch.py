"""A new run that begins with one train state of another: its iteration 0 is that state, under manifests of its own.

Within a root the parts are shared, as those of a fork are. From another root they are copied.
"""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from storage import layout, records
from storage.backends.root import Root
from storage.errors import CommitConflict, InputError
from storage.ids import Workflow, check_run_name
from storage.manifest import Manifest, Origin, Part, commit, find
from storage.ownership.scratch import scratch
from storage.parts import PartWriter, materialize
from storage.upkeep.catalog import check_not_removed, names, require_run


class Branched(BaseModel):
    """What a new run begins with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """The new run."""
    parent: str
    """The run that it begins from."""
    iteration: int
    """Whose state it begins with."""
    bytes: int
    """Size of the parts that it names."""
    copied: bool
    """Whether they were copied from another root."""


def branch(
    source: Root,
    workflow: Workflow,
    parent: str,
    iteration: int,
    root: Root,
    run: str,
    config_digest: str,
    config: BaseModel,
) -> Branched:
    """Make run `run` of `root` from the model, the prompts and one state of `parent`; repeated, it completes that.

    Args:
        config_digest: identity of the new run's configuration.
        config: the document that becomes its `run.json`, published last: until then there is no such run.

    Raises:
        InputError: there is no such run or state, the state is not kept, or the new name is taken.
    """
    require_run(source, parent)
    check_not_removed(root, check_run_name(run))
    copied = source.url != root.url
    originals = _originals(source, workflow, parent, iteration)
    copies: dict[str, Manifest] = {}
    for original in originals:
        parts = _copied(source, original, PartWriter(root, run, 0, original.stage)) if copied else original.parts
        inputs = {role: copies[digest].digest for role, digest in original.inputs.items() if digest in copies}
        copies[original.digest] = _published(root, _copy(original, run, parts, config_digest, inputs))
    _check_begun(root, run, copies.values())
    # after the copies: a retention or removal that begins later sees them
    _check_kept(source, workflow, originals[-1])
    check_not_removed(source, parent)
    check_not_removed(root, run)
    key = layout.run_config_key(run)
    if not records.publish(root, key, config) and not records.is_there(root, key, config):
        raise InputError(f"run {run!r} already exists in {root.url}: give the new run another name")
    size = sum(part.bytes for copy in copies.values() for part in copy.parts)
    return Branched(run=run, parent=parent, iteration=iteration, bytes=size, copied=copied)


def _originals(source: Root, workflow: Workflow, parent: str, iteration: int) -> list[Manifest]:
    prepared = find(source, parent, 0, workflow.prepares)
    state = find(source, parent, iteration, workflow.holds_state)
    if prepared is None or state is None:
        there = sorted(names(source, parent).of_stage(workflow.holds_state).values())
        states = f"only those of iterations {there}" if there else "none at all: it holds no model"
        raise InputError(f"run {parent!r} has no train state of iteration {iteration}, {states}")
    _check_kept(source, workflow, state)
    return [prepared, state]


def _check_kept(source: Root, workflow: Workflow, state: Manifest) -> None:
    retired = source.exists(layout.retired_key(state.key))
    if retired or not all(source.exists(part.key) for part in state.parts):
        recorded = names(source, state.run)
        states = {at: key for (at, stage), key in recorded.newest.items() if stage == workflow.holds_state}
        kept = sorted(at for at, key in states.items() if key not in recorded.retired)
        raise InputError(
            f"the train state of iteration {state.iteration} of run {state.run!r} is not kept; those of {kept} are. "
            "Choose one of them"
        )


def _copied(source: Root, original: Manifest, writer: PartWriter) -> tuple[Part, ...]:
    """The same parts below the new run."""
    with scratch() as folder:
        materialize(source, original, folder)
        rows = {part.name: part.rows for part in original.parts}
        written = writer.write_files(folder, list(rows))
    return tuple(part.model_copy(update={"rows": rows[part.name]}) for part in written)


def _copy(
    original: Manifest, run: str, parts: tuple[Part, ...], config_digest: str, inputs: dict[str, str]
) -> Manifest:
    origin = original.origin or Origin(run=original.run, digest=original.digest, config_digest=original.config_digest)
    place = {"run": run, "iteration": 0, "revision": 0, "config_digest": config_digest}
    return original.model_copy(update={**place, "inputs": inputs, "parts": parts, "origin": origin})


def _published(root: Root, copy: Manifest) -> Manifest:
    try:
        return commit(root, copy)
    except CommitConflict as error:
        raise InputError(
            f"run {copy.run!r} was begun otherwise, and not completed: give the new run another name, or remove what "
            f"is there with `ratchet rm {copy.run}` ({error})"
        ) from error


def _check_begun(root: Root, run: str, copies: Iterable[Manifest]) -> None:
    foreign = sorted(set(names(root, run).manifests) - {copy.key for copy in copies})
    if foreign and not root.exists(layout.run_config_key(run)):
        raise InputError(
            f"run {run!r} has no {layout.run_config_key(run)} in {root.url}, but {foreign[0]}: give the new run "
            f"another name, or remove what is there with `ratchet rm {run}`"
        )
