"""`ratchet samples` and `ratchet report`: responses with their scores, and the files for people."""

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.options import Common, RunId, place_in
from flows.views.history import PLOT
from flows.views.samples import Choice, read_chosen, sample_lines
from storage import layout

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
    common: Common = Common(),
) -> int:
    """Show samples of an iteration: texts, rewards, advantages; by default the three best and the three worst."""
    place = place_in(which, "RUN[@ITERATION]")
    asked = best or worst or random or prompt is not None
    choice = Choice(best, worst, prompt, random, seed) if asked else Choice(best=_FEW, worst=_FEW)
    found = read_chosen(common.store, place.run, place.iteration, choice)
    return common.show(found, sample_lines(found))


class Report(BaseModel, frozen=True, extra="forbid"):
    """URLs of a run's report."""

    run: str
    metrics: str  # URL of the CSV with a row for each iteration
    tensorboard: str  # URL of the folder for `tensorboard --logdir`, a program of its own: `pip install tensorboard`
    plot: str  # URL of the curves


def report_command(run: RunId, *, common: Common = Common()) -> int:
    """Rebuild the metrics (CSV, TensorBoard) and the curves of a run from its manifests."""
    store = common.of_run(run)
    from flows.views.reports import write_report  # draws with matplotlib

    write_report(store, run)
    metrics, events, plot = (
        f"{store.url}/{layout.report_key(run, name)}" for name in (layout.METRICS, layout.EVENTS, PLOT)
    )
    report = Report(run=run, metrics=metrics, tensorboard=events.rpartition("/")[0], plot=plot)
    return common.show(report, [f"{name:<20}{url}" for name, url in report.model_dump(exclude={"run"}).items()])
