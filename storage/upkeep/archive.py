"""The archive of a run: every scored sample in one Parquet file, or in one for each chunk of iterations.

zstd; token ids and names as dictionaries; log-probabilities as BYTE_STREAM_SPLIT, which puts bytes of equal
significance side by side. Nothing in Ratchet reads it: the manifests and their parts stay the truth."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel

from storage import layout
from storage.backends.root import Root, Stored
from storage.digest import file_digest
from storage.errors import InputError
from storage.ids import Workflow
from storage.manifest import Manifest, load
from storage.ownership.scratch import scratch
from storage.parts import read_table
from storage.schema import REWARD, ROLLOUT
from storage.selection import sample_keys
from storage.upkeep.catalog import Names, contents, names, require_run

TABLE = "samples"
CHUNK = 100  # iterations in a file of `compact_new`
CHUNKS = "chunk"
_FLOATS = ("logprobs",)
_SCORES = [name for name in REWARD.names if name not in ROLLOUT.names]
_TEXTS = [
    pa.field(name, pa.string(), metadata={"meaning": meaning, "unit": ""})
    for name, meaning in (
        ("prompt", "text of the prompt"), ("response", "text of the response, without stop, padding and BOS tokens"),
    )
]  # fmt: skip
SAMPLES = pa.schema([*ROLLOUT, *(REWARD.field(name).with_nullable(True) for name in _SCORES), *_TEXTS])
"""Columns of the archive: the rollout table, the scores (null where a sample is not scored yet) and the texts."""

Texts = Callable[[pa.Table], tuple[pa.Array, pa.Array]]
"""Texts of the prompts and responses of a rollout table, a row each."""


def without_texts(samples: pa.Table) -> tuple[pa.Array, pa.Array]:
    """For a run whose tokenizer is not known."""
    return pa.nulls(samples.num_rows, pa.string()), pa.nulls(samples.num_rows, pa.string())


class Archive(BaseModel, frozen=True, extra="forbid"):
    run: str
    key: str  # key below the storage root
    iterations: tuple[int, int]  # first and last iteration in it
    rows: int
    bytes: int  # size of the file
    parts_bytes: int  # size of the parts with the same content


def compact(root: Root, workflow: Workflow, run: str, texts: Texts = without_texts) -> Archive:
    """Write the archive of all iterations that have a rollout, and remove those that it replaces. The same content
    gives the same file. Raises InputError if the run is not there, or has no rollout."""
    require_run(root, run)
    newest = contents(root, run).newest
    rollouts = [manifest for manifest in newest if manifest.stage == workflow.samples]
    rewards = {manifest.iteration: manifest for manifest in newest if manifest.stage == workflow.scores}
    if not rollouts:
        raise InputError(f"run {run!r} has no rollout yet, so there is nothing to archive")
    before = [key for key in root.keys(layout.archive_folder(run)) if (layout.archive_span(key) or "")[0:1] == (TABLE,)]
    made = store_archive(root, run, TABLE, [(one, rewards.get(one.iteration)) for one in rollouts], texts)
    for old in before:  # as listed before: another process may have written a newer one since
        if old != made.key:
            root.remove(old)
    return made


def store_archive(
    root: Root, run: str, table: str, pairs: Sequence[tuple[Manifest, Manifest | None]], texts: Texts
) -> Archive:
    """Store rollouts, each with its scores if it has some, as one Parquet file; equal content is touched."""
    first, last = pairs[0][0].iteration, pairs[-1][0].iteration
    with scratch() as folder:
        path = folder / f"{table}.parquet"
        rows = write_tables(path, (scored(root, rollout, reward, texts) for rollout, reward in pairs))
        digest, size = file_digest(path)
        key = layout.archive_key(run, table, range(first, last + 1), digest)
        if not root.put_file_if_absent(key, path):
            root.touch(key)  # the same content: only its manifests are newer
    parts_bytes = sum(manifest.size for pair in pairs for manifest in pair if manifest)
    return Archive(run=run, key=key, iterations=(first, last), rows=rows, bytes=size, parts_bytes=parts_bytes)


def write_tables(path: Path, tables: Iterator[pa.Table]) -> int:
    """Write tables of the schema SAMPLES to a Parquet file, each in its own row groups; returns the number of rows."""
    rows = 0
    leaves = list(itertools.chain.from_iterable(map(_leaves, SAMPLES)))
    floats = {leaf: "BYTE_STREAM_SPLIT" for name in _FLOATS for leaf in _leaves(SAMPLES.field(name))}
    dictionaries = [leaf for leaf in leaves if leaf not in floats]
    options = {"compression": "zstd", "use_dictionary": dictionaries, "column_encoding": floats}
    with pq.ParquetWriter(path, SAMPLES, **options) as writer:
        for table in tables:
            writer.write_table(table)
            rows += table.num_rows
    return rows


def _leaves(field: pa.Field) -> list[str]:
    if pa.types.is_map(field.type):
        return [f"{field.name}.key_value.{side}" for side in ("key", "value")]
    if not pa.types.is_list(field.type):
        return [field.name]
    inner = field.type.value_type
    names = [f".{one.name}" for one in inner] if pa.types.is_struct(inner) else [""]
    return [f"{field.name}.list.element{name}" for name in names]


def scored(root: Root, rollout: Manifest, reward: Manifest | None, texts: Texts = without_texts) -> pa.Table:
    """Samples of one iteration, each with its own score, in the rollout's order and the schema SAMPLES."""
    samples = read_table(root, rollout, ROLLOUT)
    found = REWARD.empty_table() if reward is None else read_table(root, reward, REWARD)
    rows = pc.index_in(sample_keys(samples), value_set=sample_keys(found))  # pyright: ignore[reportAttributeAccessIssue]
    scores = [found[name].take(rows) for name in _SCORES]
    return pa.table([*samples.columns, *scores, *texts(samples)], schema=SAMPLES)


def compact_new(
    root: Root, workflow: Workflow, run: str, texts: Callable[[], Texts] = lambda: without_texts, size: int = CHUNK
) -> tuple[Archive, ...]:
    """Write the chunks that are missing or behind, and remove those that they replace. May be done at any time. Each
    chunk is one file, whose name has its iterations; it is behind if it has more iterations by now, or if one of its
    stages was committed later than the file. Iterations that are not scored yet are left out. `texts` makes what turns
    tokens into texts, and is called only if there is something to write; a chunk has `size` iterations. Raises
    DigestMismatch, PartMissing or SchemaMismatch if what a chunk is made from cannot be read."""
    # the archive first: what another process has written is not longer than what this one sees committed
    there = [one for one in root.stored(layout.archive_folder(run)) if _span(one)]
    recorded = names(root, run)
    committed = {one.key: one.modified for one in root.stored(layout.manifest_folder(run))}
    revisions = {one.key: one.modified for one in root.stored(layout.revision_folder(run))}
    _, choices = layout.revision_numbers(revisions)
    chosen = [revisions[key] for key in choices.values()]  # an older chunk is of another head
    written: list[Archive] = []
    places = _places(recorded, workflow, size)
    for one in there:
        if _number(one, size) not in places:  # of a former head, which had more iterations
            root.remove(one.key)
    for number, keys in places.items():
        own = [one for one in there if number == _number(one, size)]
        changed = max([*(committed[key] for pair in keys.values() for key in pair), *chosen])
        current = [one for one in own if _span(one) == (min(keys), max(keys)) and one.modified > changed]
        if not current:
            pairs = [(load(root, rollout), load(root, reward)) for rollout, reward in keys.values()]
            written.append(store_archive(root, run, CHUNKS, pairs, texts()))
        kept = current[-1].key if current else written[-1].key
        for one in own:  # as listed before: another process may have written a newer one since
            if one.key != kept:
                root.remove(one.key)
    return tuple(written)


def _places(recorded: Names, workflow: Workflow, size: int) -> dict[int, dict[int, tuple[str, str]]]:
    """Keys of the manifests of samples and scores of the scored iterations of each chunk, by number and iteration."""
    newest, found = recorded.newest, dict[int, dict[int, tuple[str, str]]]()
    for (at, stage), rollout in sorted(newest.items()):
        if stage == workflow.samples and (reward := newest.get((at, workflow.scores))) is not None:
            found.setdefault((at - 1) // size, {})[at] = rollout, reward
    return found


def _span(one: Stored) -> tuple[int, int] | None:
    found = layout.archive_span(one.key)
    return found[1:] if found is not None and found[0] == CHUNKS else None


def _number(one: Stored, size: int) -> int | None:
    return (span[0] - 1) // size if (span := _span(one)) else None
