"""`ratchet check`: the checks of `run` without the run."""

from pydantic import BaseModel

from flows.cli.continuing import names_a_run, of_stored
from flows.cli.options import DEFAULT_ROOT, FileOrRun, Iterations, Json, RootUrl, RunName, Settings
from flows.views.output import Output
from storage.backends.root import Root, open_root
from storage.ids import check_run_name
from storage.manifest import Manifest
from tasks.config.document import load_config
from tasks.config.environment import prepare_process
from tasks.config.run import RunConfig


class Continuable(BaseModel, frozen=True, extra="forbid"):
    """A run that can be continued with a configuration."""

    run: str
    root: str
    prepared: str
    """Digest of the stage that stored its model and its prompts, which are used instead of their sources."""
    iterations: int
    """Iterations that it is to have."""


def check_command(
    which: FileOrRun,
    /,
    *,
    iterations: Iterations = None,
    settings: Settings = (),
    run: RunName = None,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Make the checks of `run`, and show a prompt and what would be started; start and write nothing."""
    prepare_process()
    store = open_root(root)
    given = [*settings, *([] if iterations is None else [f"run.iterations={iterations}"])]
    if names_a_run(which, store):
        name, config = which, of_stored(which, run, given, store)
    else:
        config = load_config(which, given)
        name = run or config.run.name
    with Output(json=json) as output:
        if name is not None and (prepared := _prepared(store, check_run_name(name), config)) is not None:
            _show_continued(output, store, name, config, prepared)
        else:
            _show_new(output, config)
    return 0


def _prepared(store: Root, name: str, config: RunConfig) -> Manifest | None:
    """Manifest of the stored model and prompts of an existing run. Refuses settings that would make it another run."""
    from tasks.checks import prepared_stage
    from tasks.config.stored import check_record

    check_record(store, name, config)
    return prepared_stage(store, name)


def _show_new(output: Output, config: RunConfig) -> None:
    from flows.views.checked import checked, lines_of

    found = checked(config)
    output.result(found, lines_of(found))


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
