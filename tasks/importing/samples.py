"""Import of samples as a run of their own: each file becomes an iteration of rollout and scores. Such a run has no
model or prompts, so it cannot be continued. Its token ids must be those of the model that is to be trained on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, JsonValue

from storage import layout, records
from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import InputError
from storage.ids import check_run_name
from storage.manifest import Fence, Manifest, Part, commit
from storage.ownership.lease import hold
from storage.parts import PartWriter
from storage.schema import REWARD, ROLLOUT, fingerprint
from storage.turns import UNKNOWN
from storage.upkeep.catalog import check_not_removed, names
from tasks.config.code_version import code_version
from tasks.importing.columns import KINDS, Local, local_files
from tasks.importing.rows import ImportOrder, SampleRows, check_temperature
from tasks.stages.names import Stage


class Imported(BaseModel, frozen=True, extra="forbid"):
    run: str
    iterations: int  # one for each file
    samples: int
    groups: int  # prompts, counted in each file
    scored: int  # samples with a reward
    columns: dict[str, str]  # column of the files by property


class ImportRecord(BaseModel, frozen=True, extra="forbid"):
    """Content of `run.json` of imported samples."""

    imported: tuple[str, ...]  # names of the files, without their folders
    columns: dict[str, str]
    temperature: float | None
    logprobs: bool

    @classmethod
    def of(cls, order: ImportOrder) -> "ImportRecord":
        files = tuple(Path(file).name for file in order.files)
        return cls(imported=files, columns=dict(order.columns), temperature=order.temperature, logprobs=order.logprobs)


def import_samples(root: Root, order: ImportOrder) -> Imported:
    """Store the samples of some files as a new run; repeated after a crash, it completes that. Raises CommitConflict
    (it was begun with files of other content) or InputError (a file, column or value cannot be used)."""
    if not order.files:
        raise InputError("name at least one .jsonl, .json or .parquet file to import")
    check_not_removed(root, check_run_name(order.run))
    for name, column in order.columns.items():
        if name not in KINDS:
            raise InputError(f"--map {name}={column}: a sample has no {name}, only {', '.join(KINDS)}")
    check_temperature(order.temperature)
    with local_files(order.files) as places:
        root.check_writable()
        record = ImportRecord.of(order)
        _check_unused(root, order.run, record)
        scored = [_Samples(order, place).check() for place in places]
        return _store(root, order, record, places, scored)


def _store(
    root: Root, order: ImportOrder, record: ImportRecord, places: Sequence[Local], scored: Sequence[int]
) -> Imported:
    with hold(root, order.run, "ratchet import") as lease:
        _check_unused(root, order.run, record)
        each = enumerate(zip(places, scored, strict=True), 1)
        files = [_File(root, _Samples(order, place), number, with_score) for number, (place, with_score) in each]
        for file in files:
            file.read()
        # first, because manifests without a record belong to no run
        records.publish(root, layout.run_config_key(order.run), record)
        for file in files:
            file.commit(value_digest(record.model_dump(mode="json")), lease)
    rows, groups = sum(file.rows for file in files), sum(file.samples.groups for file in files)
    columns = {name: column for file in files for name, column in file.samples.found.items()}
    return Imported(
        run=order.run, iterations=len(files), samples=rows, groups=groups, scored=sum(scored), columns=columns
    )


def _check_unused(root: Root, run: str, record: ImportRecord) -> None:
    key = layout.run_config_key(run)
    if root.exists(key):
        if not records.is_there(root, key, record):
            raise InputError(f"run {run!r} exists in {root.url}: give the imported samples another name with --run")
    elif names(root, run).manifests:
        raise InputError(f"run {run!r} has manifests, but no record: remove it with `ratchet rm {run}`")


@dataclass
class _Samples:
    """Samples of one file, as our tables."""

    order: ImportOrder
    place: Local
    found: dict[str, str] = field(default_factory=dict)
    _prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Digest of each prompt's tokens, and the number of its first row, from 1."""
    _next: dict[str, int] = field(default_factory=dict)
    _seen: set[tuple[str, int]] = field(default_factory=set)

    @property
    def groups(self) -> int:
        return len(self._prompts)

    def check(self) -> int:
        """The number of samples with a score. Raises InputError: they cannot be used. Nothing is kept or stored."""
        scored = sum(scores.num_rows - scores["reward"].null_count for _, scores in self.tables(1))
        if not self.groups:
            raise InputError(f"{self.place.file}: there are no samples in it")
        return scored

    def tables(self, iteration: int) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Batches of samples and their scores. Raises InputError: they cannot be used."""
        for batch in self.place.batches({self.order.columns.get(name, name) for name in KINDS}):
            rows = SampleRows(batch, self.order)
            self._check_alike(rows)
            self.found |= rows.found
            yield self._tables(rows, iteration)

    def _tables(self, rows: SampleRows, iteration: int) -> tuple[pa.Table, pa.Table]:
        ids, digests, prompts = rows.prompts()
        self._check_prompts(rows, ids, digests)
        responses, given = rows.tokens("response_tokens"), rows.sample_ids()
        numbers = self._numbered(ids) if given is None else given
        self._check_unique(ids, numbers)
        columns = {
            **rows.constants(self.order.run, iteration),
            "prompt_id": pa.array(ids),
            "sample_id": pa.array(numbers, pa.int32()),
            "prompt_tokens": prompts,
            "response_tokens": responses,
            "logprobs": rows.logprobs(responses),
            "sampled": rows.sampled(responses),
            "weight_version": rows.versions(responses),
            "turns": rows.turns(responses),
            "max_tokens": pc.list_value_length(responses).cast(pa.int32()),  # pyright: ignore[reportAttributeAccessIssue]
        }
        samples = pa.Table.from_arrays([columns[name] for name in ROLLOUT.names], schema=ROLLOUT)
        return samples, rows.scores(columns["prompt_id"], columns["sample_id"])

    def _check_alike(self, rows: SampleRows) -> None:
        """Refuse properties that only some batches have: the others would get defaults."""
        odd = sorted(name for name in self.found.keys() ^ rows.found.keys() if not KINDS[name].optional)
        if rows.batch.first and odd:
            has, had = ("has", "have not") if odd[0] in rows.found else ("has no", "have one")
            fact = f"{self.place.file}, sample {rows.batch.first + 1}: it {has} {odd[0]}, and samples before it {had}"
            raise InputError(f"{fact}. Correct the file, or leave that sample out")

    def _check_prompts(self, rows: SampleRows, ids: Sequence[str], digests: Sequence[int]) -> None:
        for row, (name, digest) in enumerate(zip(ids, digests, strict=True)):
            before, first = self._prompts.setdefault(name, (digest, rows.batch.first + row + 1))
            if before != digest:
                raise rows.prompt_error(row, name, first)

    def _numbered(self, ids: Sequence[str]) -> list[int]:
        numbers: list[int] = []
        for name in ids:
            numbers.append(self._next.get(name, 0))
            self._next[name] = numbers[-1] + 1
        return numbers

    def _check_unique(self, ids: Sequence[str], numbers: Sequence[int]) -> None:
        for name, number in zip(ids, numbers, strict=True):
            if (name, number) in self._seen:
                fact = f"{self.place.file}: sample {number} of prompt {name!r} occurs twice"
                raise InputError(f"{fact}: number them otherwise, or give no column for sample_id")
            self._seen.add((name, number))


@dataclass
class _File:
    root: Root
    samples: _Samples
    iteration: int
    scored: int  # samples with a score; without any, no scores are stored
    sampled: list[Part] = field(default_factory=list)
    scores: list[Part] = field(default_factory=list)
    rows: int = 0
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def read(self) -> None:
        """Store its rows as parts."""
        for number, (samples, scores) in enumerate(self.samples.tables(self.iteration)):
            name, written = f"{number:05d}.arrow", self._writer(Stage.ROLLOUT)
            self.sampled.append(written.write_table(f"samples-{name}", samples, ROLLOUT))
            if self.scored:
                self.scores.append(self._writer(Stage.REWARD).write_table(f"rewards-{name}", scores, REWARD))
            self.rows += samples.num_rows

    def commit(self, config_digest: str, fence: Fence) -> None:
        """Publish them, and their scores if they have any."""
        facts: dict[str, JsonValue] = {"weight_version": UNKNOWN, "imported": True}
        rollout = commit(self.root, self._manifest(Stage.ROLLOUT, config_digest, self.sampled, facts, {}), fence)
        if self.scored:
            inputs = {"rollout": rollout.digest}
            commit(self.root, self._manifest(Stage.REWARD, config_digest, self.scores, {}, inputs), fence)

    def _writer(self, stage: Stage) -> PartWriter:
        return PartWriter(self.root, self.samples.order.run, self.iteration, stage)

    def _manifest(
        self, stage: Stage, digest: str, parts: Sequence[Part], facts: dict[str, JsonValue], inputs: dict[str, str]
    ) -> Manifest:
        schema = fingerprint(ROLLOUT if stage == Stage.ROLLOUT else REWARD)
        return Manifest(
            run=self.samples.order.run, iteration=self.iteration, stage=stage, schema_fingerprint=schema,
            parts=tuple(parts), inputs=inputs, facts=facts, config_digest=digest, code_version=code_version(),
            writer="ratchet import", started=self._started, finished=datetime.now(UTC),
        )  # fmt: skip
