"""`ratchet check`, the checks of `run` without the run; and the argument of both: a file, or the name of a run."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from flows.cli.options import Changes, Common, FileOrRun
from flows.views.output import Output
from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from storage.ids import check_run_name, is_run_name
from storage.manifest import Manifest
from storage.upkeep.catalog import require_run
from tasks.config.credentials import shown_text
from tasks.config.document import load_config
from tasks.config.environment import prepare_process
from tasks.config.run import RunConfig
from tasks.config.stored import changed_config, stored_config


def names_a_run(given: str, root: Root) -> bool:
    """True for a run, False for a file. Raises InputError if both are there, or neither."""
    if not is_run_name(given):
        return False
    file = Path(given).is_file()
    if file and given.endswith(".toml"):
        return False
    there = root.exists(layout.run_config_key(given))
    if there and file:
        fact = f"{given!r} names a file, and a run of {root.url}"
        raise InputError(f"{fact}: give ./{given} for the file, or start from another folder for the run")
    if there or file or given.endswith(".toml"):
        return there
    require_run(root, given)
    return True


def of_stored(run: str, other: str | None, settings: Sequence[str], root: Root) -> RunConfig:
    """The recorded configuration of a run, with settings replaced. Raises InputError if that does not continue it."""
    require_run(root, run)
    if other not in (None, run):
        fact = f"run {run!r} is continued under its own name, not as {other!r}"
        raise InputError(f"{fact}: `ratchet fork {run}@ITERATION --run {other}` makes another run of its past")
    return changed_config(stored_config(root, run), run, settings)


def of_file(path: str, run: str | None, settings: Sequence[str]) -> tuple[str, RunConfig]:
    """The name of the run that a file describes, and its configuration. Raises InputError if one cannot be used."""
    config = load_config(path, settings)
    name = run or config.run.name
    if name is None:
        raise InputError(f"the run has no id: set run.name in {shown_text(path)} or give --run NAME")
    return check_run_name(name), config


class Continuable(BaseModel, frozen=True, extra="forbid"):
    run: str
    root: str
    prepared: str  # digest of the stage that stored its model and its prompts, which are used instead of their sources
    iterations: int


def check_command(which: FileOrRun, /, *, changes: Changes = Changes(), common: Common = Common()) -> int:
    """Check a configuration as `run` does; show a prompt and the processes of a run. Start nothing, leave nothing."""
    prepare_process()
    store = common.store
    if names_a_run(which, store):
        name, config = which, of_stored(which, changes.run, changes.replaced, store)
    else:
        config = load_config(which, changes.replaced)
        name = changes.run or config.run.name
    with Output(json=common.json) as output:
        if name is not None and (prepared := _prepared(store, check_run_name(name), config)) is not None:
            _show_continued(output, store, name, config, prepared)
        else:
            from flows.views.checked import checked, lines_of

            store.check_writable()
            found = checked(config, store)
            output.result(found, lines_of(found))
    return 0


def _prepared(store: Root, name: str, config: RunConfig) -> Manifest | None:
    """Manifest of the stored model and prompts of an existing run. Refuses settings that would make it another run."""
    from tasks.checks import prepared_stage
    from tasks.config.stored import check_record

    check_record(store, name, config)
    return prepared_stage(store, name)


def _show_continued(output: Output, store: Root, name: str, config: RunConfig, prepared: Manifest) -> None:
    from flows.views.trackers import check_trackers
    from tasks.checks import check_config

    check_trackers(config.report)
    check_config(config, store, prepared)
    iterations = config.run.iterations
    found = Continuable(run=name, root=store.url, prepared=prepared.digest, iterations=iterations)
    lines = [
        f"run {name} is in {store.url}, with a model and prompts of its own, which are used instead of their sources",
        f"it can be continued with this configuration, up to iteration {iterations}",
    ]
    output.result(found, lines)
