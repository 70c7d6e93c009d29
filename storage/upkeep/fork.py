"""A new run that shares the past of another: the same parts, by reference, under manifests of its own."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from storage import layout, records
from storage.backends.root import Root
from storage.errors import CommitConflict, InputError, StorageError
from storage.ids import Workflow, check_run_name
from storage.manifest import Manifest, Origin, commit
from storage.upkeep.catalog import Contents, Retired, contents, require_run


class Forked(BaseModel):
    """What a fork shares."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """The new run."""
    parent: str
    """The run it came from."""
    iteration: int
    """The last iteration they share; the new run goes on with the next."""
    manifests: int
    """Manifests taken over."""
    shared_bytes: int
    """Size of the parts that both name."""


def fork(
    root: Root, workflow: Workflow, parent: str, iteration: int, run: str, config_digest: str, config: BaseModel
) -> Forked:
    """Make run `run` from the iterations 0 to `iteration` of `parent`; done again, it completes what a crash left.

    Args:
        config_digest: identity of the new run's configuration.
        config: the document that becomes its `run.json`, published last: until then there is no such run.

    Raises:
        InputError: there is no such run, the iteration is not complete or not kept, or the new name is taken.
    """
    require_run(root, parent)
    if root.exists(layout.run_config_key(check_run_name(run))):
        raise InputError(f"run {run!r} is in {root.url} already: give the fork another name with --run")
    past = contents(root, parent)
    shared = [manifest for manifest in past.newest if manifest.iteration <= iteration]
    _check_complete(past, workflow, shared, iteration)
    digests: dict[str, str] = {}
    for manifest in shared:
        copy = _copy(manifest, run, config_digest, digests)
        _publish(root, copy, run)
        digests[manifest.digest] = copy.digest
    _take_over_retirements(root, past, shared, run, digests)
    _check_kept(root, workflow, parent, iteration)
    if not records.publish(root, layout.run_config_key(run), config):
        raise InputError(f"run {run!r} was made by another process just now: give the fork another name with --run")
    parts = {part.key: part.bytes for manifest in shared for part in manifest.parts}
    return Forked(run=run, parent=parent, iteration=iteration, manifests=len(shared), shared_bytes=sum(parts.values()))


def _check_complete(past: Contents, workflow: Workflow, shared: list[Manifest], iteration: int) -> None:
    if any(one.iteration == iteration and one.stage == workflow.ends_iteration for one in shared):
        return
    synced = [one.iteration for one in past.newest if one.stage == workflow.ends_iteration]
    there = f"iterations 0 to {max(synced)} are" if synced else "no iteration is"
    raise InputError(f"iteration {iteration} of run {past.run!r} is not complete; {there}. Choose another with --at")


def _check_kept(root: Root, workflow: Workflow, parent: str, iteration: int) -> None:
    # after our manifests are written: a retention of the parent at this moment sees them, or we see its record
    past = contents(root, parent)
    kept = [manifest.iteration for manifest in past.kept.values() if manifest.stage == workflow.holds_state]
    state = next(one for one in past.newest if one.iteration == iteration and one.stage == workflow.holds_state)
    if iteration not in kept or not all(root.exists(part.key) for part in state.parts):
        raise InputError(
            f"the train state of iteration {iteration} of run {parent!r} is not kept; those of {kept} are. "
            "Choose one of them with --at"
        )


def _copy(manifest: Manifest, run: str, config_digest: str, digests: Mapping[str, str]) -> Manifest:
    unknown = [role for role, digest in manifest.inputs.items() if digest not in digests]
    if unknown:
        raise StorageError(
            f"{manifest.stage} of iteration {manifest.iteration} of run {manifest.run} was made from a {unknown[0]} "
            "that is not the newest of the run: it cannot be shared. `ratchet verify` tells what is missing"
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
            f"run {run!r} was begun as a fork of something else: give this one another name with --run ({error})"
        ) from error


def _take_over_retirements(
    root: Root, past: Contents, shared: list[Manifest], run: str, digests: Mapping[str, str]
) -> None:
    for key, record in past.retired.items():
        manifest = past.manifests[key]
        if manifest in shared:
            copy = Retired(manifest=digests[manifest.digest], keys=record.keys, time=record.time, rule=record.rule)
            whole = layout.manifest_key(run, manifest.iteration, manifest.stage, 0)
            records.publish(root, layout.retired_key(whole), copy)
