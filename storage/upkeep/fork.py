"""Runs that begin with a past of another: all of it up to an iteration (a fork), or one of its states (a branch).

A run names parts below its own folder alone, so they are copied: first the parts, then the manifests, then `run.json`.
Doing the same again completes it: docs/storage.md, "Forks"."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from storage import layout, records
from storage.backends.root import Root
from storage.errors import CommitConflict, InputError, NotCommitted, PartMissing, StorageError
from storage.ids import Workflow, check_run_name
from storage.manifest import Manifest, Origin, commit, find, load
from storage.ownership.scratch import scratch
from storage.parallel import each
from storage.parts import PartWriter, materialize
from storage.upkeep.catalog import (
    Contents,
    Retired,
    check_not_removed,
    contents,
    names,
    names_of,
    require_run,
    stored_states,
)
from storage.upkeep.holes import check_whole

_COPIERS = 8

Announce = Callable[[str], object]  # told, in a sentence, of what will be copied, before anything is


class Forked(BaseModel, frozen=True, extra="forbid"):
    run: str  # the new run
    parent: str  # the run it came from
    iteration: int  # the last iteration of the parent that the new run has, or whose state it begins with
    manifests: int  # manifests copied
    bytes: int  # size of their parts
    linked: bool  # True if these are hard links, which take no space

    @property
    def cost(self) -> str:
        space = "as hard links, which take no space" if self.linked else "to be copied"
        size = f"{self.bytes / 2**20:.1f} MiB"
        return f"run {self.run} takes {self.manifests} stages from run {self.parent}: {size} of parts, {space}"


def fork(
    root: Root,
    workflow: Workflow,
    parent: str,
    iteration: int,
    run: str,
    config_digest: str,
    config: BaseModel,
    revision: int | None = None,
    announce: Announce = lambda _: None,
    older: int = 0,
    given: Sequence[str] = (),
) -> Forked:
    """Make run `run` from iterations 0 to `iteration` of `parent`, in its head or a revision; repeated after a crash,
    it completes the fork. `config` becomes its `run.json`, published last, `config_digest` is its identity. The state
    of `iteration` must be kept, and those of `older` iterations before it, whose weights sample for the fork. A repair
    repeats the settings `given`. Raises InputError if there is no such run, the iteration is not complete or kept, or
    the name taken; WrongRecord if a stage up to it is lost; PartMissing."""
    require_run(root, parent)
    recorded = names_of(root, parent, revision)
    check_whole(root, workflow, parent, recorded, older, iteration, given)
    synced = {at for at, stage in recorded.newest if stage == workflow.ends_iteration}
    if iteration not in synced:
        there = f"iterations 0 to {max(synced)} are" if synced else "none is yet"
        raise InputError(f"iteration {iteration} of run {parent!r} is not complete; {there}: choose one of them")
    past = contents(root, parent, recorded.only(lambda key: (layout.place_of(key) or (0, ""))[0] <= iteration))
    new = _New(root, root, workflow, parent, check_run_name(run), config_digest)
    originals = [(one, one.iteration) for one in _shared(workflow, past)]
    return new.begin(originals, set(past.retired), iteration, config, announce, older)


def branch(
    source: Root,
    workflow: Workflow,
    parent: str,
    iteration: int,
    root: Root,
    run: str,
    config_digest: str,
    config: BaseModel,
    announce: Announce = lambda _: None,
) -> Forked:
    """Make run `run` of `root` from the model, the prompts and one state of `parent`; repeated, it completes that.
    Arguments and errors are those of `fork`; the parent may be in another root."""
    require_run(source, parent)
    prepared = find(source, parent, 0, workflow.prepares)
    state = find(source, parent, iteration, workflow.holds_state)
    if prepared is None or state is None:
        there = sorted(names(source, parent).of_stage(workflow.holds_state).values())
        states = f"only those of iterations {there}" if there else "none at all: it holds no model"
        raise InputError(f"run {parent!r} has no train state of iteration {iteration}, {states}")
    retired = {state.key} if source.exists(layout.retired_key(state.key)) else set[str]()
    new = _New(source, root, workflow, parent, check_run_name(run), config_digest)
    return new.begin([(prepared, 0), (state, 0)], retired, iteration, config, announce)


def check_unused(root: Root, run: str) -> None:
    """Refuse a new run whose name already has manifests: it would continue from those of another configuration. Parts
    alone do no harm: a fork or a start that was killed has left them, and a stage compares what it finds. Raises
    InputError if a fork under this name was interrupted before it became a run, or its `run.json` was removed."""
    check_not_removed(root, run)
    there = names(root, run).manifests
    if there:
        raise InputError(
            f"run {run!r} has no {layout.run_config_key(run)} in {root.url}, but {len(there)} manifests, such as "
            f"{there[0]}: a fork that was interrupted. Complete it with the same `ratchet fork ... --run "
            f"{run}`, or remove it with `ratchet rm {run}`, or give the new run another name with --run"
        )


def check_past(root: Root, run: str, known: Collection[str]) -> None:
    """Refuse a run that would continue from manifests of another configuration. What is under a run's name by mistake
    begins with iteration 0, as a fork does, so iteration 0 is checked. `known` are digests of the configurations that
    the run has had: what it was started with, and those of its revisions. Raises InputError if a manifest was made
    under none of them."""
    for key in names(root, run, 0).manifests:
        if layout.revision_of(key):
            continue  # done again later, under settings that its rerun records
        manifest = load(root, key)
        if manifest.config_digest not in known:
            came = f"taken from run {manifest.origin.run}" if manifest.origin else f"written by {manifest.writer}"
            raise InputError(
                f"{manifest.stage} of iteration 0 of run {run!r} ({came}) belongs to configuration "
                f"{manifest.config_digest}, but the run was started with {' or '.join(sorted(known))}: its past "
                f"was left by something else, such as an interrupted fork. Start a new run with another --run, or "
                f"remove the folder {run} from {root.url}"
            )


@dataclass(frozen=True)
class _New:
    source: Root
    root: Root
    workflow: Workflow
    parent: str
    run: str
    config_digest: str

    def begin(
        self,
        originals: Sequence[tuple[Manifest, int]],
        retired: Collection[str],
        iteration: int,
        config: BaseModel,
        announce: Announce,
        older: int = 0,
    ) -> Forked:
        """Copy manifests of the parent, each to an iteration, with their parts, but for those that are retired."""
        check_not_removed(self.root, self.run)  # what is left of another run would be taken for ours
        key = layout.run_config_key(self.run)
        if self.root.exists(key):
            raise InputError(f"run {self.run!r} already exists in {self.root.url}: give the new run another name")
        digests: dict[str, str] = {}
        copies = [self._copy(original, at, digests) for original, at in originals]
        foreign = sorted(set(names(self.root, self.run).manifests) - {copy.key for copy in copies})
        if foreign:  # the run would continue from them
            raise self._begun(f"which left {foreign[0]}")
        needed = self._needed(originals, range(iteration - older, iteration + 1))
        made = self._described(originals, retired, iteration)
        announce(made.cost)
        there = set(self.root.keys(layout.part_folder(self.run)))
        for (original, _), copy in zip(originals, copies, strict=True):
            if original.key in retired or not self._has_parts(original, copy, there):
                if original in needed:
                    raise self._not_kept(original.iteration, older)
                self._retire(original, copy, there)
        for copy in copies:
            try:
                commit(self.root, copy)
            except CommitConflict as error:
                raise self._begun(f"and not completed ({error})") from error
        check_not_removed(self.root, self.run)  # a removal that begins later sees the manifests
        # compared, because the answer to our own write may have been lost
        if not records.publish(self.root, key, config) and not records.is_there(self.root, key, config):
            raise InputError(f"run {self.run!r} was just made by another process: give the new run another name")
        return made

    def _needed(self, originals: Sequence[tuple[Manifest, int]], iterations: range) -> list[Manifest]:
        """Manifests of the states that the new run begins with; under its settings none could be made again."""
        stage = self.workflow.holds_state
        needed = [one for one, _ in originals if one.stage == stage and one.iteration in iterations]
        if left_out := [one.iteration for one in needed if not one.parts]:
            raise self._not_kept(left_out[0], len(iterations) - 1)
        return needed

    def _copy(self, one: Manifest, at: int, digests: dict[str, str]) -> Manifest:
        """The manifest of the new run; `digests` has those of former ones by their originals, and gets this one's."""
        before = layout.stage_parts(self.parent, one.iteration, one.stage)
        after = layout.stage_parts(self.run, at, one.stage)
        parts = tuple(part.model_copy(update={"key": after + part.key.removeprefix(before)}) for part in one.parts)
        whole = at == one.iteration
        unknown = [role for role, digest in one.inputs.items() if digest not in digests] if whole else []
        if unknown:
            raise StorageError(
                f"{one.stage} of iteration {one.iteration} of run {one.run} was made from a {unknown[0]} that is not "
                "of the same revision of the run: it cannot be taken over. `ratchet verify` shows what is missing"
            )
        copy = one.model_copy(
            update={
                "run": self.run,
                "iteration": at,
                "revision": 0,
                "config_digest": self.config_digest,
                "inputs": {role: digests[digest] for role, digest in one.inputs.items() if digest in digests},
                "parts": parts,
                "origin": one.origin or Origin(run=one.run, digest=one.digest, config_digest=one.config_digest),
            }
        )
        digests[one.digest] = copy.digest
        return copy

    def _begun(self, why: str) -> InputError:
        fact = f"run {self.run!r} was begun differently, {why}: give the new run another name"
        return InputError(f"{fact}, or remove what is there with `ratchet rm {self.run}`")

    def _described(self, originals: Sequence[tuple[Manifest, int]], retired: Collection[str], iteration: int) -> Forked:
        named = (one.lasted() if one.key in retired else one for one, _ in originals)
        parts = {part.key: part.bytes for one in named for part in one.parts}
        return Forked(
            run=self.run,
            parent=self.parent,
            iteration=iteration,
            manifests=len(originals),
            bytes=sum(parts.values()),
            linked=self.root.backend.links and self.source.url == self.root.url,
        )

    def _has_parts(self, original: Manifest, copy: Manifest, there: set[str]) -> bool:
        """Copy the parts of a manifest; False if retention of the parent has retired it meanwhile."""
        pairs = [pair for pair in zip(original.parts, copy.parts, strict=True) if pair[1].key not in there]
        try:
            if self.source.url == self.root.url:
                each(lambda pair: self.root.copy(pair[0].key, pair[1].key), pairs, _COPIERS)
            elif pairs:
                self._fetch(original, copy)
        except (NotCommitted, PartMissing) as error:
            check_not_removed(self.source, self.parent)
            if self.source.exists(layout.retired_key(original.key)):
                return False
            fact = f"run {self.run!r} cannot begin from run {self.parent!r}, which lacks a part: {error}"
            raise PartMissing(f"{fact}. Choose an iteration before it, or restore the object") from error
        return True

    def _retire(self, original: Manifest, copy: Manifest, there: set[str]) -> None:
        """Copy the parts of a manifest that outlast its train state, and the record that this was deleted."""
        self._has_parts(original.lasted(), copy.lasted(), there)
        record = records.read(self.source, layout.retired_key(original.key), Retired)
        update = {"manifest": copy.digest, "keys": copy.state_keys}
        records.publish(self.root, layout.retired_key(copy.key), record.model_copy(update=update))

    def _fetch(self, original: Manifest, copy: Manifest) -> None:
        writer = PartWriter(self.root, self.run, copy.iteration, copy.stage)
        with scratch() as folder:
            materialize(self.source, original, folder)
            each(lambda part: writer.store_file(part, folder / part.name), copy.parts, _COPIERS)

    def _not_kept(self, iteration: int, older: int) -> InputError:
        recorded = names(self.source, self.parent)
        kept = stored_states(self.source, self.parent, self.workflow.holds_state, recorded)
        fact = f"the train state of iteration {iteration} of run {self.parent!r} is not kept; those of {kept} are"
        if not older:
            return InputError(f"{fact}. Choose one of them")
        whole = [at for at in kept if {*range(max(0, at - older), at)} <= {*kept}]
        return InputError(
            f"{fact}. Weights of up to {older} iterations before sample for it (rollout.ahead): choose one of {whole}, "
            "or set rollout.ahead to 0"
        )


def _shared(workflow: Workflow, past: Contents) -> list[Manifest]:
    """The manifests that a fork takes over; evaluations only of weights of this past. An evaluation of weights stays
    when a stage before it is done again; it is of the weights that were there first."""
    there = {one.digest for one in past.newest}
    return [one for one in past.newest if one.stage in workflow.behind or set(one.inputs.values()) <= there]
