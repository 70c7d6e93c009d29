"""The argument of `ratchet run`: the configuration of a new run, or the name of an existing one."""

from collections.abc import Sequence
from pathlib import Path

from storage import layout
from storage.backends.root import Root
from storage.errors import InputError
from storage.ids import check_run_name, is_run_name
from storage.upkeep.catalog import require_run
from tasks.config.credentials import shown_text
from tasks.config.document import apply_overrides, load_config, parse_config, with_functions
from tasks.config.run import RunConfig
from tasks.config.stored import stored_config


def names_a_run(given: str, root: Root) -> bool:
    """True for a run, False for a file.

    Raises:
        InputError: both are there, or neither.
    """
    if not is_run_name(given):
        return False
    file = Path(given).is_file()
    if file and given.endswith(".toml"):
        return False
    there = root.exists(layout.run_config_key(given))
    if there and file:
        raise InputError(
            f"{given!r} names a file, and a run of {root.url}: give ./{given} for the file, or start from another "
            "folder for the run"
        )
    if there or file or given.endswith(".toml"):
        return there
    require_run(root, given)
    return True


def of_stored(run: str, other: str | None, settings: Sequence[str], root: Root) -> RunConfig:
    """The configuration that a run was recorded with, with settings replaced.

    Raises:
        InputError: there is no such run, it cannot be continued, a value cannot be used, or another name is given.
    """
    require_run(root, run)
    if other not in (None, run):
        raise InputError(
            f"run {run!r} is continued under its own name, not as {other!r}: `ratchet fork {run}@ITERATION --run "
            f"{other}` makes another run of its past"
        )
    document = stored_config(root, run).model_dump(mode="json")
    apply_overrides(document, settings)
    return parse_config(with_functions(document, None), f"of run {run} with the given settings")


def of_file(path: str, run: str | None, settings: Sequence[str]) -> tuple[str, RunConfig]:
    """The name of the run that a file describes, and its configuration.

    Raises:
        InputError: it cannot be used, or the run has no name.
    """
    config = load_config(path, settings)
    name = run or config.run.name
    if name is None:
        raise InputError(f"the run has no id: set run.name in {shown_text(path)} or give --run NAME")
    return check_run_name(name), config
