"""Checks of a run before anything starts: by the command line before its slow imports, and by the flow."""

from flows.views.history import workflow_of
from flows.views.trackers import check_trackers
from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from storage.upkeep.catalog import names
from storage.upkeep.fork import Announce
from storage.upkeep.holes import check_whole
from tasks.checks import check_config, prepared_stage
from tasks.config.run import RunConfig
from tasks.config.stored import check_record
from tasks.forking import begin_retraining


def begin_on_samples(
    name: str, root: Root, config: RunConfig, request: str | None = None, announce: Announce = lambda _: None
) -> None:
    """Make a run that trains on stored samples, unless it exists; `request` is the identity of the flow run that begins
    it, and `announce` is told of what will be copied. Raises InputError if configuration, start or selection cannot be
    used."""
    check_trackers(config.report)
    begin_retraining(root, name, config, request, announce)


def check_start(name: str, root: Root, config: RunConfig) -> None:
    """Refuse what cannot work, or would continue a run with another meaning. A second call repeats little. Raises
    InputError, or StorageUnavailable if the root cannot be written."""
    check_trackers(config.report)
    if config.retrain is not None and not root.exists(layout.run_config_key(name)):
        fact = f"run {name!r} has [retrain] and does not exist yet"
        raise InputError(f"{fact}: begin it with `ratchet retrain {name} --config FILE`")
    check_config(config, root, prepared_stage(root, name))
    check_record(root, name, config)


def check_holes(name: str, root: Root, config: RunConfig) -> None:
    """Refuse to go on after a stage that is lost. It lists the names of all records. Raises WrongRecord."""
    check_whole(root, workflow_of(config), name, names(root, name), config.rollout.ahead)
