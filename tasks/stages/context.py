"""The room a run works in: where it is stored, what it is made from, who computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.ids import check_run_name
from storage.manifest import Fence, Manifest
from storage.parts import PartWriter
from storage.write_behind import Outbox
from tasks.config.run import RunConfig
from tasks.config.stored import record_config
from tasks.stages.names import Stage
from tasks.stages.stage import StageOutput, StageResult, run_stage
from tasks.workers.fleet import Fleet


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
    record_config(root, name, config)
    return root, name
