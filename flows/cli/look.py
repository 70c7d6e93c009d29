"""`ratchet samples`, `report` and `view`: responses with their scores, the files for people, and a browser."""

import secrets
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.options import DEFAULT_ROOT, Common, Json, RootUrl, RunId, place_in
from flows.views.history import PLOT
from flows.views.output import Output
from flows.views.samples import Choice, read_chosen, sample_lines
from storage import layout
from storage.backends.root import open_root
from storage.errors import InputError

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


class Viewing(BaseModel, frozen=True, extra="forbid"):
    root: str
    url: str  # address with the token


def view_command(
    *,
    port: Annotated[
        int, Parameter(help="Port on 127.0.0.1; 0 takes a free one.", validator=Number(gte=0, lte=65535))
    ] = 0,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Show the runs of a root in a browser of this machine: curves, samples, tokens; live, and read-only."""
    store = open_root(root)
    if store.folder is not None and not store.folder.is_dir():
        raise InputError(f"there is no storage root at {store.url}: check --root, or start a run there first")
    from flows.viewer.server import HOST, listening, serve

    server, token = listening(port), secrets.token_urlsafe(32)
    viewing = Viewing(root=store.url, url=f"http://{HOST}:{server.getsockname()[1]}/?token={token}")
    Output.show(json, viewing, [f"open {viewing.url}", "Ctrl-C ends the viewer"])
    serve(store, server, token)
    return 0
