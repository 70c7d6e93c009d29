"""Checks of a continued run: the settings that decide its result, and its model, must be those of its start."""

import functools
import json
import shlex
from pathlib import Path

from pydantic import JsonValue
from xxhash import xxh3_128_hexdigest

from storage.backends.root import Root
from storage.digest import file_digest
from storage.errors import InputError
from storage.manifest import Manifest, Part
from storage.upkeep.catalog import names
from tasks.config.credentials import is_secret, referenced
from tasks.config.identity import changed_meaning, changed_settings, fixed_by_prepare
from tasks.config.model import ModelSection
from tasks.config.others import KEYS, Other, other_model
from tasks.config.run import RunConfig
from tasks.config.stored import changed_context, corrections, differs, read_config
from tasks.data.hub import is_weights
from tasks.data.models import MODEL_KEY, ModelFolder, find_model
from tasks.stages.names import Stage
from tasks.stages.prepared import MODEL, other_parts
from tasks.stages.views import Prepared

_SMALL = 1 << 20  # bytes; a larger file that is not local is compared by its size and its beginning


def check_continued(config: RunConfig, root: Root, prepared: Prepared, selected: Manifest | None = None) -> None:
    """Refuse changed settings and a changed model; one that can no longer be read does not matter. `selected` is the
    stage `select` of a run on stored samples, if it is committed. Raises InputError: with both values, and the command
    that makes a fork, or the advice to start a new run."""
    _check_settings(config, root, prepared.manifest.run)
    if config.model.source is not None:
        check_model(config.model, prepared.manifest)
    if selected is not None:
        _check_other(config, selected, "teacher")
    check_others(config, prepared.manifest)


def check_others(config: RunConfig, prepared: Manifest) -> None:
    """Refuse a teacher, a judge, or a critic's first model that is not the stored one. Raises InputError."""
    for kind in KEYS:
        if kind != "teacher" or config.retrain is None:  # a selection stores its own
            _check_other(config, prepared, kind)


def _check_other(config: RunConfig, holder: Manifest, kind: Other) -> None:
    if (section := other_model(config, kind)) is None:
        return
    if not other_parts(holder, kind):
        fact = f"{KEYS[kind]} is {section.source!r}, but run {holder.run!r} has stored no model for a {kind}"
        raise InputError(f"{fact}: leave it out, or start a new run")
    check_model(section, holder, f"{kind}/", KEYS[kind])


def fork_command(root: Root, run: str, config: RunConfig, changes: dict[str, JsonValue]) -> str | None:
    """The command that makes a fork with these settings; None if a fork cannot have them."""
    unsayable = [value for value in changes.values() if value is None or isinstance(value, dict)]
    if unsayable or any(key.startswith(fixed_by_prepare(config)) or is_secret(key) for key in changes):
        return None
    if not (complete := names(root, run).of_stage(Stage.WEIGHT_SYNC).values()):
        return None
    given = [f"--set={key}={json.dumps(value)}" for key, value in changes.items()]
    return shlex.join(["ratchet", "fork", f"{run}@{max(complete)}", f"--run={run}-fork", *given, f"--root={root.url}"])


def _check_settings(config: RunConfig, root: Root, run: str) -> None:
    before = read_config(root, run).config
    stored, context = before.meaning(), changed_context(before, config)
    if not (lines := changed_meaning(stored, config.meaning()) + context) or corrections(root, run, config):
        return
    changes = {key: value for key, value in changed_settings(stored, config.meaning()).items() if not referenced(value)}
    changes |= {"engine.max_model_len": config.engine.max_model_len} if context else {}
    fork = fork_command(root, run, config, changes)
    repair = f"make a fork that has them:\n  {fork}" if fork else "start a new run with another --run"
    raise differs(root, run, "\n".join(f"  {line}" for line in lines), repair)


def check_model(section: ModelSection, holder: Manifest, prefix: str = MODEL, key: str = MODEL_KEY) -> None:
    """Raises InputError: a file of the model, or of another of the run, is not what a stage, the `holder`, has stored.
    Its parts begin with `prefix`, and the setting `key` names it. A model that is gone does not matter."""
    try:
        folder = find_model(section, key)
        there = folder.files()
    except InputError:  # away: the run has its own copy
        return
    stored = holder.below(prefix)
    if not stored.keys() & there.keys():  # an empty folder is away too
        return
    for name, part in stored.items():
        if name not in there:
            raise _changed(folder, holder.run, f"{name} was there when the run was started, and is not now")
        if there[name] != part.bytes:
            raise _changed(folder, holder.run, f"{name} had {part.bytes} bytes, and now has {there[name]}")
        if (found := _digest(folder, name, there[name], part)) != part.digest:
            raise _changed(folder, holder.run, f"{name} had the digest {part.digest}, and now has {found}")
    if new := [name for name in there if is_weights(name) and name not in stored and name in _weights(folder)]:
        raise _changed(folder, holder.run, f"{new[0]} was not there when the run was started")


def _weights(folder: ModelFolder) -> list[str]:
    try:
        return folder.weights()
    except InputError:
        return []


def _digest(folder: ModelFolder, name: str, size: int, part: Part) -> str:
    path = Path(folder.path, name)
    if path.is_file():
        status = path.stat()
        return _file_digest(path, status.st_size, status.st_mtime_ns)
    # reading all of it would fetch the whole model at each start
    return xxh3_128_hexdigest(folder.read(name)) if size <= _SMALL else part.digest


@functools.lru_cache(maxsize=256)  # the command line and the flow both check
def _file_digest(path: Path, _size: int, _modified: int) -> str:
    return file_digest(path)[0]


def _changed(folder: ModelFolder, run: str, fact: str) -> InputError:
    return InputError(
        f"{folder} is not the model that run {run!r} was started with: {fact}. The run has "
        f"its own copy of that model, so it continues if {folder.key} names nothing that can be read, or the former "
        "files; to train the new ones start a new run with another --run"
    )
