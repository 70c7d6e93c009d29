"""The room a run works in: where it is stored, what it is made from, who computes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from storage import layout
from storage.errors import InputError, NotCommitted
from storage.ids import Stage, check_run_name
from storage.manifest import Fence, Manifest
from storage.outbox import Outbox
from storage.parts import PartWriter
from storage.root import Root, open_root
from tasks.config import RunConfig, changed_meaning
from tasks.fleet import Fleet
from tasks.stage import StageOutput, StageResult, run_stage


@dataclass(frozen=True)
class RunContext:
    """Handed to every stage beside the manifests. It holds no result of a stage."""

    run: str
    root: Root
    config: RunConfig
    fleet: Fleet
    scratch: Path
    fence: Fence | None = None
    """The lease under which this process drives the run; a commit without it is refused."""
    outbox: Outbox = field(default_factory=Outbox)
    """What is stored and published behind the stages."""

    def stage(
        self, iteration: int, stage: Stage, inputs: Mapping[str, Manifest], body: Callable[[PartWriter], StageOutput]
    ) -> StageResult:
        """Do a stage of this run, or return what is committed; `body` is given where to put its parts."""
        writer = PartWriter(self.root, self.run, iteration, stage)
        return run_stage(writer, self.config.digest, inputs, lambda: body(writer), self.fence, self.outbox)


def open_run(config: RunConfig, root_url: str, run: str | None = None) -> tuple[Root, str]:
    """Open the storage of a run and record what it is made from, or check that it is continued unchanged.

    Returns:
        The root and the run's id.

    Raises:
        InputError: no id is given, or the run exists and was started with another meaning.
        StorageUnavailable: the root cannot be written.
    """
    name = run or config.run.name
    if name is None:
        raise InputError("the run has no id: set run.name in the configuration or give --run NAME")
    check_run_name(name)
    root = open_root(root_url)
    root.check_writable()
    _record(root, name, config)
    return root, name


def stored_config(root: Root, run: str) -> RunConfig:
    """The configuration a run was started with.

    Raises:
        InputError: there is no such run.
    """
    try:
        return RunConfig.model_validate_json(root.read_bytes(layout.run_config_key(run)))
    except NotCommitted:
        raise InputError(f"there is no run {run!r} in {root.url}: check --root and the name") from None


def _record(root: Root, run: str, config: RunConfig) -> None:
    document = json.dumps(config.model_dump(mode="json"), indent=1).encode()
    if root.put_if_absent(layout.run_config_key(run), document):
        return
    stored = stored_config(root, run)
    if stored.digest != config.digest:
        lines = "\n".join(f"  {line}" for line in changed_meaning(stored.meaning(), config.meaning()))
        raise InputError(
            f"run {run!r} exists in {root.url} and was started with another meaning:\n{lines}\n"
            "Continue it with its own configuration, or start a new run with another --run"
        )
