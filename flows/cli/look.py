"""`ratchet samples` and `ratchet report`: responses with their scores, and the files for people."""

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl, RunId, place_in
from flows.views.history import PLOT
from flows.views.output import Output
from flows.views.samples import Choice, read_chosen, sample_lines
from storage import layout
from storage.backends.root import open_root
from storage.upkeep.catalog import require_run

_FEW = 3


def samples_command(
    which: Annotated[str, Parameter(help="RUN[@ITERATION]: the iteration that sampled them; by default the newest.")],
    /,
    *,
    best: Annotated[int, Parameter(help="Show this many with the highest rewards.", validator=Number(gte=0))] = 0,
    worst: Annotated[int, Parameter(help="Show this many with the lowest rewards.", validator=Number(gte=0))] = 0,
    prompt: Annotated[str | None, Parameter(help="Show all samples of this prompt.")] = None,
    random: Annotated[int, Parameter(help="Show this many drawn at random.", validator=Number(gte=0))] = 0,
    seed: Annotated[int, Parameter(help="Chooses those drawn at random.", validator=Number(gte=0))] = 0,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Show samples of an iteration: texts, rewards, advantages; by default the three best and the three worst."""
    place = place_in(which, "RUN[@ITERATION]")
    choice = Choice(best=best, worst=worst, prompt=prompt, random=random, seed=seed)
    if not (best or worst or random or prompt is not None):
        choice = Choice(best=_FEW, worst=_FEW)
    found = read_chosen(open_root(root), place.run, place.iteration, choice)
    return Output.show(json, found, sample_lines(found))


class Report(BaseModel, frozen=True, extra="forbid"):
    """URLs of a run's report."""

    run: str
    metrics: str
    """URL of the CSV with a row for each iteration."""
    tensorboard: str
    """URL of the folder for `tensorboard --logdir`, a program of its own: `pip install tensorboard`."""
    plot: str
    """URL of the curves."""


def report_command(run: RunId, *, root: RootUrl = DEFAULT_ROOT, json: Json = False) -> int:
    """Make the metrics (CSV, TensorBoard) and the curves of a run again, from its manifests alone."""
    store = open_root(root)
    require_run(store, run)
    from flows.views.reports import write_report  # draws with matplotlib

    write_report(store, run)
    metrics, events, plot = (
        f"{store.url}/{layout.report_key(run, name)}" for name in (layout.METRICS, layout.EVENTS, PLOT)
    )
    report = Report(run=run, metrics=metrics, tensorboard=events.rpartition("/")[0], plot=plot)
    return Output.show(
        json, report, [f"{name:<20}{value}" for name, value in report.model_dump(exclude={"run"}).items()]
    )
