"""The tracker door: services and files that receive the rows of a run. A continued run continues the same run there."""

import functools
import importlib.util
import inspect
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from pydantic import JsonValue

from flows.views.table import Row
from storage import layout
from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import InputError, NotCommitted, user_line
from storage.functions import mismatch, refuses
from storage.manifest import need
from storage.revisions import read_revisions
from tasks.config.credentials import shown
from tasks.config.environment import resolve
from tasks.config.identity import Document, leaves
from tasks.config.report import ReportSection
from tasks.config.stored import stored_config
from tasks.stages.names import Stage
from trainer_core.user_code import UserFunction, find_function

_GROUP, _KEY = "ratchet.trackers", "report.trackers"
_PROJECT = "ratchet"
_ID, _NEXT = "ratchet.id", "ratchet.next"
_TEXT = 500  # characters of a parameter: MLflow's own limit in its older stores
_AT_ONCE = 100  # parameters
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
_NEEDED = {"begin": "the run", "log": "a row", "end": "True or False"}


@dataclass(frozen=True)
class TrackedRun:
    root: Root
    name: str
    tracker: str  # name of the tracker, below which its position is stored

    @functools.cached_property
    def identity(self) -> str:
        """Identity of the run, the same for every process that drives it.

        A revision counts as a run of its own, because a tracker does not take back rows."""
        prepared, head = need(self.root, self.name, 0, Stage.PREPARE), self._head
        return value_digest([self.name, prepared.digest, prepared.started.isoformat(), *([head] if head else [])])[:20]

    @functools.cached_property
    def title(self) -> str:
        return f"{self.name}, revision {self._head}" if self._head else self.name

    @functools.cached_property
    def settings(self) -> dict[str, JsonValue]:
        """The settings that decide the run's result, by section.key; secrets are masked."""
        return leaves(cast(Document, shown(stored_config(self.root, self.name).meaning())))

    def position(self) -> int:
        """First iteration that this tracker was not sent, as `remember` has stored it; 0 for another identity."""
        try:
            note = json.loads(self.root.read_bytes(self._key))
        except (NotCommitted, ValueError):
            return 0
        return note["next"] if note["id"] == self.identity else 0

    def remember(self, position: int) -> None:
        """Store the first iteration that this tracker was not sent: for trackers that cannot be asked."""
        self.root.replace(self._key, json.dumps({"id": self.identity, "next": position}).encode())

    @functools.cached_property
    def _head(self) -> int:
        return read_revisions(self.root, self.name).head

    @property
    def _key(self) -> str:
        return layout.report_key(self.name, f"{re.sub('[^a-z0-9]+', '-', self.tracker.lower()).strip('-')}.json")


class Tracker(Protocol):
    """A receiver of rows. It is called in a thread of its own, which the run does not wait for."""

    def begin(self, run: TrackedRun) -> int: ...

    def log(self, row: Row) -> None:
        """Store the values of one iteration by the names of their curves. The same row again must change nothing."""

    def end(self, complete: bool) -> None:
        """Close the connection of this process; `complete` is true if the run has all its iterations."""


Makes = Callable[[], Tracker]


def trackers(section: ReportSection) -> dict[str, Makes]:
    """The trackers that the configuration asks for, by name; none is made or connected yet."""
    made: dict[str, Makes] = {}
    if section.wandb:
        made["wandb"] = functools.partial(WandbTracker, section.wandb if isinstance(section.wandb, str) else _PROJECT)
    if section.mlflow:
        made["mlflow"] = functools.partial(MlflowTracker, str(resolve(section.mlflow, "report.mlflow")))
    for name in section.trackers:
        target = find_function(name, _KEY, _GROUP)
        made[target.name] = lambda target=target: target.load().function()
    return made


def check_trackers(section: ReportSection) -> None:
    """Refuse unusable trackers before anything starts; a user's one is imported, but not made. Raises InputError if a
    package is missing, a reference names no variable, or a user's tracker cannot be imported or lacks a method."""
    packages = (("wandb", section.wandb, "wandb"), ("mlflow", section.mlflow, "mlflow-skinny"))
    for name, asked, package in packages:
        if asked and importlib.util.find_spec(name) is None:
            raise InputError(f"report.{name} needs the package {name}: `pip install {package}`, or remove the key")
    resolve(section.mlflow, "report.mlflow")
    for name in section.trackers:
        _check(find_function(name, _KEY, _GROUP))


def _check(target: UserFunction) -> None:
    try:
        found = target.load().function
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}{user_line(error)}"
        fact = f"{_KEY} {target.name!r} cannot be imported: {why}"
        raise InputError(f"{fact}. Correct the file, or remove the key") from error
    place = f"{_KEY} {target.name!r} ({target.place})"
    if not callable(found) or refuses(found):
        raise InputError(f"{place} cannot be called without arguments: name a class of a tracker, or a function")
    for method, given in _NEEDED.items() if isinstance(found, type) else ():
        function = inspect.getattr_static(found, method, None)
        if not inspect.isfunction(function):
            raise InputError(f"{place}: a tracker needs a method {method}(self, x), which is given {given}")
        if (head := mismatch(function, None, None)) is not None:
            line = f"line {function.__code__.co_firstlineno}, has {head}"
            raise InputError(f"{place}, {line}: a tracker needs a method {method}(self, x), which is given {given}")


class WandbTracker:
    """A run of Weights & Biases. Offline (WANDB_MODE=offline) the position is stored with the run."""

    def __init__(self, project: str) -> None:
        self._project = project

    def begin(self, run: TrackedRun) -> int:
        import wandb

        self._tracked = run
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
        self._run = wandb.init(
            project=self._project, id=run.identity, name=run.title, resume="allow", config=dict(run.settings),
            settings=settings,
        )  # fmt: skip
        return run.position() if self._run.offline else self._run.step

    def log(self, row: Row) -> None:
        self._run.log(row.values, step=row.iteration)
        if self._run.offline:
            self._tracked.remember(row.iteration + 1)

    def end(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


class MlflowTracker:
    """A run of MLflow. Its position is a tag of that run, written along with the metrics."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    @functools.cached_property
    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self._uri)

    def begin(self, run: TrackedRun) -> int:
        from mlflow.entities import Param

        there = self._client.get_experiment_by_name(_PROJECT)
        experiment = there.experiment_id if there is not None else self._client.create_experiment(_PROJECT)
        found = self._client.search_runs([experiment], f"tags.`{_ID}` = '{run.identity}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return int(found[0].data.tags.get(_NEXT, 0))
        self._run = self._client.create_run(experiment, run_name=run.title, tags={_ID: run.identity}).info.run_id
        given = [Param(_name(key), str(value)[:_TEXT]) for key, value in run.settings.items()]
        for some in itertools.batched(given, _AT_ONCE):
            self._client.log_batch(self._run, params=list(some))
        return 0

    def log(self, row: Row) -> None:
        from mlflow.entities import Metric, RunTag

        moment = round(row.finished.timestamp() * 1000)
        metrics = [Metric(_name(key), value, moment, row.iteration) for key, value in row.values.items()]
        self._client.log_batch(self._run, metrics=metrics, tags=[RunTag(_NEXT, str(row.iteration + 1))])

    def end(self, complete: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if complete else "KILLED")


def _name(key: str) -> str:
    return _NOT_IN_NAMES.sub("_", key)
