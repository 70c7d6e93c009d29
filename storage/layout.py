"""The only place where a path inside the storage root is spelled."""

from storage.ids import Stage

DIGEST_CHARACTERS = 16
"""How much of a part's digest its name carries; the manifest holds the whole of it."""


def run_config_key(run: str) -> str:
    """The resolved configuration the run was started with."""
    return f"{run}/run.json"


def manifest_key(run: str, iteration: int, stage: Stage, revision: int) -> str:
    """The commit point of one stage."""
    return f"{run}/manifests/{iteration:06d}/{stage.value}.r{revision}.json"


def piece_key(run: str, iteration: int, stage: Stage, revision: int, piece: str) -> str:
    """Record of a piece of a stage that is durable before the whole stage is."""
    return f"{run}/manifests/{iteration:06d}/{stage.value}.r{revision}.pieces/{piece}.json"


def part_key(run: str, iteration: int, stage: Stage, name: str, digest: str) -> str:
    """A write-once part. Its digest stands before the extension, so equal content has an equal key."""
    stem, dot, extension = name.rpartition(".")
    stem, suffix = (stem, f".{extension}") if dot else (name, "")
    return f"{run}/parts/{iteration:06d}/{stage.value}/{stem}-{digest[:DIGEST_CHARACTERS]}{suffix}"


def lease_folder(run: str) -> str:
    """The log of who drives the run."""
    return f"{run}/lease"


def lease_key(run: str, number: int) -> str:
    """One entry of that log, from 1 without gaps, so that an append is a put-if-absent of the next number."""
    return f"{lease_folder(run)}/{number:09d}.json"


def is_lease(key: str) -> bool:
    """Whether a key in a lease folder is an entry, and not the temporary file of one."""
    return key.endswith(".json")


def lease_number(key: str) -> int:
    """The number of a lease entry."""
    return int(key.rsplit("/", 1)[-1].removesuffix(".json"))


def report_key(run: str, name: str) -> str:
    """A derived file for people (plot, table); never read back to decide anything."""
    return f"{run}/report/{name}"


def probe_key(token: str) -> str:
    """Written and removed by the check that a root can be written."""
    return f".probe-{token}"


TEMPORARY_PREFIX = ".tmp-"
"""Files of a write in progress, or of one that a crash ended: never read, swept by gc."""


def temporary_name(token: str) -> str:
    """Name of a file that is being written, in the folder of the file that it becomes."""
    return f"{TEMPORARY_PREFIX}{token}"
