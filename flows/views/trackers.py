"""The table of metrics in Weights & Biases and in MLflow. A run that is continued continues the same run there."""

import functools
import importlib.util
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import JsonValue

from flows.views.table import Row
from storage import layout
from storage.backends.root import Root
from storage.digest import value_digest
from storage.errors import InputError, NotCommitted
from storage.manifest import need
from storage.revisions import read_revisions
from tasks.config.credentials import shown
from tasks.config.environment import resolve
from tasks.config.report import ReportSection
from tasks.config.run import RunConfig
from tasks.stages.names import Stage

_PROJECT = "ratchet"
_ID, _NEXT = "ratchet.id", "ratchet.next"
_TEXT = 500  # characters of a parameter: MLflow's own limit in its older stores
_AT_ONCE = 100  # parameters
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")


class Tracker(Protocol):
    """Where a run's rows are sent."""

    def begin(self) -> int:
        """Connect; returns the first iteration that is not there yet."""
        ...

    def log(self, row: Row) -> None:
        """Send one row. The same row again changes nothing."""
        ...

    def end(self, complete: bool) -> None:
        """Say that no more will come from this process, and whether the run is complete."""
        ...


def check_trackers(section: ReportSection) -> None:
    """Refuse what cannot be used, before anything starts.

    Raises:
        InputError: a package is not installed, or a reference names a variable that is not set.
    """
    for name, asked in (("wandb", section.wandb), ("mlflow", section.mlflow)):
        if asked and importlib.util.find_spec(name) is None:
            raise InputError(f"report.{name} needs the package {name}: install 'ratchet[{name}]', or remove the key")
    resolve(section.mlflow, "report.mlflow")


def trackers(root: Root, run: str, config: RunConfig) -> dict[str, Tracker]:
    """Those that the configuration asks for, by name; none of them is connected yet."""
    made: dict[str, Tracker] = {}
    if config.report.wandb:
        project = config.report.wandb if isinstance(config.report.wandb, str) else _PROJECT
        made["wandb"] = WandbTracker(root, run, config, project)
    if config.report.mlflow:
        made["mlflow"] = MlflowTracker(root, run, config, str(resolve(config.report.mlflow, "report.mlflow")))
    return made


def identity(root: Root, run: str) -> str:
    """What the run is called in a tracker: the same for each process that drives it, another for each other run.

    A revision is a run of its own there, because a tracker does not take back what it was sent.
    """
    prepared, head = need(root, run, 0, Stage.PREPARE), read_revisions(root, run).head
    return value_digest([run, prepared.digest, prepared.started.isoformat(), *([head] if head else [])])[:20]


def title(root: Root, run: str) -> str:
    """What people see there."""
    head = read_revisions(root, run).head
    return f"{run}, revision {head}" if head else run


class WandbTracker:
    """A run of Weights & Biases. Without a network (WANDB_MODE=offline) a note below the run says how far it is."""

    def __init__(self, root: Root, run: str, config: RunConfig, project: str) -> None:
        self._root, self._name, self._project = root, run, project
        self._config = _settings(config)
        self._key = layout.report_key(run, "wandb.json")

    def begin(self) -> int:
        """See `Tracker`."""
        import wandb

        self._id = identity(self._root, self._name)
        self._run = wandb.init(
            project=self._project,
            id=self._id,
            name=title(self._root, self._name),
            resume="allow",
            config=dict(self._config),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        return self._noted() if self._run.offline else self._run.step

    def log(self, row: Row) -> None:
        """See `Tracker`."""
        self._run.log(row.values, step=row.iteration)
        if self._run.offline:
            self._root.replace(self._key, json.dumps({"id": self._id, "next": row.iteration + 1}).encode())

    def end(self, complete: bool) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=0 if complete else 1)

    def _noted(self) -> int:
        try:
            note = json.loads(self._root.read_bytes(self._key))
        except (NotCommitted, ValueError):
            return 0
        return note["next"] if note["id"] == self._id else 0


class MlflowTracker:
    """A run of MLflow. How far it is is a tag of that run, written along with the metrics."""

    def __init__(self, root: Root, run: str, config: RunConfig, uri: str) -> None:
        self._root, self._name, self._uri = root, run, uri
        self._config = _settings(config)

    @functools.cached_property
    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self._uri)

    def begin(self) -> int:
        """See `Tracker`."""
        mine, experiment = identity(self._root, self._name), self._experiment()
        found = self._client.search_runs([experiment], f"tags.`{_ID}` = '{mine}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return int(found[0].data.tags.get(_NEXT, 0))
        self._run = self._client.create_run(
            experiment, run_name=title(self._root, self._name), tags={_ID: mine}
        ).info.run_id
        self._describe()
        return 0

    def log(self, row: Row) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric, RunTag

        moment = round(row.finished.timestamp() * 1000)
        metrics = [Metric(_name(key), value, moment, row.iteration) for key, value in row.values.items()]
        self._client.log_batch(self._run, metrics=metrics, tags=[RunTag(_NEXT, str(row.iteration + 1))])

    def end(self, complete: bool) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._run, "FINISHED" if complete else "KILLED")

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(_PROJECT)
        return found.experiment_id if found is not None else self._client.create_experiment(_PROJECT)

    def _describe(self) -> None:
        from mlflow.entities import Param

        given = [Param(_name(key), str(value)[:_TEXT]) for key, value in self._config.items()]
        for start in range(0, len(given), _AT_ONCE):
            self._client.log_batch(self._run, params=given[start : start + _AT_ONCE])


def _settings(config: RunConfig) -> dict[str, JsonValue]:
    """What decides the run's result, by section.key; secrets are masked."""
    return dict(_leaves(shown(config.meaning())))


def _leaves(value: JsonValue, prefix: str = "") -> Sequence[tuple[str, JsonValue]]:
    if not isinstance(value, dict) or not value:
        return [(prefix, value)]
    return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{prefix}.{key}" if prefix else key)]


def _name(key: str) -> str:
    return _NOT_IN_NAMES.sub("_", key)
