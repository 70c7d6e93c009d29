"""Ratchet for scripts and notebooks: `import ratchet`, before Prefect and Ray.

Everything here calls the functions behind the command line. Importing it takes a fraction of a second, and no torch,
Ray, vLLM or Megatron: what needs them imports them when it is called. docs/python.md has examples."""

import asyncio
import importlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from flows.cli.launch import RunResult
    from flows.views.evaluations import EvaluationRecord
    from flows.views.history import IterationRecord
    from flows.views.status import RunStatus
    from flows.views.table import Row
    from flows.views.trackers import TrackedRun, Tracker
    from storage.backends.backend import Backend, Stored
    from storage.backends.root import Root, open_root
    from storage.errors import InputError, RatchetError
    from storage.upkeep.verify import Verification
    from tasks.config.document import load_config
    from tasks.config.run import RunConfig
    from tasks.engine.base import BaseEngine, Response
    from tasks.engine.protocol import EngineProtocol, EngineSpec, Sampling
    from tasks.environments.protocol import Environment, ToolError
    from tasks.environments.tools import Tools
    from tasks.export.export import Exported
    from tasks.rewards.sample import Sample
    from tasks.rewards.sandbox import ProgramLimits, Ran, SandboxFailed, run_in_container, run_python
    from trainer_core.objectives.registry import Advantage, Loss
    from trainer_core.objectives.scored import ScoredSamples
    from trainer_core.objectives.tokens import Tokens

__all__ = [
    "Advantage", "Backend", "BaseEngine", "EngineProtocol", "EngineSpec", "Environment", "EvaluationRecord",
    "Exported", "InputError", "IterationRecord", "Loss", "ProgramLimits", "Ran", "RatchetError", "Response", "Root",
    "Row", "Run", "RunConfig", "RunResult", "RunStatus", "Sample", "Sampling", "SandboxFailed", "ScoredSamples",
    "Stored", "Tokens", "ToolError", "Tools", "TrackedRun", "Tracker", "Verification", "evaluate", "export",
    "load_config", "open_root", "retrain", "run_in_container", "run_python", "samples",
]  # fmt: skip

Place = str | os.PathLike[str]
"""A path or an fsspec URL."""

DEFAULT_ROOT = "file://./runs"
"""Storage root of the runs of the working directory."""

_HOMES = {
    "flows.cli.launch": "RunResult",
    "flows.views.evaluations": "EvaluationRecord",
    "flows.views.history": "IterationRecord",
    "flows.views.status": "RunStatus",
    "flows.views.table": "Row",
    "flows.views.trackers": "TrackedRun Tracker",
    "storage.backends.backend": "Backend Stored",
    "storage.backends.root": "Root open_root",
    "storage.errors": "InputError RatchetError",
    "storage.upkeep.verify": "Verification",
    "tasks.config.document": "load_config",
    "tasks.config.run": "RunConfig",
    "tasks.engine.base": "BaseEngine Response",
    "tasks.engine.protocol": "EngineProtocol EngineSpec Sampling",
    "tasks.environments.protocol": "Environment ToolError",
    "tasks.environments.tools": "Tools",
    "tasks.export.export": "Exported",
    "tasks.rewards.sample": "Sample",
    "tasks.rewards.sandbox": "ProgramLimits Ran SandboxFailed run_in_container run_python",
    "trainer_core.objectives.registry": "Advantage Loss",
    "trainer_core.objectives.scored": "ScoredSamples",
    "trainer_core.objectives.tokens": "Tokens",
}
"""Names that are imported on their first use, by module."""

_LAZY = {name: module for module, names in _HOMES.items() for name in names.split()}

_PACKAGES = ("flows", "tasks", "trainer_core", "storage")


@dataclass(frozen=True)
class Run:
    """A run below a storage root, which need not exist yet."""

    name: str
    """Id of the run."""
    root: Place = DEFAULT_ROOT
    """Storage root: a folder, or a URL as `--root` takes it."""

    def train(
        self,
        config: "Place | RunConfig | Mapping[str, Any] | None" = None,
        *,
        settings: Sequence[str] = (),
        iterations: int | None = None,
    ) -> "RunResult":
        """Start the run, or go on where it ended, and wait until it is complete, as `ratchet run` does.

        `config` is the path or URL of a TOML file, a configuration, or its tables; None takes the recorded
        configuration. Each of `settings`, `section.key=value`, replaces one of it, and `iterations`, the total number,
        replaces `run.iterations`. Raises RatchetError with the reason for which the run cannot start, or stopped;
        another call goes on."""
        from flows.cli.check import of_stored

        more = [*_texts(settings), *([] if iterations is None else [f"run.iterations={iterations}"])]
        if config is None:
            return _drive(self, of_stored(self.name, None, more, self._opened()))
        return _drive(self, _configured(config, more))

    def status(self) -> "RunStatus":
        """State of the run, with every iteration, from storage alone, as `ratchet status --all` shows it."""
        from flows.views.status import read_status

        return read_status(self._opened(), self.name, whole=True)

    def iterations(self) -> "tuple[IterationRecord, ...]":
        """The iterations that have begun, with their figures; iteration 0 is the preparation."""
        return self.status().history

    def curves(self) -> "pa.Table":
        """All metrics as a table: a row for each iteration, the columns of metrics.csv."""
        import pyarrow as pa

        from flows.views.table import columns_of

        rows = [record.row for record in self.iterations()]
        fixed = {"iteration": [row.iteration for row in rows], "finished": [row.finished for row in rows]}
        cells = {name: [row.values.get(name, row.texts.get(name)) for row in rows] for name in columns_of(rows)}
        return pa.table({**fixed, **cells})

    def samples(self, iterations: int | Collection[int] | None = None, *, texts: bool = True) -> "pa.Table":
        """Samples with their scores, a row each; see `samples`."""
        return samples(self.name, root=self.root, iterations=iterations, texts=texts)

    def evaluate(self, at: int | str | None = None, **settings: Any) -> "EvaluationRecord":
        """Evaluate the weights of iteration `at`, a number or `best`; see `evaluate`."""
        return evaluate(self._at(at), root=self.root, **settings)

    def export(self, to: Place, at: int | str | None = None, **settings: Any) -> "Exported":
        """Write the weights of iteration `at`, a number or `best`, as a Hugging Face folder; see `export`."""
        return export(self._at(at), to, root=self.root, **settings)

    def verify(self) -> "Verification":
        """Hash everything that the run has stored again, as `ratchet verify` does."""
        from storage.upkeep.verify import verify

        return verify(self._opened(), self.name)

    def _opened(self) -> "Root":
        return _opened(self.root)

    def _at(self, at: int | str | None) -> str:
        return self.name if at is None else f"{self.name}@{at}"


def samples(
    run: str,
    *,
    root: Place = DEFAULT_ROOT,
    iterations: int | Collection[int] | None = None,
    revision: int | None = None,
    texts: bool = True,
) -> "pa.Table":
    """The samples of a run with their scores, a row each, as an Arrow table; by default of all iterations that have
    sampled, in the head revision. The columns of prompts and responses are null without `texts`, and where the run
    stores no prompts, as an imported one. Raises InputError if there is no such run, or one of the iterations has no
    samples."""
    from flows.views.samples import scored_samples

    asked = None if iterations is None else _each(iterations)
    return scored_samples(_opened(root).url, run, asked, revision=revision, texts=texts)


def retrain(
    run: str,
    start: str | None = None,
    select: str | Sequence[str] = (),
    *,
    root: Place = DEFAULT_ROOT,
    config: Place | None = None,
    settings: Sequence[str] = (),
    **table: Any,
) -> "RunResult":
    """Train a new run on stored samples, or go on with it, as `ratchet retrain` does.

    `start` is the state to begin with, as `[ROOT//]RUN[@ITERATION]`, and each of `select` names samples, as
    `[ROOT//]RUN[@FROM-TO]`. `config` is the path or URL of a TOML file with what differs from the run to begin from;
    `settings`, each `section.key=value`, replace all others. `table` takes the other keys of `[retrain]`: `where`,
    `limit`, `deduplicate`, `rescore`, `samples`, `epochs`, `since`. Raises RatchetError as `Run.train` does."""
    store = _opened(root)
    given: dict[str, Any] = {**table, **({"select": _each(select)} if select else {})}
    with _with_extra():
        from flows.preflight import begin_on_samples
        from tasks.forking import retrain_config, start_of

        if start is not None:
            given["start"] = start_of(store, run, start)
        resolved = retrain_config(store, run, given, None if config is None else os.fspath(config), settings)
        begin_on_samples(run, store, resolved)
    return _drive(Run(run, root), resolved)


def evaluate(which: str, *, root: Place = DEFAULT_ROOT, **settings: Any) -> "EvaluationRecord":
    """Evaluate stored weights and store the result with the run, as `ratchet evaluate` does.

    `which` is RUN for its last iteration, RUN@ITERATION, or RUN@best; `settings` are fields of
    `tasks.config.evaluation.EvaluationSettings`: `samples`, `temperature`, `prompts`, ... Raises InputError if there
    are no such weights, or a setting cannot be used."""
    from flows.views.output import Output
    from tasks.config.evaluation import EvaluationSettings
    from tasks.config.section import settings_of

    asked = settings_of(EvaluationSettings, settings, "an evaluation")
    with _with_extra():
        from flows.evaluating import evaluate_weights

        return evaluate_weights(_opened(root).url, which, asked, Output().say)


def export(which: str, to: Place, *, root: Place = DEFAULT_ROOT, **settings: Any) -> "Exported":
    """Write a trained model as a Hugging Face folder, as `ratchet export` does.

    `which` is RUN for its last iteration, RUN@ITERATION, or RUN@best; `to` is the new folder, a local path or an fsspec
    URL. `settings` are fields of `tasks.export.order.ExportSettings`: `precision`, by default that of the trained
    state, `adapter` or `critic`. Raises InputError if there is no such state, the folder exists, or a setting cannot be
    used."""
    from tasks.config.section import settings_of
    from tasks.export.order import ExportFolder, ExportSettings, choose

    asked, store = settings_of(ExportSettings, settings, "an export"), _opened(root)
    chosen, target = choose(store, which), ExportFolder.new(os.fspath(to))
    with _with_extra():
        from tasks.export.export import export_as

        return export_as(store, chosen, target, asked)


def main() -> None:
    """Run the command line, which ends the process."""
    if (flaw := _shadowed()) is not None:
        sys.stderr.write(f"ratchet: {flaw}\n")
        sys.exit(2)
    from flows.__main__ import main as command

    command()


def _texts(settings: Sequence[str]) -> list[str]:
    from storage.errors import InputError

    if wrong := [one for one in _each(settings) if not isinstance(one, str)]:
        raise InputError(f"settings has {wrong[0]!r}: give texts of the form section.key=value")
    return _each(settings)


def _each[T](given: Iterable[T] | T) -> list[T]:
    """The values of a collection; of a single one, such as a text, itself."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]  # pyright: ignore[reportReturnType] - T


def _opened(root: Place) -> "Root":
    from storage.backends.root import open_root
    from tasks.config.credentials import check_root_url

    check_root_url(os.fspath(root))
    return open_root(os.fspath(root))


def _configured(config: "Place | RunConfig | Mapping[str, Any]", settings: Sequence[str]) -> "RunConfig":
    from storage.errors import InputError
    from tasks.config.document import completed, load_config
    from tasks.config.run import RunConfig

    if isinstance(config, str | os.PathLike):
        return load_config(config, settings)
    if not isinstance(config, RunConfig | Mapping):
        fact = f"the configuration is of the type {type(config).__name__}"
        raise InputError(f"{fact}: give a path, a RunConfig or its tables")
    tables = config.model_dump(mode="json") if isinstance(config, RunConfig) else deepcopy(dict(config))
    return completed(tables, settings, None, "given to Run.train")


def _drive(run: Run, config: "RunConfig") -> "RunResult":
    with _with_extra():
        from flows.cli.launch import Order, drive
        from flows.run import ready
        from flows.views.output import Output

        again = f"Run({run.name!r}, {run.root!r}).train()"
        root = ready(run.name, os.fspath(run.root), config)
        return drive(Order(config, run.name, root.url, again), root, Output().say)[1]


@contextmanager
def _with_extra() -> Iterator[None]:
    """Run what needs the extra [cpu] or [gpu]; a module that is missing is an InputError with the repair.

    The event loop of a notebook is hidden for the duration of the call, which blocks it: within a loop, Prefect's
    functions return coroutines, which nobody would await."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    except ModuleNotFoundError as error:
        from flows.cli.mistakes import missing_extra

        raise missing_extra(error) from None
    finally:
        asyncio._set_running_loop(loop)


def _shadowed() -> str | None:
    """The reason for which one of our packages cannot be imported: a file of the user has its name."""
    here = Path(__file__).resolve().parent
    for name in _PACKAGES:
        ours = here / name / "__init__.py"
        module = sys.modules.get(name)
        spec = find_spec(name) if module is None else module.__spec__
        found = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        if found is None or Path(found).resolve() != ours:
            return f"`import {name}` gives {found}, but Ratchet needs {ours}: rename that file or folder, or move it"
    return None


if not TYPE_CHECKING:  # a type checker refuses names that are not there

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'ratchet' has no attribute {name!r}: it has {', '.join(__all__)}")
        value = vars(importlib.import_module(_LAZY[name]))[name]
        globals()[name] = value
        return value


def __dir__() -> Sequence[str]:
    return __all__


if (_flaw := _shadowed()) is None:
    from tasks.config.environment import prepare_process

    prepare_process(offline=False)
elif Path(sys.argv[0]).stem != "ratchet":  # the command says it without a traceback
    raise ImportError(_flaw)

if __name__ == "__main__":
    main()
