"""A new run that shares the past of another: the same parts, by reference, under its own manifests."""

from collections.abc import Collection, Mapping

from pydantic import BaseModel, ConfigDict

from storage import layout, records
from storage.backends.root import Root
from storage.errors import CommitConflict, InputError, StorageError
from storage.ids import Workflow, check_run_name
from storage.manifest import Manifest, Origin, commit, load
from storage.upkeep.catalog import Contents, Names, Retired, check_not_removed, contents, names, names_of, require_run


class Forked(BaseModel):
    """What a fork shares."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """The new run."""
    parent: str
    """The run it came from."""
    iteration: int
    """The last iteration they share; the new run continues with the next."""
    manifests: int
    """Manifests copied."""
    shared_bytes: int
    """Size of the parts that both name."""


def fork(
    root: Root,
    workflow: Workflow,
    parent: str,
    iteration: int,
    run: str,
    config_digest: str,
    config: BaseModel,
    revision: int | None = None,
) -> Forked:
    """Make run `run` from iterations 0 to `iteration` of `parent`; repeated after a crash, it completes the fork.

    Args:
        config_digest: identity of the new run's configuration.
        config: the document that becomes its `run.json`, published last: until then there is no such run.
        revision: of the parent; by default its head.

    Raises:
        InputError: there is no such run, the iteration is not complete or not kept, or the new name is taken.
    """
    require_run(root, parent)
    check_not_removed(root, check_run_name(run))  # what is left of another run would be taken for ours
    if root.exists(layout.run_config_key(run)):
        raise InputError(f"run {run!r} already exists in {root.url}: give the fork another name with --run")
    recorded = names_of(root, parent, revision)
    _check_complete(recorded, workflow, parent, iteration)
    past = contents(root, parent, recorded.only(lambda key: _iteration(key) <= iteration))
    shared = _shared(workflow, past)
    copies = _copies(shared, run, config_digest)
    _check_begun(root, run, copies)
    for copy in copies:
        _publish(root, copy, run)
    _take_over_retirements(root, workflow, past, shared, copies, iteration)
    for one in (parent, run):  # after the copies: a removal that begins later sees them
        check_not_removed(root, one)
    key = layout.run_config_key(run)
    # compared, because the answer to our own write may have been lost
    if not records.publish(root, key, config) and not records.is_there(root, key, config):
        raise InputError(f"run {run!r} was just made by another process: give the fork another name with --run")
    parts = {part.key: part.bytes for copy in copies for part in copy.parts}
    return Forked(run=run, parent=parent, iteration=iteration, manifests=len(copies), shared_bytes=sum(parts.values()))


def check_unused(root: Root, run: str) -> None:
    """Refuse a new run whose name already has manifests: it would continue from those of another configuration.

    Raises:
        InputError: a fork under this name was interrupted before it became a run, or its `run.json` was removed.
    """
    check_not_removed(root, run)
    there = names(root, run).manifests
    if there:
        raise InputError(
            f"run {run!r} has no {layout.run_config_key(run)} in {root.url}, but {len(there)} manifests, such as "
            f"{there[0]}: a fork that was interrupted. Complete it with the same `ratchet fork ... --run {run}`, or "
            f"remove it with `ratchet rm {run}`, or give the new run another name with --run"
        )


def check_past(root: Root, run: str, known: Collection[str]) -> None:
    """Refuse a run that would continue from manifests of another configuration.

    What is under a run's name by mistake begins with iteration 0, as a fork does, so iteration 0 is checked.

    Args:
        known: digests of the configurations that the run has had: what it was started with, and those of its revisions.

    Raises:
        InputError: a manifest was made under none of them.
    """
    for key in names(root, run, 0).manifests:
        if layout.revision_of(key):
            continue  # done again later, under settings that its rerun records
        manifest = load(root, key)
        if manifest.config_digest not in known:
            came = f"shared with run {manifest.origin.run}" if manifest.origin else f"written by {manifest.writer}"
            raise InputError(
                f"{manifest.stage} of iteration 0 of run {run!r} ({came}) belongs to configuration "
                f"{manifest.config_digest}, but the run was started with {' or '.join(sorted(known))}: its past "
                f"was left by something else, such as an interrupted fork. Start a new run with another --run, or "
                f"remove the folder {run} from {root.url}"
            )


def _check_complete(recorded: Names, workflow: Workflow, parent: str, iteration: int) -> None:
    synced = {at for at, stage in recorded.newest if stage == workflow.ends_iteration}
    if iteration not in synced:
        there = f"iterations 0 to {max(synced)} are" if synced else "none is"
        raise InputError(f"iteration {iteration} of run {parent!r} is not complete; {there}. Choose another with --at")


def _check_begun(root: Root, run: str, copies: list[Manifest]) -> None:
    """Refuse manifests that another fork of this name left beyond our iterations: the run would continue from them."""
    ours = {layout.manifest_key(run, copy.iteration, copy.stage, 0) for copy in copies}
    foreign = sorted(set(names(root, run).manifests) - ours)
    if foreign:
        raise InputError(
            f"run {run!r} was begun as another fork, which left {foreign[0]}: give this one another "
            f"name with --run, or remove the folder {run} from {root.url}"
        )


def _take_over_retirements(
    root: Root, workflow: Workflow, past: Contents, shared: list[Manifest], copies: list[Manifest], iteration: int
) -> None:
    """Retire the copies of what the parent has retired; every other state is kept as long as its copy is.

    Checked after the copies are published: concurrent retention of the parent sees them, or we see its records.

    Raises:
        InputError: the state to continue from is not kept.
    """
    recorded = names(root, past.run, revisions=past.revisions)
    states = {key: at for (at, stage), key in recorded.newest.items() if stage == workflow.holds_state}
    kept = sorted(at for key, at in states.items() if key not in recorded.retired)
    for original, copy in zip(shared, copies, strict=True):
        key = layout.manifest_key(past.run, original.iteration, original.stage, original.revision)
        is_last = original.iteration == iteration and original.stage == workflow.holds_state
        retired = key in recorded.retired
        if is_last and (retired or not all(root.exists(part.key) for part in original.parts)):
            raise InputError(
                f"the train state of iteration {iteration} of run {past.run!r} is not kept; those of {kept} are. "
                "Choose one of them with --at"
            )
        if retired:
            record = records.read(root, layout.retired_key(key), Retired)
            whole = layout.manifest_key(copy.run, copy.iteration, copy.stage, copy.revision)
            records.publish(root, layout.retired_key(whole), record.model_copy(update={"manifest": copy.digest}))


def _shared(workflow: Workflow, past: Contents) -> list[Manifest]:
    """What a fork shares: of what nothing else is made from, only what was made from this past.

    An evaluation of weights stays when a stage before it is done again; it is of the weights that were there first.
    """
    there = {one.digest for one in past.newest}
    return [one for one in past.newest if one.stage in workflow.behind or set(one.inputs.values()) <= there]


def _copies(shared: list[Manifest], run: str, config_digest: str) -> list[Manifest]:
    digests: dict[str, str] = {}
    copies = []
    for manifest in shared:
        copy = _copy(manifest, run, config_digest, digests)
        digests[manifest.digest] = copy.digest
        copies.append(copy)
    return copies


def _iteration(key: str) -> int:
    place = layout.place_of(key)
    return place[0] if place else 0


def _copy(manifest: Manifest, run: str, config_digest: str, digests: Mapping[str, str]) -> Manifest:
    unknown = [role for role, digest in manifest.inputs.items() if digest not in digests]
    if unknown:
        raise StorageError(
            f"{manifest.stage} of iteration {manifest.iteration} of run {manifest.run} was made from a {unknown[0]} "
            "that is not of the same revision of the run: it cannot be shared. `ratchet verify` shows what is missing"
        )
    origin = manifest.origin or Origin(run=manifest.run, digest=manifest.digest, config_digest=manifest.config_digest)
    inputs = {role: digests[digest] for role, digest in manifest.inputs.items()}
    changes = {"run": run, "revision": 0, "config_digest": config_digest, "inputs": inputs, "origin": origin}
    return manifest.model_copy(update=changes)


def _publish(root: Root, manifest: Manifest, run: str) -> None:
    try:
        commit(root, manifest)
    except CommitConflict as error:
        raise InputError(
            f"run {run!r} was begun as another fork: give this one another name with --run, or remove the "
            f"folder {run} from {root.url} ({error})"
        ) from error
