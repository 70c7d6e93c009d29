"""The only place where a path inside the storage root is spelled."""

import re
from collections.abc import Callable, Iterable

DIGEST_CHARACTERS = 16
"""Length of the beginning of a part's digest in its name; the manifest holds all of it."""

STATE = "state/"
"""Prefix of the names of a train state's parts."""

_RUN = "[a-z0-9][a-z0-9._-]{0,62}"
_STAGE = "[a-z-]+"
# each number has one form: a copy under another form of the same name is not a record
_NUMBER, _SIX, _NINE = r"(?:0|[1-9]\d*)", r"(?:\d{6}|[1-9]\d{6,})", r"(?:\d{9}|[1-9]\d{9,})"
_WORK = rf"manifests/{_SIX}/{_STAGE}\.r{_NUMBER}"
_MANIFEST = re.compile(rf"{_WORK}\.json", re.ASCII)
_ATTEMPT = re.compile(rf"{_WORK}\.attempt-{_NUMBER}\.json", re.ASCII)
_PIECE = re.compile(rf"{_WORK}\.pieces/[\w.-]+\.json", re.ASCII)
_INCREMENT = re.compile(rf"({_WORK})\.(?:increments|turns)/([\w.-]+)\.\d{{5,}}\.json", re.ASCII)
_RETIRED = re.compile(rf"{_WORK}\.retired\.json", re.ASCII)

_EXCHANGE = re.compile(r"exchanges/[0-9a-f]+\.json", re.ASCII)
_RERUN = re.compile(rf"revisions/rerun-({_SIX})\.json", re.ASCII)
_CHOICE = re.compile(rf"revisions/head-({_SIX})\.json", re.ASCII)
_COPY = re.compile(rf"copies/((?:rerun|head)-{_SIX})-[0-9a-f]{{{DIGEST_CHARACTERS}}}\.json", re.ASCII)
_LEASE = re.compile(rf"lease/({_NINE})\.json", re.ASCII)
_REVISION = re.compile(rf"/manifests/\d+/{_STAGE}\.r(\d+)\.")
_OF_STAGE = re.compile(r"(/manifests/\d{6,}/[^/.]+\.r\d+)\..*$")

_ARCHIVE = re.compile(rf"/archive/([a-z]+)-(\d{{6,}})-(\d{{6,}})-[0-9a-f]{{{DIGEST_CHARACTERS}}}\.parquet$", re.ASCII)
_PLACE = re.compile(rf"/(parts|manifests)/(\d{{6,}})/({_STAGE})[./]")
_DIGEST = re.compile(rf"-([0-9a-f]{{{DIGEST_CHARACTERS}}})(\.[^./]*)?$")
_PART = re.compile(rf"{_RUN}/parts/[0-9]{{6,}}/{_STAGE}/(?P<name>.+)", re.DOTALL)

METRICS = "metrics.csv"
"""Name of the table of all iterations among the derived files."""
WARMUP = "warmup.csv"
EVENTS = "tensorboard/events.out.tfevents.0000000000.ratchet"
"""Name of the same table as TensorBoard reads it: a folder for itself, and what its files are called."""
TEMPORARY_PREFIX = ".tmp-"
"""Files of a write in progress, or of one that a crash ended: never read, deleted by gc."""


def _of_run(name: str) -> Callable[[str], str]:
    """A function from the id of a run to the key of that name below it."""
    return lambda run: f"{run}/{name}"


def _matches(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda key: pattern.fullmatch(key.partition("/")[2]) is not None


run_config_key = _of_run("run.json")  # the resolved configuration the run was started with
removal_key = _of_run("removal.json")  # that the run is being removed: what its removal writes first and deletes last
manifest_folder = _of_run("manifests")  # everything that a run has committed, and pieces of stages in progress
revision_folder = _of_run("revisions")  # records of reruns and choices of the head; without it revision 0 is the head
copy_folder = _of_run("copies")  # second copies of those records, so that a lost one is known to have been there
part_folder = _of_run("parts")
exchange_folder = _of_run("exchanges")  # exchanges with services outside the run, such as judges
lease_folder = _of_run("lease")  # the log of the lease
archive_folder = _of_run("archive")

is_manifest, is_piece, is_attempt = map(_matches, (_MANIFEST, _PIECE, _ATTEMPT))
"""True of a key in the manifest folder that is a manifest, the record of a piece, or that of an attempt."""


def manifest_key(run: str, iteration: int, stage: str, revision: int) -> str:
    """The commit point of one stage."""
    return f"{run}/manifests/{iteration:06d}/{stage}.r{revision}.json"


def iteration_folder(run: str, iteration: int) -> str:
    return f"{manifest_folder(run)}/{iteration:06d}"


def iteration_of(folder: str) -> int | None:
    """The iteration that a folder in the manifest folder is of; None for any other name."""
    return int(folder) if re.fullmatch(_SIX, folder, re.ASCII) else None


def revision_of(key: str) -> int:
    """The revision in the key of a manifest, piece or attempt."""
    found = _REVISION.search(key)
    return int(found.group(1)) if found else 0


def run_of(key: str) -> str:
    return key.partition("/")[0]


def folder_of(key: str) -> str:
    return key.rpartition("/")[0]


def place_of(key: str) -> tuple[int, str] | None:
    """Iteration and stage of a manifest, piece or part; the key may follow a root. None for anything else."""
    found = _PLACE.search(key)
    return (int(found.group(2)), found.group(3)) if found else None


def is_part(key: str) -> bool:
    """True if a key, or a path that ends in one, is that of a part."""
    found = _PLACE.search(key)
    return found is not None and found.group(1) == "parts"


def piece_key(run: str, iteration: int, stage: str, revision: int, piece: str) -> str:
    """Record of a piece, which is durable before the whole stage is."""
    return f"{run}/manifests/{iteration:06d}/{stage}.r{revision}.pieces/{piece}.json"


def increment_key(piece: str, number: int, turns: bool = False) -> str:
    """Record of tokens by which responses of the piece with that key have grown, or of `turns` of its conversations,
    which is durable before the piece."""
    kind = ".turns/" if turns else ".increments/"
    return f"{piece.replace('.pieces/', kind).removesuffix('.json')}.{number:05d}.json"


def increments_of(piece: str, turns: bool = False) -> str:
    """Folder of the records of increments, or of turns, of all pieces of the stage of this one."""
    return increment_key(piece, 0, turns).rpartition("/")[0]


def increment_number(key: str) -> int:
    return int(key.rsplit(".", 2)[1])


def is_of_turns(key: str) -> bool:
    return key.rpartition("/")[0].endswith(".turns")


def piece_of_increment(key: str) -> str | None:
    """The key of the piece by which an increment is superseded; None if a key in the manifest folder is of none."""
    run, _, name = key.partition("/")
    found = _INCREMENT.fullmatch(name)
    return None if found is None else f"{run}/{found[1]}.pieces/{found[2]}.json"


def attempt_key(run: str, iteration: int, stage: str, revision: int, number: int) -> str:
    """Record that work on a stage began, numbered from 0 without gaps."""
    return f"{run}/manifests/{iteration:06d}/{stage}.r{revision}.attempt-{number}.json"


def stage_of(key: str) -> str:
    """The manifest key of the stage that a piece or an attempt belongs to."""
    return _OF_STAGE.sub(r"\1.json", key)


def retired_key(manifest: str) -> str:
    """Record that retention has deleted the parts of the manifest at key `manifest`."""
    return f"{manifest.removesuffix('.json')}.retired.json"


def rerun_key(run: str, number: int) -> str:
    """Record that a finished stage is to be done again, numbered from 1 without gaps."""
    return f"{revision_folder(run)}/rerun-{number:06d}.json"


def choice_key(run: str, number: int) -> str:
    """Record that a revision was chosen as the head, numbered from 1 without gaps; the last one counts."""
    return f"{revision_folder(run)}/head-{number:06d}.json"


def revision_numbers(keys: Iterable[str]) -> tuple[dict[int, str], dict[int, str]]:
    """The keys of reruns and those of choices among keys in the revision folder, by number."""
    names = [(key, key.partition("/")[2]) for key in keys]
    reruns, choices = (
        {int(found.group(1)): key for key, name in names if (found := pattern.fullmatch(name))}
        for pattern in (_RERUN, _CHOICE)
    )
    return reruns, choices


def copy_key(record: str, digest: str) -> str:
    """The second copy of the record at a key in the revision folder; its name carries the digest of its bytes."""
    name = record.rpartition("/")[2].removesuffix(".json")
    return f"{copy_folder(run_of(record))}/{name}-{digest[:DIGEST_CHARACTERS]}.json"


def copied(copy: str) -> str | None:
    """The key of the record that a second copy is of; None for any other key."""
    run, _, name = copy.partition("/")
    found = _COPY.fullmatch(name)
    return f"{revision_folder(run)}/{found.group(1)}.json" if found else None


def update_folder(run: str, iteration: int, stage: str, name: str) -> str:
    """Buckets of one weight update on their way from host to host; gc takes those of a killed one for lost parts."""
    return f"{stage_parts(run, iteration, stage)}/update-{name}"


def stage_parts(run: str, iteration: int, stage: str) -> str:
    return f"{part_folder(run)}/{iteration:06d}/{stage}"


def part_key(run: str, iteration: int, stage: str, name: str, digest: str) -> str:
    """A write-once part. Its digest comes before the extension, so equal content has an equal key."""
    folder, slash, last = name.rpartition("/")
    stem, dot, extension = last.rpartition(".")
    stem, suffix = (stem, f".{extension}") if dot else (last, "")
    return f"{stage_parts(run, iteration, stage)}/{folder}{slash}{stem}-{digest[:DIGEST_CHARACTERS]}{suffix}"


def key_flaw(key: str, digest: str) -> str | None:
    """Reason why `key` cannot be a `part_key` with this digest, of any run; None if it can."""
    found = _PART.fullmatch(key)
    if found is None:
        return "it does not have the form RUN/parts/ITERATION/STAGE/NAME"
    if digest_in_name(key) != digest[:DIGEST_CHARACTERS]:
        return f"it does not carry the part's digest {digest}"
    return name_flaw(found["name"])


def name_flaw(name: str) -> str | None:
    """Reason why `name` cannot be the name of a part, which is also its path in a folder; None if it can be."""
    if not name.isprintable() or "\\" in name:
        return "it holds a backslash or a character that cannot be printed"
    for segment in name.split("/"):
        if segment in ("", ".", ".."):
            return f"it is not a plain path below a folder: one of its segments is {segment!r}"
        if is_temporary(segment):
            return f"a segment begins with {TEMPORARY_PREFIX}, like files of a write in progress"
    return None


def exchange_key(run: str, digest: str) -> str:
    return f"{exchange_folder(run)}/{digest}.json"


def lease_key(run: str, number: int) -> str:
    """One entry of that log, numbered from 1 without gaps, so that an append is a put-if-absent of the next number."""
    return f"{lease_folder(run)}/{number:09d}.json"


def lease_number(key: str) -> int | None:
    found = _LEASE.fullmatch(key.partition("/")[2])
    return int(found.group(1)) if found else None


def archive_key(run: str, table: str, iterations: range, digest: str) -> str:
    """A Parquet file with one table of several iterations: a copy for reading, never for a stage."""
    span = f"{iterations.start:06d}-{iterations.stop - 1:06d}"
    return f"{run}/archive/{table}-{span}-{digest[:DIGEST_CHARACTERS]}.parquet"


def archive_span(key: str) -> tuple[str, int, int] | None:
    """Table, first and last iteration of an archive; None for any other key."""
    found = _ARCHIVE.search(key)
    return (found.group(1), int(found.group(2)), int(found.group(3))) if found else None


def digest_in_name(key: str) -> str:
    """The beginning of an object's digest that its own name carries, or an empty string."""
    found = _DIGEST.search(key)
    return found.group(1) if found else ""


def report_key(run: str, name: str) -> str:
    """A derived file for people (plot, table); never read back to decide anything."""
    return f"{run}/report/{name}"


def probe_key(token: str) -> str:
    """Written and removed by the check that a root is writable."""
    return f".probe-{token}/probe"


def temporary_name(token: str) -> str:
    """Name of a file that is being written, in the folder of the file that it becomes."""
    return f"{TEMPORARY_PREFIX}{token}"


def is_temporary(key: str) -> bool:
    """True if an object belongs to a write in progress, or to one that a crash ended."""
    return key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


def is_stray(key: str) -> bool:
    """True if nothing of a run has such a key: put there by something else, and read by nothing. Whatever is in the
    folders of parts and of derived files counts as a part, or as such a file, if its name is a text."""
    if not key.isascii() and any("\ud800" <= character <= "\udfff" for character in key):
        return True
    name = key.partition("/")[2]
    whole = (_MANIFEST, _ATTEMPT, _PIECE, _INCREMENT, _RETIRED, _RERUN, _CHOICE, _LEASE, _EXCHANGE)
    known = name in ("run.json", "removal.json") or name.startswith(("parts/", "report/"))
    known = known or copied(key) is not None or archive_span(key) is not None or is_temporary(key)
    return not known and not any(pattern.fullmatch(name) for pattern in whole)
