"""`ratchet report`: the files for people, made again from what is stored."""

from pydantic import BaseModel

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl
from flows.views.history import PLOT
from flows.views.output import Output
from storage import layout
from storage.backends.root import open_root
from storage.upkeep.catalog import require_run


class Report(BaseModel, frozen=True, extra="forbid"):
    """URLs of a run's report."""

    run: str
    metrics: str
    """URL of the CSV with a row for each iteration."""
    tensorboard: str
    """URL of the folder for `tensorboard --logdir`, a program of its own: `pip install tensorboard`."""
    plot: str
    """URL of the curves."""


def report_command(run: str, *, root: RootUrl = DEFAULT_ROOT, json: Json = False) -> int:
    """Make the metrics (CSV, TensorBoard) and the curves of a run again, from its manifests alone.

    Parameters
    ----------
    run
        Id of the run.
    """
    store = open_root(root)
    require_run(store, run)
    from flows.views.reports import write_report  # draws with matplotlib

    write_report(store, run)
    metrics, events, plot = (
        f"{store.url}/{layout.report_key(run, name)}" for name in (layout.METRICS, layout.EVENTS, PLOT)
    )
    report = Report(run=run, metrics=metrics, tensorboard=events.rpartition("/")[0], plot=plot)
    with Output(json=json) as output:
        output.result(report, [f"{name:<20}{value}" for name, value in report.model_dump(exclude={"run"}).items()])
    return 0
