"""What a finished stage is, and the one commit point."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from storage import layout
from storage.digest import value_digest
from storage.errors import CommitConflict, NotCommitted, SchemaMismatch, StorageError
from storage.ids import Stage
from storage.root import Root

FORMAT_VERSION = 1


class Part(BaseModel):
    """A write-once object that a manifest names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name within the stage, such as `groups-00000.arrow` or `__0_0.distcp`."""
    key: str
    """Key below the storage root."""
    bytes: int
    """Size of the object in bytes."""
    digest: str
    """xxh3-128 of the object, hexadecimal."""
    rows: int | None = None
    """Rows, if the part is a table."""


class Manifest(BaseModel):
    """The result of one stage. Published once; without it the stage did not happen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    """Version of this record's own format."""
    run: str
    """Id of the run."""
    iteration: int
    """0 is the preparation, RL iterations start at 1."""
    stage: Stage
    """Which step."""
    revision: int = 0
    """Rises only when someone asks for a finished stage to be done again."""
    schema_fingerprint: str | None = None
    """Fingerprint of the Arrow schema of the table parts."""
    parts: tuple[Part, ...] = ()
    """What the stage produced."""
    inputs: dict[str, str] = {}
    """Digests of the manifests the stage was made from, by role."""
    config_digest: str
    """Digest of the part of the configuration that gives the run its meaning."""
    code_version: str
    """Version of Ratchet that did the work."""
    facts: dict[str, JsonValue] = {}
    """Small values that later stages need: weight version, data cursor, weights digest."""
    metrics: dict[str, float] = {}
    """Numbers for people: rewards, losses, seconds. Not part of the identity."""
    attempt: int = 0
    """How many attempts at this stage came before."""
    writer: str = ""
    """Host and process that committed."""
    started: datetime
    """When the work began (UTC)."""
    finished: datetime
    """When the manifest was made (UTC)."""

    @property
    def digest(self) -> str:
        """Identity of the content: equal for two attempts that produced the same result."""
        content = self.model_dump(
            mode="json", exclude={"metrics", "attempt", "writer", "started", "finished", "code_version"}
        )
        return value_digest(content)

    def part(self, name: str) -> Part:
        """The part called `name`.

        Raises:
            StorageError: there is none.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise StorageError(f"{self.stage} of iteration {self.iteration} has no part {name!r}: {self.part_names}")

    @property
    def part_names(self) -> list[str]:
        """Names of all parts."""
        return [part.name for part in self.parts]


def commit(root: Root, manifest: Manifest) -> Manifest:
    """Publish `manifest`, or adopt the equal one that another writer published first.

    Raises:
        CommitConflict: the stage is committed already with other content.
    """
    key = layout.manifest_key(manifest.run, manifest.iteration, manifest.stage, manifest.revision)
    if root.put_if_absent(key, manifest.model_dump_json(indent=1).encode()):
        return manifest
    winner = _load(root, key)
    if winner.digest != manifest.digest:
        raise CommitConflict(
            f"{manifest.stage} of iteration {manifest.iteration} of run {manifest.run} was committed by "
            f"{winner.writer} with other content ({winner.digest} against {manifest.digest}). "
            "Two processes drive this run; let one of them finish"
        )
    return winner


def find(root: Root, run: str, iteration: int, stage: Stage) -> Manifest | None:
    """The newest revision of a stage's manifest, or None if the stage did not happen."""
    newest, revision = None, 0
    while True:
        try:
            newest = _load(root, layout.manifest_key(run, iteration, stage, revision))
        except NotCommitted:
            return newest
        revision += 1


def need(root: Root, run: str, iteration: int, stage: Stage) -> Manifest:
    """Like `find`, for a stage that must have happened.

    Raises:
        NotCommitted: it did not.
    """
    manifest = find(root, run, iteration, stage)
    if manifest is None:
        raise NotCommitted(f"run {run} has no {stage} of iteration {iteration} in {root.url}")
    return manifest


def _load(root: Root, key: str) -> Manifest:
    data = root.read_bytes(key)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise SchemaMismatch(f"{root.url}/{key} is not a manifest this version can read: {error}") from error
    if manifest.format_version > FORMAT_VERSION:
        raise SchemaMismatch(
            f"{root.url}/{key} has manifest format {manifest.format_version}; this version reads up to "
            f"{FORMAT_VERSION}. Use a newer Ratchet"
        )
    return manifest
