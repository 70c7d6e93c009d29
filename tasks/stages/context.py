"""The context of a run's stages: its storage, configuration, workers and observers; and further attempts at a stage."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from storage.backends.root import Root
from storage.errors import RatchetError, StorageInterrupted, WorkerLost
from storage.manifest import Fence, Manifest, find, need
from storage.revisions import FIRST, Revisions
from storage.write_behind import WriteBehind
from tasks.config.identity import Document, settings_digest
from tasks.config.run import RunConfig
from tasks.rewards.engine_judge import Questions
from tasks.stages.names import Stage
from tasks.stages.views import Performed, View
from tasks.workers.folders import Folders
from tasks.workers.interface import GroupHandle, Workers

_WORTH_A_LINE_S = 2.0

Performer = Callable[[Stage, int, Callable[[], Performed], tuple[View, ...]], View]
"""Does the work of a stage where people see it, given stage, iteration, work and inputs; raises what work raises."""

Tries = Callable[[str, int], AbstractContextManager[object, bool | None]]
"""Entered for each attempt at a stage (name, iteration); an error that it swallows is worth another one."""
BACK_OFF_S = (1.0, 10.0, 60.0)
"""Pauses before the second, third and every later attempt: memory pressure, for example, may pass."""


def directly(_stage: Stage, _iteration: int, work: Callable[[], Performed], _inputs: tuple[View, ...]) -> View:
    """Do the work in place, unseen."""
    return work().view


@dataclass(frozen=True)
class Portion:
    """Progress within a stage."""

    iteration: int
    stage: Stage
    done: int
    of: int
    unit: str  # unit of the count: samples, micro-batches
    tokens: int = 0  # tokens of what is done so far in this attempt
    seconds: float = 0.0  # duration so far
    note: str = ""  # more about it: loss 0.5
    left_s: float | None = None  # seconds until it is done, at the pace so far


class Page:
    """A run's page for people, here without any. Methods do not wait long, and raise nothing that would end the run."""

    def iteration(self, number: int) -> AbstractContextManager[object]:
        """Encloses the stages of an iteration."""
        return nullcontext()

    def storing(self, iteration: int, what: str, published: Future[None]) -> None:
        """`published` is done once the result of the stage `what`, or something else behind the stages, is durable."""

    def advanced(self, portion: Portion) -> None:
        """Report progress within a stage. Called as often as anything is; may be called in any thread."""


@dataclass
class Starts:
    """Time that this process has waited for the start of others; stages do not count it as theirs."""

    seconds: float = 0.0


@dataclass(frozen=True)
class RunContext:
    """Passed to every stage along with the manifests. It holds no result of a stage."""

    run: str
    root: Root
    config: RunConfig
    config_digest: str
    """Identity of the configuration under which the run was recorded; every manifest of the run carries it."""
    workers: Workers
    scratch: Path  # local folder for files in transit; on a cluster at the same path on each host
    fence: Fence | None = None  # the lease under which this process drives the run; a commit without it is refused
    outbox: WriteBehind = field(default_factory=WriteBehind)
    """Jobs that are done behind the stages: storing and publishing."""
    performer: Performer = directly  # runs stages: as Prefect tasks in a flow, else directly
    tries: Tries = lambda _stage, _iteration: nullcontext()  # decides which failed stages are tried again
    starts: Starts = field(default_factory=Starts)  # time that was spent on starts
    announce: Callable[[int, Stage], object] = lambda _iteration, _stage: None  # called before each stage
    memory: Path | None = None
    """Folder in shared memory for the state that is being stored; else, or without room, `scratch` is used."""
    say: Callable[[str], object] = lambda _text: None  # tells people one line
    page: Page = field(default_factory=Page)  # the run's page for people
    turn: AbstractContextManager[object] = field(default_factory=threading.RLock)
    """Held by the stage that uses the trainer ranks: a rollout may run beside it."""
    beside: bool = False  # True for a rollout beside a training, which uses the ranks
    sampling: Callable[[], object] = lambda: None  # called when the engines of a rollout hold its weights
    go_on: Callable[[], None] = lambda: None  # called while a rollout samples; raises if it is to end
    revisions: Revisions = FIRST  # the run's revisions, seen from the one that is worked on
    folders: Folders = field(default_factory=Folders)  # folders that ranks and engines read and write
    questions: Questions = field(default_factory=Questions)  # to the engine that judges
    documents: Mapping[str, Document] = field(default_factory=dict)
    """Configurations of the run's revisions, by digest, if they differ."""

    def reads_the_same(self, stage: Stage, config_digest: str) -> bool:
        """True if a stage under another configuration read the same settings that it would read now."""
        if config_digest == self.config_digest:
            return True
        if (there := self.documents.get(config_digest)) is None:
            return False
        return settings_digest(there, stage) == settings_digest(self.documents[self.config_digest], stage)

    def find(self, iteration: int, stage: Stage) -> Manifest | None:
        """A stage's manifest in the revision that is worked on, or None if the stage did not happen."""
        return find(self.root, self.run, iteration, stage, self.revisions)

    def need(self, iteration: int, stage: Stage) -> Manifest:
        """Like `find`, for a stage that must have happened; raises NotCommitted if it did not."""
        return need(self.root, self.run, iteration, stage, self.revisions)


def await_start(context: RunContext, handle: GroupHandle, what: str, answer: Callable[[], object]) -> None:
    """Wait until processes that were just started answer; report a start that took seconds. The time counts as start,
    not as that of the stage that asks first."""
    if handle.awaited:
        return
    clock = time.monotonic()
    answer()
    handle.awaited = True
    took = time.monotonic() - clock
    context.starts.seconds += took
    if took >= _WORTH_A_LINE_S:
        context.say(f"started {what} in {took:.0f} s")


def persistent(context: RunContext, say: Callable[[str], object]) -> RunContext:
    """A context whose stages are tried again, at most `run.retries` times each, after a process was lost. Jobs behind
    the stages are repeated as often, also after an outage of the store that outlasts the run's patience. A stage is
    tried again only after `WorkerLost`: bad input, rewards, numerics and a store that refuses would fail the same way.
    Surviving processes are kept, `Workers` replace the dead ones, and the stage continues from the pieces that its
    previous attempt stored. `say` shows a line to people."""
    context.outbox.repeat(partial(_stored_again, context.config.run.retries, say))
    return replace(context, tries=lambda stage, iteration: _Tries(context, say, stage, iteration))


def _stored_again(retries: int, say: Callable[[str], object], error: RatchetError, attempts: int) -> float | None:
    """Seconds until a failed job behind the stages is repeated; None if it is not. Its input was written before."""
    if attempts > retries or not isinstance(error, WorkerLost | StorageInterrupted):
        return None
    wait = _wait(attempts)
    say(f"storing behind the stages: {error}. Attempt {attempts + 1} of {retries + 1} begins in {wait:g} s")
    return wait


def _wait(attempts: int) -> float:
    return BACK_OFF_S[min(attempts, len(BACK_OFF_S)) - 1]


@dataclass
class _Tries:
    context: RunContext
    say: Callable[[str], object]
    stage: str
    iteration: int
    failed: int = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        retries = self.context.config.run.retries
        if not isinstance(error, WorkerLost) or self.failed >= retries:
            return False
        self.failed += 1
        wait = _wait(self.failed)
        self.say(
            f"{self.stage} of iteration {self.iteration}: {error}. "
            f"Attempt {self.failed + 1} of {retries + 1} begins in {wait:g} s"
        )
        time.sleep(wait)
        self.context.outbox.settle()  # a result that was handed over before the process was lost counts once stored
        return True
