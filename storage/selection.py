"""Selections: stored samples of any runs, copied into parts of one, with what they were copied from."""

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, RootModel

from storage.backends.root import Root
from storage.errors import StorageError
from storage.ids import Workflow
from storage.manifest import Manifest, Part, find, revisions
from storage.parts import PartWriter, read_part, read_parts, read_table
from storage.records import parse
from storage.revisions import Revisions
from storage.schema import PROMPTS, REWARD, ROLLOUT, SELECTION
from storage.turns import finish_reasons, weight_versions

SOURCES = "sources.json"  # name of the part that lists the sources of a selection

SHARE = "share"  # fact of a training: which of the selection's tables, counted from 0, it was on

_SCORES = ("reward", "status", "reason", "components")
_DERIVED = pa.schema(
    [("finish_reason", pa.string()), ("oldest_version", pa.int32()), ("newest_version", pa.int32())]
)  # from the turns, and from the versions of sampled tokens
_OWN = ("source", "group", "weight_version", "sampled")
_VERSIONS = ("oldest_version", "newest_version")
_OF_TOKENS = ("response_tokens", "logprobs")  # with a value for each token of the response, as `sampled`
_KEYS = ["prompt_id", "sample_id"]
_MOST = 1 << 23  # bytes
OFFERED = pa.schema([*(field for field in SELECTION if field.name not in _OWN), *_DERIVED])
"""Columns of a sample that a filter may name."""


class Source(BaseModel, frozen=True, extra="forbid"):
    root: str | None  # URL of its storage root; None is the root of the selection
    run: str  # the run in which it was found: the one that sampled it, or a fork of that
    iteration: int
    revision: int
    key: str  # key of the rollout's manifest below its root
    rollout: str  # identity of the rollout's manifest
    reward: str | None  # identity of the manifest of its scores; None if it was not scored
    head: int  # the head of its run when it was selected: all rollouts of one run were seen from the same revision
    prepare: str | None  # identity of the manifest of the prompts that it answers; None if it was imported
    stop_tokens: tuple[int, ...] | None  # token ids that end its responses; None if its run did not record them
    rows: int  # samples of the rollout
    selected: int  # those of them that were selected

    @property
    def place(self) -> str:
        at = "" if self.root is None else f" in {self.root}"
        again = f", revision {self.revision}" if self.revision else ""
        return f"iteration {self.iteration}{again} of run {self.run}{at}"


class _Sources(RootModel[tuple[Source, ...]]):
    """The sources of a selection, as they are stored."""


def write_sources(writer: PartWriter, sources: Sequence[Source]) -> Part:
    document = [source.model_dump(mode="json") for source in sources]
    return writer.write_bytes(SOURCES, json.dumps(document).encode())


def read_sources(root: Root, selection: Manifest) -> list[Source]:
    """The sources of a selection, in the order of the column `source`. Raises SchemaMismatch if the part has a form
    that this version does not read, StorageError if the manifest is not that of a selection."""
    part = selection.part(SOURCES)
    return list(parse(read_part(root, part), _Sources, f"{root.url}/{part.key}").root)


def write_prompts(writer: PartWriter, prepare: str, prompts: pa.Table) -> Part:
    """Store the selected ones of the prompts of a manifest `prepare`, so that no other run is needed to score answers.
    The part counts no rows: the tables with rows are the samples."""
    part = writer.write_table(_prompts_name(prepare), prompts, PROMPTS)
    return part.model_copy(update={"rows": None})


def read_prompts(root: Root, selection: Manifest, prepare: str) -> pa.Table:
    """Read the prompts that `write_prompts` stored. Raises StorageError if the selection was made without prompts."""
    return read_parts(root, [selection.part(_prompts_name(prepare))], PROMPTS)


def _prompts_name(prepare: str) -> str:
    return f"prompts-{prepare}.arrow"


def scores_of(root: Root, workflow: Workflow, rollout: Manifest, seen: Revisions | None = None) -> Manifest | None:
    """The newest scores of this very rollout, or None; those in the head of `seen`, the run's revisions, first."""
    head = find(root, rollout.run, rollout.iteration, workflow.scores, seen)
    made = revisions(root, rollout.run, rollout.iteration, workflow.scores, seen)
    every = [*([head] if head else []), *reversed(list(made))]
    return next((one for one in every if rollout.digest in one.inputs.values()), None)


def offered(root: Root, rollout: Manifest, reward: Manifest | None) -> Iterator[pa.Table]:
    """The samples of a rollout with their scores, a stored part at a time: the columns of SELECTION but `source` and
    `group`, and those of OFFERED. Raises StorageError if a part is damaged, missing or of another version, or the
    scores have a sample twice."""
    scores = REWARD.empty_table() if reward is None else read_table(root, reward, REWARD)
    keys = sample_keys(scores)
    if len(keys) != len(pc.unique(keys)):  # pyright: ignore[reportAttributeAccessIssue] - made at import
        fact = f"the scores of iteration {rollout.iteration} of run {rollout.run} have a sample twice"
        raise StorageError(f"{fact}: `ratchet verify` shows what is wrong")
    for part in rollout.tables:
        samples = read_parts(root, [part], ROLLOUT)
        rows = pc.index_in(sample_keys(samples), value_set=keys)  # pyright: ignore[reportAttributeAccessIssue]
        revision = pa.repeat(pa.scalar(rollout.revision, pa.int32()), samples.num_rows)
        derived = (finish_reasons(samples["turns"]), *weight_versions(samples))
        names = [*samples.column_names, "revision", *_SCORES, *_DERIVED.names]
        scored = (scores[name].take(rows) for name in _SCORES)
        yield pa.table([*samples.columns, revision, *scored, *derived], names=names)


def offered_columns(
    root: Root, rollout: Manifest, reward: Manifest | None, names: Iterable[str], most: int = _MOST
) -> Iterator[pa.Table]:
    """The ids of the samples and the columns `names` of OFFERED, parts of `most` stored bytes at a time; of lists only
    the lengths: their values are null. Little else is decompressed, so a million samples take about a second of
    processor. Raises as `offered`, but does not look for samples that are there twice."""
    wanted = {*_KEYS, *names}
    schema = pa.schema([_hollow(field) for field in OFFERED if field.name in wanted])
    needed = _needed(wanted)
    scores = [name for name in _SCORES if name in wanted]
    table = REWARD.empty_table() if reward is None or not scores else read_table(root, reward, REWARD, _KEYS + scores)
    begin = 0
    for parts in _together(rollout.tables, most):
        samples = read_parts(root, parts, ROLLOUT, needed)
        own, begin = table.slice(begin, samples.num_rows), begin + samples.num_rows
        if scores and not own.select(_KEYS).equals(samples.select(_KEYS)):  # scored in another order
            own = table.take(pc.index_in(sample_keys(samples), value_set=sample_keys(table)))  # pyright: ignore[reportAttributeAccessIssue]
        joined = {name: samples[name] for name in needed} | {name: own[name] for name in scores}
        columns = _with_derived(joined, samples, rollout.revision, wanted)
        yield pa.table([columns[name] for name in schema.names], schema=schema)


def _together(parts: Sequence[Part], most: int) -> Iterator[list[Part]]:
    """The parts in their order, neighbours together up to `most` bytes: each call of Arrow then has more to do."""
    sizes = itertools.accumulate(part.bytes for part in parts)
    for _, group in itertools.groupby(zip(sizes, parts, strict=True), key=lambda one: one[0] // most):
        yield [part for _, part in group]


def _needed(wanted: Collection[str]) -> list[str]:
    """The columns of ROLLOUT that are read for the wanted ones."""
    sources = {"finish_reason": ("turns",), **dict.fromkeys(_VERSIONS, ("weight_version", "sampled"))}
    sources |= dict.fromkeys(_OF_TOKENS, ("sampled",))  # as long as these, and a 32nd of their size
    needed = {source for name in wanted for source in sources.get(name, (name,))}
    return [name for name in ROLLOUT.names if name in needed]


def _hollow(field: pa.Field) -> pa.Field:
    return field.with_type(pa.list_(pa.null())) if pa.types.is_list(field.type) else field


def _lengths(lists: pa.ChunkedArray) -> pa.ListArray:
    """Lists of the same lengths whose values are null, which takes no memory for them."""
    ends = np.append(0, np.cumsum(pc.list_value_length(lists).to_numpy()))  # pyright: ignore[reportAttributeAccessIssue]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.nulls(int(ends[-1])))


def _with_derived(columns: dict[str, Any], samples: pa.Table, revision: int, wanted: Collection[str]) -> dict[str, Any]:
    columns["revision"] = pa.repeat(pa.scalar(revision, pa.int32()), samples.num_rows)
    if "finish_reason" in wanted:
        columns["finish_reason"] = finish_reasons(samples["turns"])
    if {*_VERSIONS} & {*wanted}:
        columns |= dict(zip(_VERSIONS, weight_versions(samples), strict=True))
    lists = [name for name in wanted if pa.types.is_list(OFFERED.field(name).type)]
    return columns | {name: _lengths(samples["sampled" if name in _OF_TOKENS else name]) for name in lists}


def sample_keys(table: pa.Table) -> pa.Array:
    """A text for each row of a table of samples or scores, by which they are joined."""
    ids = table["sample_id"].cast(pa.string())
    joined = pc.binary_join_element_wise(ids, table["prompt_id"], "/")  # pyright: ignore[reportAttributeAccessIssue]
    return joined.combine_chunks()
