"""Inputs of a run: the tokenizer of its model, and its prompts, read or generated, as tables to be stored."""

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import InputError
from storage.manifest import Manifest
from storage.ownership.scratch import scratch
from storage.parts import read_parts
from storage.schema import PROMPTS
from tasks.config.data import DataSection, DataSource, GeneratedAddition
from tasks.config.evaluation import EvaluationSettings
from tasks.config.run import RunConfig
from tasks.data.drawing import whole_weights
from tasks.data.files import Read, name_of, opened, state
from tasks.data.generated import generate_addition, generate_tokenizer
from tasks.data.hub import TEXT_FILES
from tasks.data.models import copy_files
from tasks.data.prompts import Room, check_lengths, id_of, mapped, prompt_batches, split_off, twice
from tasks.data.rendering import Renderer
from tasks.data.tokenizer import TextCodec
from tasks.data.values import Keyed
from trainer_core.effects import no_effect

TABLES = ("train", "held_out", "warmup")


@dataclass(frozen=True)
class Counted:
    name: str
    rows: int  # prompts of it in the table
    dropped: int = 0  # prompts of it that were too long
    fields: frozenset[str] = field(default=frozenset(), compare=False)  # names of all fields of its records
    used: frozenset[str] = field(default=frozenset(), compare=False)
    """Settings that have had an effect on it (`Renderer.used`)."""
    kinds: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Id of its first prompt of each kind (`Rendered.kinds`)."""


@dataclass(frozen=True)
class Prompts:
    """The tables of prompts a run is made from, tokenized."""

    tables: Mapping[str, pa.Table]  # train, held_out and warmup, as far as the run has them
    counts: Mapping[str, tuple[Counted, ...]]  # the sources of each table, in the order of its rows
    digests: Mapping[str, tuple[str, ...]]  # digests of the sources' content, for each table that is read
    notes: tuple[str, ...] = ()  # treatments of some that may not be meant


def text_codec(config: RunConfig) -> TextCodec:
    """The tokenizer of the model that a run starts from, without reading the weights. Raises InputError: the model
    directory does not exist or lacks a file."""
    with scratch() as directory:
        if config.model.generate is not None:
            generate_tokenizer(directory, config.model.generate)
        else:
            copy_files(str(config.model.source), directory, lambda name: name in TEXT_FILES)
        return codec_of(config, directory)


def codec_of(config: RunConfig, directory: Path) -> TextCodec:
    """The tokenizer of a model directory, with what the configuration says of its tokens. Raises InputError: a file is
    missing or cannot be used, or there is no stop token."""
    hidden = config.rollout.special_tokens == "hidden"
    return TextCodec.from_directory(directory, config.rollout.stop_tokens, None if hidden else ())


def prompts_of(config: RunConfig, codec: TextCodec) -> Prompts:
    """The prompts of a run. In one process equal content is read and tokenized once. Raises InputError: a source is
    missing, empty or malformed, or a prompt does not fit into the context."""
    if config.rollout.special_tokens == "hidden" and not codec.hides:
        why = "with a tokenizer whose special tokens are stop, padding and BOS tokens alone, which texts never have"
        raise InputError(no_effect("rollout.special_tokens", why, "shown", "hidden"))
    seen = [state(source) for table in TABLES for source in config.data.sources(table)]
    limits = [config.engine.max_model_len, config.rollout.max_tokens, config.train.max_length]
    decides = [config.data.model_dump(mode="json"), config.run.seed, codec.identity, limits, seen]
    return _made(Keyed(value_digest(decides), _Order(config, codec)))


@dataclass(frozen=True)
class _Order:
    config: RunConfig
    codec: TextCodec

    def room(self, table: str) -> Room:
        config = self.config
        return Room(
            context=min(config.engine.max_model_len, self.codec.context),
            max_tokens=config.rollout.max_tokens,
            max_length=config.train.max_length if table == "warmup" else None,
            drop=config.data.overlong == "drop",
        )


@functools.lru_cache(maxsize=1)  # the command line, the flow and `prepare` ask for the same
def _made(given: Keyed[_Order]) -> Prompts:
    order, data = given.value, given.value.config.data
    if data.generate is not None:
        return _generated(order, data.generate)
    read = {table: _read(order, table) for table in TABLES if data.sources(table)}
    made = Prompts(
        tables={name: one.tables[name] for name, one in read.items()},
        counts={name: one.counts[name] for name, one in read.items()},
        digests={name: one.digests[name] for name, one in read.items()},
        notes=tuple(note for one in read.values() for note in one.notes),
    )
    _check_effects(data, made)
    whole_weights([source.weight or 1.0 for source in data.sources("train")])
    return _with_held_out(made, data.hold_out, order.config.run.seed) if data.hold_out else made


def _check_effects(data: DataSection, made: Prompts) -> None:
    """Refuse settings of which no record makes use: names of fields that are nowhere, changes that are not made."""
    seen: dict[tuple[str, str], list[Counted]] = {}
    for table, counted in made.counts.items():
        for source, one in zip(data.sources(table), counted, strict=True):
            for setting in ("id_field", "answer_field", "tools_field"):
                seen.setdefault((setting, dict(source)[setting]), []).append(one)
    for (setting, name), counted in seen.items():
        default, fields = DataSection.model_fields[setting].default, {name for one in counted for name in one.fields}
        why = None
        if name not in fields:
            why = f"where no record has such a field, only {', '.join(sorted(fields))}"
        elif setting == "tools_field" and not any(setting in one.used for one in counted):
            why = "where no conversation has such a field, and the chat template alone writes tools"
        if why is not None and name not in ("", default):
            raise InputError(no_effect(f"data.{setting}", why, default, name))
    used = {name for counted in made.counts.values() for one in counted for name in one.used}
    if unused := [one for one in data.accept if one not in used]:
        raise InputError(no_effect("data.accept", "where the chat template makes no such change", given=unused))


def _generated(order: _Order, section: GeneratedAddition) -> Prompts:
    source = order.config.data.model_copy(update={"train": "generated"}).sources("train")[0]
    tables: dict[str, pa.Table] = {}
    for name, records in generate_addition(section, order.config.run.seed).items():
        reads = (Read(f"record {number}", record) for number, record in enumerate(records, 1))
        tables[name] = mapped(prompt_batches(reads, Renderer(source, order.codec, name), order.room(name)))
    return Prompts(tables, {name: (Counted("generated", table.num_rows),) for name, table in tables.items()}, {})


def _read(order: _Order, table: str) -> Prompts:
    """One table from its sources."""
    sources = order.config.data.sources(table)
    names, known = [name_of(source) for source in sources], _Known()
    same = next((name for name in names if names.count(name) > 1), None)
    if len(names) > 1 and same is not None:
        raise InputError(f"data.{table}: two sources are called {same!r}: give each its own name")
    made = mapped(_batches(order, table, names, known))
    if (name := twice(made)) is not None:
        places = " and ".join(itertools.islice(_places(order, table, names, name), 2))
        raise InputError(f"{table}: the id {name!r} occurs twice, in {places}. Make ids unique")
    return Prompts({table: made}, {table: tuple(known.counts)}, {table: tuple(known.digests)}, tuple(known.notes))


@dataclass
class _Known:
    """Facts that are known at the end of each source of a table."""

    counts: list[Counted] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _batches(order: _Order, table: str, names: Sequence[str], known: _Known) -> Iterator[pa.RecordBatch]:
    """The rows of all sources of a table; adds to `known` at the end of each source."""
    for source, name in zip(order.config.data.sources(table), names, strict=True):
        where = table if len(names) == 1 else f"{table}, source {name!r}"
        rows, qualifier = 0, _qualifier(names, name)
        renderer = Renderer(source, order.codec, where, table == "warmup", order.config.data.accept)
        with opened(source, order.config.data.download) as content:
            for batch in prompt_batches(content.records(), renderer, order.room(table), qualifier):
                rows += batch.num_rows
                yield batch
        if not renderer.records:
            raise InputError(f"dataset {source.source} is empty: give at least one record")
        if not rows:
            fact = f'{where}: all {renderer.records} prompts are too long, so data.overlong = "drop" leaves none'
            raise InputError(f"{fact}: lower rollout.max_tokens or raise engine.max_model_len")
        fields, used = frozenset(renderer.fields), frozenset(renderer.used)
        known.counts.append(Counted(name, rows, renderer.records - rows, fields, used, renderer.kinds))
        known.digests.append(content.digest)
        known.notes += renderer.notes.sentences(where)


def _places(order: _Order, table: str, names: Sequence[str], wanted: str) -> Iterator[str]:
    """Places of the records with an id: read again, since a place for each row would take more than its tokens."""
    for source, name in zip(order.config.data.sources(table), names, strict=True):
        with opened(source, order.config.data.download) as content:
            for number, read in enumerate(content.records(), 1):
                if _qualifier(names, name) + id_of(read, str(source.id_field), number) == wanted:
                    yield read.place


def _qualifier(names: Sequence[str], name: str) -> str:
    """Prefix of the ids of a source."""
    return "" if len(names) == 1 else f"{name}/"


def _with_held_out(made: Prompts, count: int, seed: int) -> Prompts:
    """Split held-out prompts off the training prompts."""
    train, held_out, left = split_off(made.tables["train"], count, seed)
    before = made.counts["train"]
    ends = np.cumsum([0, *(one.rows for one in before)])
    places = zip(before, itertools.pairwise(ends), strict=True)
    counts = tuple(replace(one, rows=int(left[start:end].sum())) for one, (start, end) in places)
    if not all(one.rows for one in counts):
        raise InputError(f"data.hold_out = {count} leaves nothing of a source of data.train: lower it")
    return replace(
        made,
        tables={**made.tables, "train": train, "held_out": held_out},
        counts={**made.counts, "train": counts, "held_out": (Counted("hold_out", count),)},
    )


def check_prompts(config: RunConfig) -> Prompts:
    """The prompts of a new run. Raises InputError: they cannot be used, or needed ones are missing."""
    prompts = prompts_of(config, text_codec(config))
    solved = prompts.tables.get("warmup")
    _check_needed(config, prompts.tables.keys(), solved is not None and solved["answer"].null_count < len(solved))
    return prompts


def check_sources(config: RunConfig, prepared: Manifest) -> None:
    """Refuse to continue a run with other prompts than those it is made from; sources that cannot be read do not count.
    Raises InputError: a source has another content now."""
    stored = prepared.facts["data_digests"]
    assert isinstance(stored, dict)
    for table in TABLES:
        _check_content(table, prepared.run, config.data.sources(table), stored.get(table))


def check_stored_prompts(config: RunConfig, root: Root, prepared: Manifest) -> None:
    """Refuse settings that need prompts the run does not have, or that leave no room for a response to stored ones.
    Raises InputError: naming the setting, or the first prompt."""
    parts = {table: prepared.part(f"{table}.arrow") for table in TABLES if f"{table}.arrow" in prepared.part_names}
    _check_needed(config, parts.keys(), "warmup" in parts)
    for name, part in parts.items():
        table = read_parts(root, [part], PROMPTS, ["prompt_id", "prompt_tokens"])
        check_lengths(table, config.engine.max_model_len, config.rollout.max_tokens, name)


def check_asked_prompts(config: RunConfig, root: Root, prepared: Manifest, settings: EvaluationSettings) -> None:
    """Refuse an evaluation of prompts that the run does not have, or that leave no room for its answers. Raises
    InputError: naming the table, or the first prompt."""
    name, table = f"{settings.table}.arrow", PROMPTS.empty_table()
    if name in prepared.part_names:
        table = read_parts(root, [prepared.part(name)], PROMPTS, ["prompt_id", "prompt_tokens"])
    if not table.num_rows:
        fact = f"run {prepared.run!r} has no {settings.table} prompts to evaluate on"
        raise InputError(f"{fact}: give --table train, or begin a run with data.held_out or data.hold_out")
    limit = settings.max_tokens or config.rollout.max_tokens
    asked = table.slice(0, settings.prompts)
    check_lengths(asked, config.engine.max_model_len, limit, settings.table, "max_tokens of the evaluation")


def _check_needed(config: RunConfig, tables: Collection[str], solved: bool) -> None:
    if config.warmup.steps and not solved:
        repair = "set data.warmup, or warmup.steps = 0"
        raise InputError(f"warmup.steps is above 0, but there are no solved examples: {repair}")
    if config.evaluate.every and "held_out" not in tables:
        repair = "set data.hold_out or data.held_out, or evaluate.every = 0"
        raise InputError(f"evaluate.every is above 0, but there are no held-out prompts: {repair}")


def _check_content(table: str, run: str, given: tuple[DataSource, ...], stored: object) -> None:
    if not given:
        return
    if not isinstance(stored, list):
        fact = f"data.{table} is set, but run {run!r} was prepared without it, and a run keeps its prompts"
        raise InputError(f"{fact}: leave it out, or start a new run with another --run")
    for source, digest in zip(given, stored, strict=False):
        now = _digest(Keyed(value_digest([state(source), source.model_dump(mode="json")]), source))
        if now is not None and now != digest:
            fact = f"data.{table}: {source.source} has the content {now} now, but run {run!r} was prepared from"
            repair = "restore the content or move it away, or start a new run of it with another --run"
            raise InputError(f"{fact} {digest}, and a run keeps its prompts: {repair}")


@functools.lru_cache(maxsize=16)  # the command line and the flow both check
def _digest(source: Keyed[DataSource]) -> str | None:
    """Digest of a source's content; None if it cannot be read."""
    try:
        with opened(source.value) as content:
            return content.digest
    except InputError:
        return None
