"""Manifests: the result of a finished stage, and the one commit point."""

import math
import operator
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Literal, Protocol, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    FiniteFloat,
    JsonValue,
    NonNegativeInt,
    ValidationInfo,
    model_validator,
)

from storage import layout, records
from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import (
    CommitConflict,
    NotCommitted,
    Overtaken,
    SchemaMismatch,
    StageFailed,
    StorageError,
)
from storage.ids import RunName, StageName
from storage.revisions import Revisions, read_revisions

_IDENTITY = {
    "format_version", "run", "iteration", "stage", "schema_fingerprint", "parts", "inputs", "config_digest", "facts",
}  # fmt: skip
_IDENTITY_OF_CONTENT = _IDENTITY - {"parts"} | {"content"}


class Fence(Protocol):
    """The right to drive a run, which a commit checks before it publishes. A `Lease` is one."""

    @property
    def epoch(self) -> int:
        """Fencing token: higher for every later holder."""
        ...

    def check(self) -> None:
        """Raise LeaseLost if another process may drive the run."""


def finite_or_null(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as a manifest holds them: null for a number that is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _readable_facts(facts: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
    if info.mode == "json" and (unusable := _unusable_fact(facts)):
        raise ValueError(unusable)
    return facts


def _unusable_fact(facts: dict[str, JsonValue]) -> str | None:
    found = _not_finite(facts)
    return f"fact {found!r} is {facts[found]}, and only finite numbers are facts" if found is not None else None


def _not_finite(values: Mapping[str, JsonValue]) -> str | None:
    return next((name for name, value in values.items() if not _is_finite(value)), None)


def _is_finite(value: JsonValue) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


class Origin(BaseModel, frozen=True, extra="forbid"):
    """The manifest that a forked run has taken over."""

    run: RunName  # run that did the work
    digest: str  # identity of the manifest there
    config_digest: str  # configuration the work was done under


class Part(BaseModel, frozen=True, extra="forbid"):
    """A write-once object that a manifest names."""

    name: str  # name within the stage, such as `groups-00000.arrow` or `state/weights.0.safetensors`
    key: str  # key below the storage root, in the folder of the stage
    bytes: NonNegativeInt  # size of the object in bytes
    digest: str  # xxh3-128 of the object, hexadecimal
    rows: NonNegativeInt | None = None  # rows, if the part is a table
    measured: Annotated[bool, Field(exclude_if=operator.not_)] = False
    """True if it tells how the work went, as times and failures. It is not part of the manifest's identity."""

    @model_validator(mode="after")
    def _stays_inside(self) -> Self:
        # files are written under the name, and read and deleted under the key
        if flaw := layout.name_flaw(self.name):
            raise ValueError(f"the name {self.name!r} cannot be a part's: {flaw}")
        if flaw := layout.key_flaw(self.key, self.digest):
            raise ValueError(f"the key {self.key!r} cannot be a part's: {flaw}")
        return self


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """The result of one stage. Published once; without it the stage did not happen."""

    format_version: Literal[1] = 1  # version of this record's own format
    run: RunName  # id of the run
    iteration: NonNegativeInt  # 0 is the preparation, RL iterations start at 1
    stage: StageName  # the step
    revision: NonNegativeInt = 0  # 0, or the number of the rerun that it belongs to: see `storage.revisions`
    schema_fingerprint: str | None = None  # fingerprint of the Arrow schema of the table parts
    parts: tuple[Part, ...] = ()  # the objects that the stage produced
    inputs: dict[str, str] = {}  # digests of the manifests that the stage was made from, by role
    config_digest: str  # digest of the keys of the configuration that give the run its meaning
    code_version: str  # version of Ratchet that did the work
    facts: Annotated[dict[str, JsonValue], AfterValidator(_readable_facts)] = {}
    """Small values that later stages need: weight version, data cursor, weights digest. All numbers are finite."""
    content: Annotated[str | None, Field(exclude_if=lambda name: name is None)] = None
    """Name of the fact that identifies what the parts hold, if they can be written in several ways. It is known before
    they are written, and takes their place in the identity."""
    metrics: dict[str, FiniteFloat | None] = {}
    """Numbers for people: rewards, losses, seconds. Not part of the identity. Null is one that was not finite."""
    origin: Origin | None = None  # set on what a fork has taken over from its parent
    epoch: int | None = None  # fencing token of the lease under which it was committed
    attempt: int = 0  # number of earlier attempts at this stage. Not part of the identity.
    writer: str = ""  # host and process that committed
    started: datetime  # time of the beginning of the work (UTC)
    finished: datetime  # time at which the manifest was made (UTC)

    @model_validator(mode="after")
    def _content_is_a_fact(self) -> Self:
        if self.content is not None and self.content not in self.facts:
            raise ValueError(f"its content is in the fact {self.content!r}, and its facts are {sorted(self.facts)}")
        return self

    @property
    def digest(self) -> str:
        """Identity of the content: equal for two attempts or revisions that produced the same result. Raises
        StageFailed if a fact is not finite."""
        if unusable := _unusable_fact(self.facts):
            work = f"{self.stage} of iteration {self.iteration} of run {self.run}"
            raise StageFailed(f"{work} is not committed: {unusable}")
        named = _IDENTITY if self.content is None else _IDENTITY_OF_CONTENT
        result = self.model_copy(update={"parts": tuple(part for part in self.parts if not part.measured)})
        return value_digest(result.model_dump(mode="json", include=named))

    @property
    def key(self) -> str:
        return layout.manifest_key(self.run, self.iteration, self.stage, self.revision)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of the parts of the train state that it holds, which retention deletes."""
        return tuple(part.key for part in self.parts if part.name.startswith(layout.STATE))

    def lasted(self) -> "Manifest":
        """Manifest without the parts of a train state: what is left when retention has deleted that."""
        lasting = tuple(part for part in self.parts if not part.name.startswith(layout.STATE))
        return self.model_copy(update={"parts": lasting})

    def part(self, name: str) -> Part:
        """The part called `name`. Raises StorageError if there is none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise StorageError(f"{self.stage} of iteration {self.iteration} has no part {name!r}: {self.part_names}")

    @property
    def tables(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.rows is not None)

    @property
    def size(self) -> int:
        return sum(part.bytes for part in self.parts)

    def below(self, prefix: str) -> dict[str, Part]:
        """Its parts whose names begin with `prefix`, by the rest of the name."""
        return {part.name.removeprefix(prefix): part for part in self.parts if part.name.startswith(prefix)}

    @property
    def part_names(self) -> list[str]:
        return [part.name for part in self.parts]


def commit(root: Root, manifest: Manifest, fence: Fence | None = None) -> Manifest:
    """Publish `manifest`, or adopt the equal one that another writer published first. A holder that lost its lease
    between the fence's check and the write can still publish: then its result is the truth, and the process that took
    over finds it here. Raises Overtaken if the process that drove the run before committed other content,
    CommitConflict if any other did; and if nothing was written, LeaseLost from the fence, StageFailed if a fact or a
    metric is not finite, StorageError if it names parts of another stage or run."""
    digest = manifest.digest
    if (name := _not_finite(manifest.metrics)) is not None:  # a copy with changed fields is not validated
        raise StageFailed(f"{manifest.key} is not committed: metric {name!r} is {manifest.metrics[name]}")
    if foreign := _foreign(manifest):
        fact = f"{manifest.key} {foreign}, and its cleaning looks at no others"
        raise StorageError(f"{fact}. Store the part with the stage")
    if fence is not None:
        fence.check()
        manifest = manifest.model_copy(update={"epoch": fence.epoch})
    if records.publish(root, manifest.key, manifest):
        return manifest
    winner = load(root, manifest.key)
    if winner.digest != digest:
        raise _conflict(manifest, winner)
    return winner


def _foreign(manifest: Manifest) -> str | None:
    """The part of another stage or run that a manifest names, in words; None if it names none."""
    own = layout.stage_parts(manifest.run, manifest.iteration, manifest.stage)
    foreign = [part.key for part in manifest.parts if not part.key.startswith(f"{own}/")]
    return f"names {foreign[0]}, which is not below {own}: a run is closed" if foreign else None


def _conflict(manifest: Manifest, winner: Manifest) -> CommitConflict:
    fact = (
        f"{manifest.stage} of iteration {manifest.iteration} of run {manifest.run} was committed by {winner.writer} "
        f"with other content ({winner.digest} against {manifest.digest})"
    )
    if manifest.epoch is not None and winner.epoch is not None and winner.epoch < manifest.epoch:
        return Overtaken(f"{fact}. It drove the run until this process took over, so its result counts: start again")
    return CommitConflict(f"{fact}. Two processes drive this run; let one of them finish")


def find(root: Root, run: str, iteration: int, stage: str, revisions: Revisions | None = None) -> Manifest | None:
    """A stage's manifest in the run's head, or None if the stage did not happen. `revisions` are the run's, seen from
    the one that is asked for; by default they are read."""
    seen = read_revisions(root, run) if revisions is None else revisions
    try:
        return load(root, layout.manifest_key(run, iteration, stage, seen.of(iteration, stage)))
    except NotCommitted:
        return None


def revisions(root: Root, run: str, iteration: int, stage: str, seen: Revisions | None = None) -> Iterator[Manifest]:
    """All revisions of a stage's manifest, from the first, whether or not they belong to the head. `seen` are the run's
    revisions; by default they are read."""
    every = read_revisions(root, run) if seen is None else seen
    for number in sorted({every.seen(one).of(iteration, stage) for one in every.numbers}):
        try:
            yield load(root, layout.manifest_key(run, iteration, stage, number))
        except NotCommitted:
            continue


def need(root: Root, run: str, iteration: int, stage: str, revisions: Revisions | None = None) -> Manifest:
    """Like `find`, for a stage that must have happened. Raises NotCommitted if it did not happen."""
    manifest = find(root, run, iteration, stage, revisions)
    if manifest is None:
        raise NotCommitted(f"run {run} has no {stage} of iteration {iteration} in {root.url}")
    return manifest


def load(root: Root, key: str) -> Manifest:
    """Read the manifest at `key`. Raises DigestMismatch if it was damaged; NotCommitted if there is none; WrongRecord
    if it belongs to another stage; SchemaMismatch if it has an unknown format, or names what no manifest may name."""
    where = f"{root.url}/{key}"
    text = records.unseal(root.read_bytes(key), where)
    manifest = records.parse(text, Manifest, where)
    if manifest.key != key:
        raise records.misplaced(where, "manifest", manifest.key, key)
    if foreign := _foreign(manifest):
        raise SchemaMismatch(f"{where} {foreign}. Restore the manifest from a copy")
    return manifest
