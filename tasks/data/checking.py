"""Checks of a run's prompts before anything starts: of a new run, and of one that is continued."""

import functools
from collections.abc import Collection
from dataclasses import dataclass, field

from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import InputError
from storage.manifest import Manifest
from storage.parts import read_parts
from storage.schema import PROMPTS
from tasks.config.data import DataSource
from tasks.config.evaluation import EvaluationSettings
from tasks.config.run import RunConfig
from tasks.data.files import opened, state
from tasks.data.prompts import check_lengths
from tasks.data.sources import TABLES, Prompts, prompts_of, text_codec


def check_prompts(config: RunConfig) -> Prompts:
    """The prompts of a new run. Raises InputError: they cannot be used, or some that the configuration needs are
    missing."""
    prompts = prompts_of(config, text_codec(config))
    solved = prompts.tables.get("warmup")
    _check_needed(config, prompts.tables.keys(), solved is not None and solved["answer"].null_count < len(solved))
    return prompts


def check_sources(config: RunConfig, prepared: Manifest) -> None:
    """Refuse to continue a run with other prompts than those it is made from; sources that cannot be read do not count.
    Raises InputError: a source has another content now."""
    stored = prepared.facts.get("data_digests")
    if isinstance(stored, dict):  # runs of the first version recorded none
        for table in TABLES:
            given = config.data.sources(table)
            _check_content(table, prepared.run, given, stored.get(table))


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
        raise InputError(
            f"run {prepared.run!r} has no {settings.table} prompts to evaluate on: give --table train, or begin a run "
            "with data.held_out or data.hold_out"
        )
    limit = settings.max_tokens or config.rollout.max_tokens
    asked = table.slice(0, settings.prompts)
    check_lengths(asked, config.engine.max_model_len, limit, settings.table, "max_tokens of the evaluation")


def _check_needed(config: RunConfig, tables: Collection[str], solved: bool) -> None:
    if config.warmup.steps and not solved:
        raise InputError(
            "warmup.steps is above 0, but there are no solved examples: set data.warmup, or warmup.steps = 0"
        )
    if config.evaluate.every and "held_out" not in tables:
        raise InputError(
            "evaluate.every is above 0, but there are no held-out prompts: set data.hold_out or data.held_out, or "
            "evaluate.every = 0"
        )


def _check_content(table: str, run: str, given: tuple[DataSource, ...], stored: object) -> None:
    if not given:
        return
    if not isinstance(stored, list):
        raise InputError(
            f"data.{table} is set, but run {run!r} was prepared without it, and a run keeps its prompts: leave it out, "
            "or start a new run with another --run"
        )
    for source, digest in zip(given, stored, strict=False):
        now = _digest(_Seen(value_digest([state(source), source.model_dump(mode="json")]), source))
        if now is not None and now != digest:
            raise InputError(
                f"data.{table}: {source.source} has the content {now} now, but run {run!r} was prepared from "
                f"{digest}, and a run keeps its prompts: restore the content or move it away, or start a new run of it "
                "with another --run"
            )


@dataclass(frozen=True)
class _Seen:
    identity: str
    source: DataSource = field(compare=False)


@functools.lru_cache(maxsize=16)  # the command line and the flow both check
def _digest(seen: _Seen) -> str | None:
    """Digest of a source's content; None if it cannot be read."""
    try:
        with opened(seen.source) as content:
            return content.digest
    except InputError:
        return None
