"""The archive of a run: one Parquet file with every scored sample, for people and their tools.

zstd; token ids and names as dictionaries; log-probabilities as BYTE_STREAM_SPLIT, which puts bytes of equal
significance side by side. Nothing in Ratchet reads it: the manifests and their parts stay the truth.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel

from storage import layout
from storage.backends.root import Root
from storage.digest import file_digest
from storage.errors import InputError
from storage.ids import Workflow
from storage.manifest import Manifest
from storage.ownership.scratch import scratch
from storage.reader import read_stored_table
from storage.schema import REWARD, ROLLOUT
from storage.upkeep.catalog import contents, require_run

TABLE = "samples"
_FLOATS = ("logprobs",)
_SCORES = [name for name in REWARD.names if name not in ROLLOUT.names]
_TEXTS = [
    pa.field("prompt", pa.string(), metadata={"meaning": "text of the prompt", "unit": ""}),
    pa.field(
        "response",
        pa.string(),
        metadata={"meaning": "text of the response, without stop, padding and BOS tokens", "unit": ""},
    ),
]
SAMPLES = pa.schema([*ROLLOUT, *(REWARD.field(name).with_nullable(True) for name in _SCORES), *_TEXTS])
"""Columns of the archive: the rollout table, the scores (null where a sample is not scored yet) and the texts."""

Texts = Callable[[pa.Table], tuple[pa.Array, pa.Array]]
"""Texts of the prompts and responses of a rollout table, a row each."""


def without_texts(samples: pa.Table) -> tuple[pa.Array, pa.Array]:
    """For a run whose tokenizer is not known."""
    return pa.nulls(samples.num_rows, pa.string()), pa.nulls(samples.num_rows, pa.string())


class Archive(BaseModel, frozen=True, extra="forbid"):
    """A Parquet file that was written."""

    run: str
    key: str
    """Key below the storage root."""
    iterations: tuple[int, int]
    """First and last iteration in it."""
    rows: int
    bytes: int
    """Size of the file."""
    parts_bytes: int
    """Size of the parts with the same content."""


def compact(root: Root, workflow: Workflow, run: str, texts: Texts = without_texts) -> Archive:
    """Write the archive of all iterations that have a rollout, and remove those that it replaces. The same content
    gives the same file.

    Raises:
        InputError: the run is not there, or has no rollout.
    """
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
    parts_bytes = sum(part.bytes for pair in pairs for manifest in pair if manifest for part in manifest.parts)
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
    return [f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name]


def scored(root: Root, rollout: Manifest, reward: Manifest | None, texts: Texts = without_texts) -> pa.Table:
    """Samples of one iteration, each with its own score, in the rollout's order and the schema SAMPLES."""
    samples = read_stored_table(root, rollout)
    if reward is None:
        scores = [pa.nulls(samples.num_rows, REWARD.field(name).type) for name in _SCORES]
    else:
        found = read_stored_table(root, reward)
        rows = pc.index_in(_names(samples), value_set=_names(found))  # pyright: ignore[reportAttributeAccessIssue]
        scores = [found[name].take(rows) for name in _SCORES]
    return pa.table([*samples.columns, *scores, *texts(samples)], schema=SAMPLES)


def _names(table: pa.Table) -> pa.Array:
    ids = table["sample_id"].cast(pa.string())
    joined = pc.binary_join_element_wise(table["prompt_id"], ids, "/")  # pyright: ignore[reportAttributeAccessIssue]
    return joined.combine_chunks()
