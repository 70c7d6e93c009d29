"""What is in a root: runs, their manifests, and which parts are named by anything. To show and to clean up."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import BaseModel, ConfigDict

from storage import layout, records
from storage.backends.root import Root
from storage.errors import InputError
from storage.ids import check_run_name
from storage.manifest import Manifest, Part, load
from storage.ownership.lease import describe, holder
from storage.parallel import each
from storage.unfinished import read_piece

_READERS = 8


class Retired(BaseModel):
    """Record that retention has given up the parts of one manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    """Version of this record's own format."""
    manifest: str
    """Digest of the manifest."""
    keys: tuple[str, ...]
    """Its parts, which may be gone."""
    time: datetime
    """When (UTC)."""
    rule: str
    """Why, in words."""


@dataclass(frozen=True)
class Contents:
    """Everything that a run has recorded."""

    run: str
    manifests: Mapping[str, Manifest]
    """All revisions, by key, in the order of work."""
    retired: Mapping[str, Retired] = field(default_factory=dict)
    """By the key of the manifest."""
    pieces: Mapping[str, Part] = field(default_factory=dict)
    """By key; those of stages that are committed too."""

    @property
    def newest(self) -> list[Manifest]:
        """The newest revision of each stage, in the order of work."""
        return list({(one.iteration, one.stage): one for one in self.manifests.values()}.values())

    @property
    def kept(self) -> dict[str, Manifest]:
        """Manifests whose parts must be there, by key."""
        return {key: manifest for key, manifest in self.manifests.items() if key not in self.retired}

    @property
    def unfinished(self) -> dict[str, Part]:
        """Pieces of stages that are not committed, by key."""
        return {key: part for key, part in self.pieces.items() if layout.stage_of(key) not in self.manifests}

    @property
    def named(self) -> set[str]:
        """Keys of all parts that must be there."""
        whole = {part.key for manifest in self.kept.values() for part in manifest.parts}
        return whole | {part.key for part in self.unfinished.values()}


class RunSummary(BaseModel):
    """A run in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """Id of the run."""
    iteration: int | None
    """Newest iteration that has a committed stage."""
    stage: str | None
    """Last committed stage of it."""
    finished: datetime | None
    """When that was (UTC)."""
    driven_by: str | None
    """The process that drives the run now."""
    parent: str | None
    """The run that this one was forked from."""


def runs(root: Root) -> list[str]:
    """Names of all runs, sorted."""
    return [name for name in root.folders() if root.exists(layout.run_config_key(name))]


def require_run(root: Root, run: str) -> None:
    """Refuse a run that is not there.

    Raises:
        InputError: naming the nearest thing that is.
    """
    if not root.exists(layout.run_config_key(check_run_name(run))):
        there = ", ".join(runs(root)) or "no run at all"
        raise InputError(f"there is no run {run!r} in {root.url}, only {there}: check --root and the name")


def contents(root: Root, run: str) -> Contents:
    """Read everything that a run has recorded.

    Raises:
        DigestMismatch, SchemaMismatch: a record is damaged or of a later version.
    """
    keys = root.keys(layout.manifest_folder(run))
    manifest_keys = [key for key in keys if layout.is_manifest(key)]
    retired_keys = {layout.retired_key(key): key for key in manifest_keys if layout.retired_key(key) in set(keys)}
    manifests = dict(zip(manifest_keys, each(lambda key: load(root, key), manifest_keys, _READERS), strict=True))
    pieces = [key for key in keys if layout.is_piece(key)]
    parts = dict(zip(pieces, each(lambda key: read_piece(root, key), pieces, _READERS), strict=True))
    retired = {whole: records.read(root, key, Retired) for key, whole in retired_keys.items()}
    return Contents(run, in_order(manifests), retired, parts)


def named_parts(root: Root, runs: Iterable[str]) -> set[str]:
    """Keys of all parts that must be there for these runs."""
    return {key for run in runs for key in contents(root, run).named}


def summaries(root: Root) -> list[RunSummary]:
    """All runs of a root, sorted by name. Reads two manifests of each."""
    return each(lambda run: _summary(root, run), runs(root), _READERS)


def _summary(root: Root, run: str) -> RunSummary:
    keys = [key for key in root.keys(layout.manifest_folder(run)) if layout.is_manifest(key)]
    folders = sorted({key.rpartition("/")[0] for key in keys})
    newest = [load(root, key) for key in keys if folders and key.startswith(f"{folders[-1]}/")]
    last = next(reversed(in_order({one.stage: one for one in newest}).values()), None)
    entry, origin = holder(root, run), load(root, keys[0]).origin if keys else None
    return RunSummary(
        run=run,
        iteration=last.iteration if last else None,
        stage=last.stage if last else None,
        finished=last.finished if last else None,
        driven_by=describe(entry) if entry else None,
        parent=origin.run if origin else None,
    )


def in_order(manifests: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """The same manifests in the order of work: by iteration, and in it each after those that it was made from."""
    known = {manifest.digest: manifest for manifest in manifests.values()}
    steps: dict[str, int] = {}

    def step(digest: str) -> int:
        if digest not in steps:
            one = known[digest]
            before = [key for key in one.inputs.values() if key in known and known[key].iteration == one.iteration]
            steps[digest] = 1 + max(map(step, before), default=0)
        return steps[digest]

    def place(one: Manifest) -> tuple[int, int, datetime, int]:
        return one.iteration, step(one.digest), one.finished, one.revision

    return dict(sorted(manifests.items(), key=lambda item: place(item[1])))
