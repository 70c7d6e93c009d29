"""Samples made elsewhere as a run of their own: an iteration of rollout and scores for each file.

Such a run has no model or prompts, so it cannot be continued. Its token ids must be those of the model that is to be
trained on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, JsonValue

from storage import layout, records
from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import InputError
from storage.ids import check_run_name
from storage.manifest import Fence, Manifest, Part, commit
from storage.ownership.lease import hold
from storage.parts import PartWriter
from storage.schema import REWARD, ROLLOUT, fingerprint
from storage.upkeep.catalog import check_not_removed, names
from tasks.config.code_version import code_version
from tasks.importing.files import read_batches
from tasks.importing.rows import UNKNOWN, ImportOrder, Rows, prompt_ids
from tasks.stages.names import Stage

_REQUIRED = ("prompt_tokens", "response_tokens")
_OPTIONAL = (
    "logprobs", "reward", "prompt_id", "sample_id", "finish_reason", "weight_version", "seed", "temperature", "top_p"
)  # fmt: skip


class Imported(BaseModel):
    """What was imported."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    iterations: int
    """One for each file."""
    samples: int
    groups: int
    """Prompts, counted in each file."""
    scored: int
    """Samples with a reward."""
    columns: dict[str, str]
    """Column of the files by what it became."""


class ImportRecord(BaseModel):
    """What the `run.json` of imported samples holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    imported: tuple[str, ...]
    """Names of the files, without their folders."""
    columns: dict[str, str]
    temperature: float | None
    logprobs: bool

    @classmethod
    def of(cls, order: ImportOrder) -> "ImportRecord":
        """The record of what is asked for."""
        files = tuple(Path(file).name for file in order.files)
        return cls(imported=files, columns=dict(order.columns), temperature=order.temperature, logprobs=order.logprobs)


def import_samples(root: Root, order: ImportOrder) -> Imported:
    """Store the samples of some files as a new run; repeated after a crash, it completes that.

    Raises:
        CommitConflict: it was begun with files of other content.
        InputError: a file, a column or a value cannot be used; nothing was committed.
    """
    check_run_name(order.run)
    check_not_removed(root, order.run)
    _check_columns(order)
    root.check_writable()
    record = ImportRecord.of(order)
    _check_unused(root, order.run, record)
    with hold(root, order.run, "ratchet import") as lease:
        _check_unused(root, order.run, record)
        files = [_File(root, order, file, number) for number, file in enumerate(order.files, 1)]
        for file in files:
            file.read()
        # without a record, what is committed would belong to no run
        records.publish(root, layout.run_config_key(order.run), record)
        for file in files:
            file.commit(value_digest(record.model_dump(mode="json")), lease)
    return Imported(
        run=order.run,
        iterations=len(files),
        samples=sum(file.rows for file in files),
        groups=sum(len(file.next_sample) for file in files),
        scored=sum(file.scored for file in files),
        columns={name: column for file in files for name, column in file.found.items()},
    )


def _check_columns(order: ImportOrder) -> None:
    for name, column in order.columns.items():
        if name not in (*_REQUIRED, *_OPTIONAL):
            known = ", ".join((*_REQUIRED, *_OPTIONAL))
            raise InputError(f"--map {name}={column}: a sample has no {name}, only {known}")


def _check_unused(root: Root, run: str, record: ImportRecord) -> None:
    key = layout.run_config_key(run)
    if root.exists(key):
        if not records.is_there(root, key, record):
            raise InputError(f"run {run!r} exists in {root.url}: give the imported samples another name with --run")
    elif names(root, run).manifests:
        raise InputError(f"run {run!r} has manifests, but no record: remove it with `ratchet rm {run}`")


@dataclass
class _File:
    """One file, which becomes one iteration."""

    root: Root
    order: ImportOrder
    file: str
    iteration: int
    samples: list[Part] = field(default_factory=list)
    scores: list[Part] = field(default_factory=list)
    rows: int = 0
    scored: int = 0
    found: dict[str, str] = field(default_factory=dict)
    next_sample: dict[str, int] = field(default_factory=dict)
    """Number of the next sample of each prompt."""
    _seen: set[tuple[str, int]] = field(default_factory=set)
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def read(self) -> None:
        """Store its rows as parts.

        Raises:
            InputError: it cannot be used.
        """
        columns = {self.order.columns.get(name, name) for name in (*_REQUIRED, *_OPTIONAL)}
        for batch in read_batches(self.file, columns):
            self._add(Rows(batch, self.order))
        if not self.rows:
            raise InputError(f"{self.file}: there are no samples in it")

    def commit(self, config_digest: str, fence: Fence) -> None:
        """Publish them, and their scores if they have any."""
        facts: dict[str, JsonValue] = {"weight_version": UNKNOWN, "imported": True}
        rollout = commit(self.root, self._manifest(Stage.ROLLOUT, config_digest, self.samples, facts, {}), fence)
        if self.scored:
            inputs = {"rollout": rollout.digest}
            commit(self.root, self._manifest(Stage.REWARD, config_digest, self.scores, {}, inputs), fence)

    def _add(self, rows: Rows) -> None:
        prompts, responses = rows.lists("prompt_tokens", pa.int32()), rows.lists("response_tokens", pa.int32())
        ids = rows.texts("prompt_id") or prompt_ids(prompts)
        given = rows.numbers("sample_id", pa.int32(), None)
        numbers = self._numbered(ids) if given is None else given.to_pylist()
        self._check_unique(ids, numbers)
        logprobs = rows.logprobs(responses)
        columns = {
            **rows.constants(self.order.run, self.iteration),
            "prompt_id": pa.array(ids),
            "sample_id": pa.array(numbers, pa.int32()),
            "prompt_tokens": prompts,
            "response_tokens": responses,
            "logprobs": logprobs,
            "max_tokens": pc.list_value_length(responses).cast(pa.int32()),  # pyright: ignore[reportAttributeAccessIssue]
        }
        self._store(
            pa.Table.from_arrays([columns[name] for name in ROLLOUT.names], schema=ROLLOUT),
            rows.scores(columns["prompt_id"], columns["sample_id"]),
        )
        self.found |= rows.found

    def _store(self, samples: pa.Table, scores: pa.Table) -> None:
        number = len(self.samples)
        self.samples.append(self._writer(Stage.ROLLOUT).write_table(f"samples-{number:05d}.arrow", samples, ROLLOUT))
        self.scores.append(self._writer(Stage.REWARD).write_table(f"rewards-{number:05d}.arrow", scores, REWARD))
        self.scored += scores.num_rows - scores["reward"].null_count
        self.rows += samples.num_rows

    def _writer(self, stage: Stage) -> PartWriter:
        return PartWriter(self.root, self.order.run, self.iteration, stage)

    def _manifest(
        self,
        stage: Stage,
        config_digest: str,
        parts: Sequence[Part],
        facts: dict[str, JsonValue],
        inputs: dict[str, str],
    ) -> Manifest:
        return Manifest(
            run=self.order.run,
            iteration=self.iteration,
            stage=stage,
            schema_fingerprint=fingerprint(ROLLOUT if stage == Stage.ROLLOUT else REWARD),
            parts=tuple(parts),
            inputs=inputs,
            config_digest=config_digest,
            code_version=code_version(),
            facts=facts,
            writer="ratchet import",
            started=self._started,
            finished=datetime.now(UTC),
        )

    def _numbered(self, ids: Sequence[str]) -> list[int]:
        numbers: list[int] = []
        for name in ids:
            numbers.append(self.next_sample.get(name, 0))
            self.next_sample[name] = numbers[-1] + 1
        return numbers

    def _check_unique(self, ids: Sequence[str], numbers: Sequence[int]) -> None:
        for name, number in zip(ids, numbers, strict=True):
            if (name, number) in self._seen:
                raise InputError(
                    f"{self.file}: sample {number} of prompt {name!r} occurs twice: number them otherwise, or give no "
                    "column for sample_id"
                )
            self._seen.add((name, number))
            self.next_sample.setdefault(name, 0)
