"""The configuration that a run was started with, as stored. A run's identity follows from this record alone, so it is
the same for every version that reads it, whatever keys have been added since. Imports neither Ray nor torch."""

import functools
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from storage import layout, records
from storage.backends.root import Root
from storage.errors import InputError, NotCommitted, SchemaMismatch
from storage.manifest import Fence, load
from storage.revisions import Revisions, read_revisions
from storage.upkeep.catalog import check_not_removed, names, require_run
from storage.upkeep.fork import check_past, check_unused
from tasks.config.credentials import shown_text
from tasks.config.document import apply_overrides, explained, reparsed
from tasks.config.identity import (
    Document,
    changed_meaning,
    changed_settings,
    fixed_by_prepare,
    meaning_digest,
    touches,
    with_settings,
)
from tasks.config.run import RunConfig

RULES = 1  # version of the rules by which a configuration has its digest (`tasks.config.identity`)
_ABOUT = {"rules", "request", "former"}  # keys of a record that are not of the configuration
_KEPT = 32  # configurations that a process keeps: a command reads that of its run many times


class ConfigRecord(RunConfig):
    """Content of `run.json`: the configuration, and the rules by which its digest is made."""

    rules: Literal[1] = RULES
    """Version of the rules by which the digest is made."""
    request: str | None = None
    """Identity of the flow run that began the run, which no other flow run takes for its own; None if a command did."""
    former: tuple[str, ...] = ()
    """Digests of the configurations that the run had before it was corrected in place (`corrections`)."""

    @classmethod
    def of(cls, config: RunConfig, request: str | None = None) -> "ConfigRecord":
        return cls.model_validate({**dict(config), "rules": RULES, "request": request})

    @property
    def digest(self) -> str:
        """The `config_digest` of every manifest of the run."""
        return meaning_digest(self.model_dump(mode="json", exclude=_ABOUT))


@dataclass(frozen=True)
class StoredConfig:
    config: RunConfig  # with defaults for the keys that the record lacks
    digest: str  # the `config_digest` of every manifest that the run makes now
    first: str  # the same of revision 0: identity of the configuration that the run was started with
    former: tuple[str, ...] = ()
    """Digests before the configuration was corrected. Stages made under them had read nothing that was changed."""


def read_config(root: Root, run: str, revisions: Revisions | None = None) -> StoredConfig:
    """The configuration that a run was started with, and with the settings that its head, or another revision, changed.
    Raises DigestMismatch (its text is not what was written), InputError (there is no such run) or SchemaMismatch (this
    version cannot read it)."""
    document, where = _document(root, run)
    settings = (read_revisions(root, run) if revisions is None else revisions).settings()
    return _understood(json.dumps(document), json.dumps(settings), where)


@functools.lru_cache(_KEPT)
def _understood(text: str, settings: str, where: str) -> StoredConfig:
    document = json.loads(text)
    former = document.get("former")
    document = {key: value for key, value in document.items() if key not in _ABOUT}
    first = meaning_digest(document)
    document = with_settings(document, json.loads(settings))
    try:
        config = RunConfig.model_validate(document)
    except ValidationError as error:
        fact = f"{where} is not a configuration that this version can read:\n{explained(error)}"
        raise SchemaMismatch(f"{fact}\nContinue the run with the version that made it") from None
    known = tuple(map(str, former)) if isinstance(former, list) else ()
    return StoredConfig(config, meaning_digest(document), first, known)


def documents(root: Root, run: str, revisions: Revisions) -> dict[str, Document]:
    """Each revision's configuration by its digest, also by former ones of the first; empty if it is the only one."""
    first = read_config(root, run, revisions.seen(0))
    if not first.former and not any(rerun.settings for rerun in revisions.reruns):
        return {}
    read = [first, *(read_config(root, run, revisions.seen(number)) for number in revisions.numbers[1:])]
    found = {one.digest: one.config.model_dump(mode="json") for one in read}
    return {**dict.fromkeys(first.former, found[first.digest]), **found}


def begun_by(root: Root, run: str) -> JsonValue:
    """The flow run that began a run that there is; None if a command did. Raises as `read_config`."""
    return _document(root, run)[0].get("request")


def stored_config(root: Root, run: str) -> RunConfig:
    """The configuration a run was started with. Raises as `read_config`."""
    return read_config(root, run).config


def changed_config(config: RunConfig, run: str, settings: Sequence[str]) -> RunConfig:
    """The configuration of a run with settings replaced. Raises InputError: one cannot be used."""
    document = config.model_dump(mode="json")
    apply_overrides(document, settings)
    return reparsed(document, run)


def continued_by(root: str, run: str) -> str:
    """The command that continues a run of the root at this URL from its record."""
    return shlex.join(["ratchet", "run", run, f"--root={shown_text(root)}"])


def differs(root: Root, run: str, lines: str, repair: str) -> InputError:
    """The error of a run that is to go on with other settings, those of `lines`."""
    fact = f"run {run!r} exists in {root.url} and was started with different settings:\n{lines}"
    return InputError(f"{fact}\nContinue it with its own configuration ({continued_by(root.url, run)}), or {repair}")


def forked_config(root: Root, parent: str, run: str, settings: Sequence[str], revision: int | None = None) -> RunConfig:
    """The configuration of a fork: that of its parent, or of a revision of it, with settings replaced. Raises
    InputError: the parent cannot be forked, or not with these settings."""
    revisions = read_revisions(root, parent)
    before = read_config(root, parent, revisions if revision is None else revisions.seen(revision)).config
    if before.retrain is not None:
        repair = f"export its weights with `ratchet export {parent} --to FOLDER`, and start a new run with them"
        raise InputError(f"run {parent!r} trains on stored samples and cannot be forked: {repair}")
    document = before.model_dump(mode="json")
    apply_overrides(document, settings)
    document["run"]["name"] = run
    config = reparsed(document, parent)
    check_fixed(before, config, parent, "a fork of it")
    return config


def check_fixed(before: RunConfig, config: RunConfig, parent: str, what: str) -> None:
    """Raises InputError: the configuration of `what` changes a setting that iteration 0 of the run before has fixed."""
    changed = changed_meaning(before.meaning(), config.meaning())
    if decided := [line for line in changed if line.startswith(fixed_by_prepare(before))]:
        lines = "\n  ".join([f"what iteration 0 of run {parent!r} has fixed cannot be changed in {what}:", *decided])
        raise InputError(f"{lines}\nStart a new run instead")
    teachers = [one.train.policy.distill is not None for one in (before, config)]
    if config.retrain is None and teachers == [False, True]:  # a retraining stores its own
        fact = f"iteration 0 of run {parent!r} has stored no teacher, so {what} cannot have one"
        raise InputError(f"{fact}: start a new run, or train on its stored samples with `ratchet retrain`")
    sources = [one.train.critic is not None and one.train.critic.source is not None for one in (before, config)]
    if before.train.critic is not None and config.train.critic is not None and sources[0] != sources[1]:
        has = f"begins with {'a model of its own' if sources[0] else 'the policy'} (train.critic.source)"
        fact = f"the critic of run {parent!r} {has}, and {what} goes on with it"
        raise InputError(f"{fact}: {'give' if sources[0] else 'leave out'} train.critic.source, or start a new run")
    begins = before.train.critic is None and config.train.policy.loss.trains_critic  # a reward model
    if (before.train.critic is None) != (config.train.critic is None) and not begins:
        has, wants = ("none", "one") if before.train.critic is None else ("a critic", "none")
        fact = f"the states of run {parent!r} hold {has} (train.critic), so {what} cannot have {wants}"
        raise InputError(f"{fact}: start a new run, with an exported model if it is to go on from these weights")


def record_config(
    root: Root, run: str, config: RunConfig, fence: Fence | None = None, request: str | None = None
) -> str:
    """Record the configuration of a run, or check that it is continued unchanged; returns the digest that its manifests
    carry: that of the record made when the run was started. A record binds the run once a manifest was made under it.
    Until then the holder of the lease may replace it: nothing was made from it, because the start that wrote it failed.
    Later it may correct what no stage has read (`corrections`). Without the lease as `fence` an existing record is
    never replaced. `request` is the identity of the flow run that begins the run. Raises InputError (the run was
    started with other settings that decide its result, or something else has left manifests under its name) or
    LeaseLost (from the fence; nothing was replaced)."""
    record, key = _record(run, config, request), layout.run_config_key(run)
    _is_there(root, run)
    if records.publish(root, key, record):
        return record.digest
    if fence is not None and _is_unused(root, run, record):
        fence.check()
        root.remove(key)
        records.publish(root, key, record)  # if another process was faster, its record is compared like any
    elif fence is not None and corrections(root, run, config):
        stored = read_config(root, run)
        former = tuple(one for one in dict.fromkeys((*stored.former, stored.first)) if one != record.digest)
        kept = record.model_copy(update={"former": former, "request": begun_by(root, run)})
        fence.check()
        root.replace(key, records.seal(kept, key))
    return _continued(root, run, config)


def corrections(root: Root, run: str, config: RunConfig) -> list[str]:
    """Settings that continuing a run with a configuration would correct in place, as lines with both values. None if
    nothing differs, or if anything that differs was read by a stage that is committed or has begun."""
    revisions = read_revisions(root, run)
    stored, given = read_config(root, run, revisions).config.meaning(), config.meaning()
    if not (lines := changed_meaning(stored, given)) or revisions.reruns:
        return []
    there = names(root, run, revisions=revisions)
    begun = (*there.manifests, *there.pieces, *there.increments)
    places = {place for key in begun if (place := layout.place_of(key)) is not None}
    trained = any(iteration and stage == "train" for iteration, stage in places)  # from all that an iteration reads
    changed = changed_settings(stored, given)
    prepared = (0, "prepare") in places and any(key.startswith(fixed_by_prepare(config)) for key in changed)
    read = any(touches(key, stage) for key in changed for _, stage in places)
    return [] if trained or prepared or read else lines


def changed_context(stored: RunConfig, given: RunConfig) -> list[str]:
    """The line of a changed `engine.max_model_len`, where conversations grow until it ends them. Plain responses end
    before it: prompts that leave no room for `rollout.max_tokens` are refused."""
    before, now = stored.engine.max_model_len, given.engine.max_model_len
    if given.environment is None or before == now:
        return []
    return [f"engine.max_model_len: the run was started with {before}, but is now given {now}"]


def check_record(root: Root, run: str, config: RunConfig) -> None:
    """Raises InputError early where `record_config` would under the run's lease; records nothing."""
    there = _is_there(root, run) and not _is_unused(root, run, _record(run, config))
    if there and not corrections(root, run, config):
        _continued(root, run, config)


def _is_there(root: Root, run: str) -> bool:
    """True if the run has a record. Raises InputError if nothing may begin or continue under its name."""
    check_not_removed(root, run)
    if not (there := root.exists(layout.run_config_key(run))):
        check_unused(root, run)
    return there


def _record(run: str, config: RunConfig, request: str | None = None) -> ConfigRecord:
    named = config.run.model_copy(update={"name": run})
    return ConfigRecord.of(config.model_copy(update={"run": named}), request)


def _is_unused(root: Root, run: str, record: ConfigRecord) -> bool:
    """True if no manifest was made under the stored record, so that `record` may take its place. The record of imported
    samples never gives way: it is refused. If a holder that has lost the lease replaces the record of its successor,
    the successor's manifests show it: then the record that they were made under may return."""
    _document(root, run)
    made = {load(root, key).config_digest for key in names(root, run, 0).manifests if not layout.revision_of(key)}
    if not made:  # iteration 0 is committed first, but it may be lost
        return not names(root, run).manifests
    stored = read_config(root, run)
    return made == {record.digest} and record.digest not in (stored.first, *stored.former)


def _continued(root: Root, run: str, config: RunConfig) -> str:
    revisions = read_revisions(root, run)
    stored = read_config(root, run, revisions)
    changed = changed_meaning(stored.config.meaning(), config.meaning())
    if changed := [*changed, *changed_context(stored.config, config)]:
        lines = "\n".join(f"  {line}" for line in changed)
        if revisions.settings():
            lines += f"\n  (revision {revisions.head}, the head, has set {', '.join(sorted(revisions.settings()))})"
        raise differs(root, run, lines, "start a new run with another --run")
    # an evaluation of iteration 0 is stored there under the settings of the head
    check_past(root, run, {stored.first, *documents(root, run, revisions)})
    return stored.digest


def _document(root: Root, run: str) -> tuple[dict[str, JsonValue], str]:
    """The content of a run's `run.json`, and where that is. Raises as `read_config`."""
    key = layout.run_config_key(run)
    where = f"{root.url}/{key}"
    try:
        # unlike that of json, this parser refuses any depth as a ValueError
        document = from_json(records.unseal(root.read_bytes(key), where, key))
    except NotCommitted:
        require_run(root, run)
        raise
    except ValueError as error:
        raise SchemaMismatch(f"{where} is not JSON: {error}. Restore the object from a copy") from None
    if not isinstance(document, dict):
        raise SchemaMismatch(f"{where} is a {type(document).__name__}, not a configuration")
    if "imported" in document:
        repair = f"`ratchet retrain NEW --select {run} --from RUN@ITERATION` trains on them"
        fact = f"run {run!r} holds imported samples, and no model or configuration"
        raise InputError(f"{fact}: {repair}. A new run needs another name (--run)")
    if document.get("rules") != RULES:
        fact = f"{where} was recorded under rules {document.get('rules')!r} of identity; this version knows {RULES}"
        raise SchemaMismatch(f"{fact}. Continue the run with the version that made it")
    return document, where
