"""The pages: each reads the store when it is asked for, and writes nothing."""

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from flows.viewer import charts, reading
from flows.viewer.search import ORDERS, SHOWN, Columns, Query, search
from flows.views.history import EXPLANATIONS, IterationRecord, read_record
from flows.views.samples import Choice, read_chosen
from flows.views.status import read_status
from flows.views.table import Row, columns_of
from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import InputError, RatchetError, told
from storage.ownership.lease import describe, holder
from storage.selection import OFFERED
from storage.upkeep.catalog import names, require_run, summaries
from storage.upkeep.lineage import of_sample
from tasks.config.credentials import shown, shown_text
from tasks.config.environment import without_secrets
from tasks.config.identity import Document, leaves
from tasks.config.stored import stored_config
from tasks.stages.names import WORKFLOW, Stage

_HERE = Path(__file__).parent
_FIRST = (
    "reward/reward_mean", "evaluate/reward_mean", "evaluate/pass_rate", "train/kl", "train/entropy", "train/grad_norm",
    "rollout/response_length", "rollout/truncated", "rollout/turns_mean", "rollout/environment_failures",
)  # fmt: skip
_REWARDS = ("reward/reward_mean", "train/reward_mean", "evaluate/reward_mean")
_COLORS = {
    "logprob": "log-probability by the engine",
    "trainer": "by the trainer",
    "ratio": "ratio of both",
    "version": "weight version",
    "advantage": "advantage",
}
_MOST = 6  # runs side by side
_GROUPS = 500
_EXTREMES = 3

Page = Callable[[Root, Request], dict[str, Any]]


def application(root: Root) -> Starlette:
    pages: dict[str, tuple[str, Page]] = {
        "/": ("runs.html", _runs),
        "/compare": ("compare.html", _compare),
        "/run/{run}": ("run.html", _run),
        "/run/{run}/curve": ("curve.svg", _curve),
        "/run/{run}/search": ("search.html", partial(_search, Columns())),
        "/run/{run}/{iteration:int}": ("iteration.html", _iteration),
        "/run/{run}/{iteration:int}/group": ("group.html", _group),
        "/run/{run}/{iteration:int}/sample": ("sample.html", _sample),
        "/run/{run}/{iteration:int}/lineage": ("lineage.html", _lineage),
    }
    shown = _Shown(root)
    return Starlette(
        routes=[
            *(Route(path, shown.page(template, read)) for path, (template, read) in pages.items()),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ],
        exception_handlers={RatchetError: shown.refused, HTTPException: shown.refused},
    )


class _Shown:
    def __init__(self, root: Root) -> None:
        self._root = root
        self._templates = Environment(
            autoescape=True, loader=FileSystemLoader(_HERE / "templates"), undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.filters |= {"number": charts.number}
        self._templates.globals |= {"width": charts.WIDTH, "height": charts.HEIGHT, "root": shown_text(root.url)}

    def page(self, template: str, read: Page) -> Callable[[Request], Response]:
        """A function that answers requests for a page. Its tag follows from the records that the page shows."""

        def answer(request: Request) -> Response:
            tag = f'"{value_digest([str(request.url), _state(self._root, request.path_params.get("run"))])}"'
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304)
            return self._made(template, {**request.path_params, **read(self._root, request)}, {"ETag": tag})

        return answer

    def refused(self, _request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            status, message = error.status_code, "there is no such page"
        else:
            status, message = 404 if isinstance(error, InputError) else 500, str(error)
            message = told(error) if isinstance(error, RatchetError) else message
        return self._made("refused.html", {"message": without_secrets(message)}, {}, status)

    def _made(self, template: str, data: dict[str, Any], headers: dict[str, str], status: int = 200) -> Response:
        media = "image/svg+xml" if template.endswith(".svg") else "text/html"
        return Response(self._templates.get_template(template).render(data), status, headers, media)


def _state(root: Root, run: str | None) -> list[Any]:
    """A value that changes when the records that are shown change: of a run, or of all."""
    if run is None:
        return [one.model_dump(mode="json") for one in summaries(root)]
    require_run(root, run)
    found = names(root, run)
    return [found.manifests, sorted(found.retired), found.revisions.head, _driver(root, run)]


def _driver(root: Root, run: str) -> str | None:
    entry = holder(root, run)
    return None if entry is None else describe(entry)


def _number(request: Request, name: str, least: int, default: int | None = None) -> int | None:
    text = request.query_params.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise InputError(f"{name}={text!r} is not a number of at least {least}: write one, or leave it out")
    return int(text)


def _named(request: Request) -> tuple[str, int]:
    prompt, sample = request.query_params.get("prompt"), _number(request, "sample", 0)
    if prompt is None or sample is None:
        raise InputError("the address names no sample: it needs prompt=ID and sample=NUMBER")
    return prompt, sample


def _runs(root: Root, _request: Request) -> dict[str, Any]:
    return {"runs": summaries(root)}


def _run(root: Root, request: Request) -> dict[str, Any]:
    run = request.path_params["run"]
    status = read_status(root, run, whole=True)
    curves = _curves(request, {run: [one.row for one in status.history]})
    return {**curves, "status": status, "driver": _driver(root, run)}


def _curve(root: Root, request: Request) -> dict[str, Any]:
    run = request.path_params["run"]
    rows = [one.row for one in read_status(root, run).history]
    drawn = (charts.line_chart(name, {run: rows}) for name in _REWARDS)
    return {"chart": next((one for one in drawn if one is not None), None)}


def _compare(root: Root, request: Request) -> dict[str, Any]:
    chosen = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 0 < len(chosen) <= _MOST:
        raise InputError(f"{len(chosen)} runs are chosen: choose from 1 to {_MOST} in the list of runs")
    every = {run: read_status(root, run, whole=True) for run in chosen}
    rows = {run: [one.row for one in status.history] for run, status in every.items()}
    return {**_curves(request, rows), "every": every, "differences": _differences(root, chosen)}


def _curves(request: Request, series: dict[str, list[Row]]) -> dict[str, Any]:
    known = list(dict.fromkeys(name for rows in series.values() for name in columns_of(rows)))
    numbers = [name for name in known if any(name in row.values for rows in series.values() for row in rows)]
    asked = [name for name in request.query_params.getlist("metric") if name in numbers]
    drawn = (charts.line_chart(name, series) for name in dict.fromkeys((*_FIRST, *asked)))
    return {"charts": [one for one in drawn if one is not None], "metrics": numbers, "asked": asked, "series": series}


def _differences(root: Root, runs: Sequence[str]) -> list[tuple[str, list[str]]]:
    every = [leaves(cast(Document, shown(stored_config(root, run).model_dump(mode="json")))) for run in runs]
    keys = dict.fromkeys(key for one in every for key in one)
    values = {key: [str(one.get(key, "not set")) for one in every] for key in keys}
    return [(key, found) for key, found in values.items() if len(set(found)) > 1]


def _iteration(root: Root, request: Request) -> dict[str, Any]:
    run, iteration = request.path_params["run"], request.path_params["iteration"]
    places = {at for at, _ in names(root, run).newest}
    if iteration not in places:
        there = f"iterations {min(places)} to {max(places)}" if places else "none yet"
        raise InputError(f"run {run!r} has no iteration {iteration}: it has {there}")
    record = read_record(root, run, iteration)
    data = {"record": record, "last": max(places), "troubles": [EXPLANATIONS[one] for one in record.troubles]}
    if Stage.ROLLOUT not in record.done:
        return {**data, "commands": [], "groups": [], "histograms": [], "extremes": (), "more": 0}
    found = reading.read_all(root, run, iteration)
    every = reading.groups(found)
    return {
        **data,
        "commands": _again(run, record, root),
        "groups": every[:_GROUPS],
        "more": max(len(every) - _GROUPS, 0),
        "histograms": reading.distributions(found, iteration),
        "extremes": read_chosen(root, run, iteration, Choice(best=_EXTREMES, worst=_EXTREMES)).samples,
    }


def _again(run: str, record: IterationRecord, root: Root) -> list[str]:
    tail = ["--reason=TEXT", f"--root={shown_text(root.url)}"]
    return [shlex.join(["ratchet", "rerun", f"{run}@{record.iteration}:{one}", *tail]) for one in record.done]


def _group(root: Root, request: Request) -> dict[str, Any]:
    run, iteration = request.path_params["run"], request.path_params["iteration"]
    prompt = request.query_params.get("prompt", "")
    return {"prompt_id": prompt, "samples": read_chosen(root, run, iteration, Choice(prompt=prompt)).samples}


def _sample(root: Root, request: Request) -> dict[str, Any]:
    (prompt, sample), begin = _named(request), _number(request, "from", 0) or 0
    color = request.query_params.get("color", "logprob")
    if color not in _COLORS:
        raise InputError(f"color={color!r} is none of {', '.join(_COLORS)}: take one of these")
    run, iteration = request.path_params["run"], request.path_params["iteration"]
    page = reading.token_page(root, run, iteration, prompt, sample, color, begin)
    data = {"prompt_id": prompt, "sample_id": sample, "color": color, "colors": _COLORS, "most": reading.TOKENS}
    return {**data, "page": page}


def _lineage(root: Root, request: Request) -> dict[str, Any]:
    run, iteration, (prompt, sample) = request.path_params["run"], request.path_params["iteration"], _named(request)
    return {"lineage": of_sample(root, WORKFLOW, run, iteration, prompt, sample)}


def _search(columns: Columns, root: Root, request: Request) -> dict[str, Any]:
    run, order = request.path_params["run"], request.query_params.get("order", "stored")
    if order not in ORDERS:
        raise InputError(f"order={order!r} is none of {', '.join(ORDERS)}: take one of these")
    where, first = request.query_params.get("where", ""), _number(request, "first", 1, 1) or 1
    query = Query(run, where, first, _number(request, "last", first), order)
    data = {"query": query, "orders": ORDERS, "columns": OFFERED.names, "shown": SHOWN}
    began = perf_counter()
    try:
        answer, flaw = search(root, query, columns), None
    except InputError as error:
        answer, flaw = None, str(error)
    seconds = perf_counter() - began
    return {**data, "answer": answer, "flaw": flaw, "seconds": seconds, "command_text": query.command(root.url)}
