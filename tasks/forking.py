"""Runs that begin with the past of another: forks, and runs on stored samples."""

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from storage.filters import parse_filter
from storage.ids import check_run_name
from storage.manifest import find
from storage.revisions import read_revisions
from storage.selection import OFFERED
from storage.upkeep.catalog import names, stored_states
from storage.upkeep.fork import Announce, Forked, branch, fork
from tasks.checks import check_branch
from tasks.config.credentials import is_secret
from tasks.config.document import apply_overrides, load_changes, merged, reparsed
from tasks.config.retrain import absolute, moment_before, place_of, state_of
from tasks.config.run import RunConfig
from tasks.config.stored import ConfigRecord, check_fixed, forked_config, stored_config
from tasks.rewards.trying import call_reward
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.prepared import stored_codec
from tasks.stages.select import examine
from tasks.stages.selecting import open_place
from tasks.stages.views import IN_FLIGHT, Prepared
from trainer_core.objectives.objective_config import PolicyConfig


def make_fork(
    root: Root,
    parent: str,
    iteration: int,
    run: str,
    settings: Sequence[str] = (),
    revision: int | None = None,
    request: str | None = None,
    announce: Announce = lambda _: None,
) -> Forked:
    """Make run `run` from iterations 0 to `iteration` of `parent`, with settings replaced; `request` is the identity of
    the flow run that asked for it. Raises InputError: as `forked_config` and `check_followed`; else as `fork`."""
    config = forked_config(root, parent, check_run_name(run), settings, revision)
    check_followed(root, parent, iteration, config, settings, run, revision)
    record, older = ConfigRecord.of(config, request), config.rollout.ahead
    said = [one for one in settings if not is_secret(one.partition("=")[0])]
    return fork(root, WORKFLOW, parent, iteration, run, record.digest, record, revision, announce, older, said)


def check_followed(
    root: Root, run: str, iteration: int, config: RunConfig, given: Sequence[str], new: str, revision: int | None = None
) -> None:
    """Raises InputError: the rollout of `iteration` has left responses open, which one with updates between would skip;
    with the command that makes run `new` with the settings `given` from before the first rollout."""
    revisions = read_revisions(root, run)
    before = find(root, run, iteration, Stage.ROLLOUT, revisions if revision is None else revisions.seen(revision))
    if config.rollout.updates == "in-flight" or before is None or IN_FLIGHT not in before.part_names:
        return
    groups = before.metrics["groups_in_flight"]
    said = [f"--set={one}" for one in given if not is_secret(one.partition("=")[0])]
    more = [] if revision is None else [f"--revision={revision}"]
    again = shlex.join(["ratchet", "fork", f"{run}@0", f"--run={new}", *said, *more, f"--root={root.url}"])
    raise InputError(
        f'rollout.updates = "{config.rollout.updates}" would skip prompts: the rollout of iteration {iteration} of run '
        f"{run!r} has left {groups:.0f} prompt groups in flight, with which only a rollout with "
        f'rollout.updates = "in-flight" goes on. Set it so, or fork the run before its first rollout:\n  {again}'
    )


def retrain_config(
    root: Root, run: str, given: Mapping[str, Any], config: str | None = None, settings: Sequence[str] = ()
) -> RunConfig:
    """The configuration of a run on stored samples: as recorded, or for a new run that of the run it begins from.
    `config` is the path or URL of a TOML file with the settings that differ; `given`, keys of [retrain], replace those
    in it, and `settings`, each `section.key=value`, all others. Raises InputError: it cannot be used."""
    if not str(given.get("where", "all")).strip():
        raise InputError("the condition `where` is empty, and would select every sample: leave it out to take them all")
    changes = {} if config is None else load_changes(config)
    changes = merged(changes, {"retrain": dict(given)} if given else {})
    apply_overrides(changes, settings)
    if (before := _recorded(root, run)) is not None:
        if before.retrain is None:
            raise InputError(f"run {run!r} exists and is no retraining: give the new run another name")
        return reparsed(merged(before.model_dump(mode="json"), changes), run)
    table = changes.get("retrain")
    start = table.get("start") if isinstance(table, dict) else None
    if not isinstance(start, str):
        raise InputError(f"run {run!r} does not exist yet: say with which state it begins (--from RUN@ITERATION)")
    place = state_of(start)
    before = stored_config(open_place(root, place), place.run)
    document = before.model_dump(mode="json", exclude={"retrain"})
    document.pop("environment", None)  # stored conversations are not played again
    document["run"] = {**document["run"], "name": run, "iterations": 0}
    document["evaluate"] = {"every": 0}  # it needs an engine, and the examples need samples of the run's own
    document["report"] = {**document["report"], "examples": 0}
    made = reparsed(merged(_corrected(document, changes), changes), run)
    check_fixed(before, made, place.run, "a run that begins from it")
    return made


def since_of(root: Root, run: str, age: str, now: datetime | None = None) -> str:
    """The time from which `--newer-than AGE` counts, fixed when the run begins. Raises InputError: another form."""
    since, before = moment_before(age, now or datetime.now(UTC)), _recorded(root, run)
    recorded = None if before is None or before.retrain is None else before.retrain.since
    return (recorded or since).isoformat()


def start_of(root: Root, run: str, text: str) -> str:
    """The state that `--from` names; of a run alone the newest that is kept. Raises InputError: it has none."""
    text, place = absolute(text), place_of(text)
    if "@" in text:
        return text
    before = _recorded(root, run)
    if before is not None and before.retrain is not None and before.retrain.start.rpartition("@")[0] == text:
        return before.retrain.start
    source = open_place(root, place)
    recorded = names(source, place.run)
    if not (kept := stored_states(source, place.run, Stage.TRAIN, recorded)):
        raise InputError(f"run {place.run!r} has no train state, so no run can begin from it: name another with --from")
    return f"{text}@{max(kept)}"


def begin_retraining(
    root: Root, run: str, config: RunConfig, request: str | None = None, announce: Announce = lambda _: None
) -> Forked | None:
    """Make the run, unless it exists; what cannot work is refused first, and nothing is stored then. All that is
    selected is read once for this, and once more by the stage. `request` is the identity of the flow run that begins
    it; `announce` is told of what will be copied. Raises InputError: the configuration, the state to start from or the
    selection cannot be used."""
    if (section := config.retrain) is None:
        raise InputError(f"run {run!r} has no [retrain]: `ratchet run` starts a run that samples its own responses")
    if root.exists(layout.run_config_key(run)):
        return None
    place = state_of(section.start)
    source = open_place(root, place)
    if section.where.strip():
        parse_filter(section.where, OFFERED)
    for text in section.select:
        open_place(root, place_of(text))
    if (prepared := find(source, place.run, 0, Stage.PREPARE)) is None:
        raise InputError(f"run {place.run!r} holds no model, so no run can begin from it: name another with --from")
    check_branch(config, source, prepared)
    selecting, _ = examine(config, root, Prepared(prepared), source, lambda _share: None)  # before anything is stored
    for answered in selecting.answered.values():  # what is to be scored again
        call_reward(config.reward, answered.read(), stored_codec(source, Prepared(prepared)))
    record = ConfigRecord.of(config, request)
    return branch(source, WORKFLOW, place.run, place.first, root, run, record.digest, record, announce)


def _recorded(root: Root, run: str) -> RunConfig | None:
    """The configuration of a run; None if there is no such run yet."""
    return stored_config(root, run) if root.exists(layout.run_config_key(check_run_name(run))) else None


def _corrected(document: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Stored samples are off-policy: add importance correction, unless the changes set one or the loss needs none."""
    said = merged(document["train"]["policy"], changes.get("train", {}).get("policy", {}))
    asked = "correction" in changes.get("train", {}).get("policy", {})
    try:
        policy = PolicyConfig.model_validate(said)
    except ValidationError:
        return document  # parsing it refuses it, with all that is wrong
    if asked or policy.needs_behaviour or not policy.needs_advantages:
        return document
    return merged(document, {"train": {"policy": {"correction": {"type": "truncate"}}}})
