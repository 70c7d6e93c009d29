"""A run in Prefect's UI: its stages are task runs, its iterations are subflow runs. Stages themselves use no Prefect.

Prefect's result cache stays off. Its key would be made from inputs that do not name the iteration, and a hit would skip
a stage silently; the manifest alone decides whether a stage is done.

An iteration's subflow lives in a thread of its own until everything of the iteration is durable, while the next one
computes. The stages run in the main thread, in the subflow's context. Nothing here is waited for long: without a server
the stages are task runs of the run's own flow run."""

import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any
from uuid import UUID

import httpx
from prefect import Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, PrefectException
from prefect.states import Cancelled, Completed, Failed

from flows.views.artifacts import this_flow_run
from storage.errors import RatchetError
from tasks.config.environment import without_secrets
from tasks.stages.context import Portion
from tasks.stages.names import Stage
from tasks.stages.views import Performed, View

REUSED = "Completed (reused)"  # state of a task run whose stage was committed before

COMPUTED = "Computed"
"""State of a task run whose stage is done, but waits for a train state to be stored before it is published."""

Elsewhere = Callable[[BaseException], bool]  # True for an error that another task run shows

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0  # longest wait of an iteration for its subflow. It begins without one after that.

_AGAIN_S = 60.0  # how long later iterations then do not try
_SHORT_S = 1.0
_LOOK_S = 5.0
_ANSWER_S = 15.0
_LINGER_S = 10.0
_INTERRUPTED_S = 2.0

_SERVER_ERRORS = (httpx.HTTPError, PrefectException, OSError)


def as_task(stage: Stage, iteration: int, work: Callable[[], Performed], inputs: tuple[View, ...]) -> View:
    """Do the work of a stage in a Prefect task of the current flow run. A `Performer`."""
    return outcome(stage_task(stage)(iteration, work, inputs, lambda _error: False))  # each error is its own


def stage_task(stage: Stage) -> Callable[..., State[Any]]:
    """The Prefect task of a stage: called with iteration, work, inputs and an `Elsewhere`, it returns the final state.

    The task run is `Failed` if the work raises. After an error of a task run elsewhere it is `Cancelled`, so that the
    one that failed is the red one."""
    return functools.partial(_task(stage.value, _perform), return_state=True)


def outcome(state: State[Any]) -> View:
    """The view that the work of a stage has returned; raises what it raised."""
    if state.is_cancelled() and isinstance(state.data, RatchetError):
        raise state.data
    return state.result()


def show_storing(iteration: int, what: str, published: "Future[None]") -> "State[Any]":
    """A task run that runs until a computed result is durable; it fails, with the reason, if the result is not stored.
    `what` is the stage whose result it is, or what else is done behind the stages."""
    name = "store" if what == Stage.TRAIN else f"publish-{what}" if what in set(Stage) else what
    return _task(name, _wait)(iteration, published, return_state=True)


@functools.cache
def _task(name: str, body: Callable[..., Any]) -> "Task[..., Any]":
    # no tags: Prefect asks the server for a concurrency slot per tag, which costs two seconds a stage
    return task(name=name, task_run_name=f"{name}-{{iteration}}", cache_policy=NO_CACHE, persist_result=False)(body)


def _perform(
    iteration: int, work: Callable[[], Performed], inputs: tuple[View, ...], elsewhere: Elsewhere
) -> State[Any]:
    # `inputs` draws the arrows of the flow run's graph; `work` already holds them, along with the context, which
    # Prefect must not search for futures
    try:
        performed = work()
    except RatchetError as error:
        if not elsewhere(error):
            raise
        return Cancelled(message=f"stopped, because storing failed: {without_secrets(str(error))}", data=error)
    manifest = performed.view.manifest
    name = COMPUTED if performed.pending else REUSED if performed.reused else "Completed"
    published = ", to be published once the train state before it is stored" if performed.pending else ""
    storing = manifest.content is not None and not manifest.parts
    stored = "whose parts are being stored" if storing else f"{len(manifest.parts)} parts"
    text = f"{manifest.stage} of iteration {iteration}: manifest {performed.view.digest}, {stored}{published}"
    return Completed(name=name, message=text, data=performed.view)


def _wait(iteration: int, published: "Future[None]") -> State[Any]:
    try:
        published.result()
    except CancelledError:
        return Cancelled(message="the run was interrupted before this was stored; it is repeated when the run goes on")
    return Completed(message=f"iteration {iteration}: durable")


class Subflows(AbstractContextManager["Subflows", None]):
    """The page of a run in Prefect; as a context manager it waits, for a limited time, until the server has its end.

    Make it within the run's flow."""

    def __init__(
        self, run: str, last: int, advanced: Callable[[Portion], None] | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        """Subflows of the run with that id, up to iteration `last`. `advanced` is called with each portion of a stage.
        An iteration waits at most `patience_s` for its subflow."""
        self._run, self._parent = run, contextvars.copy_context()
        self._last, self._advanced, self._patience_s = last, advanced, patience_s
        self._iterations: list[_Iteration] = []
        self._ahead: _Iteration | None = None
        self._published: list[Future[None]] = []
        self._turn = threading.Lock()
        self._retry = 0.0

    def performer(self, stage: Stage, iteration: int, work: Callable[[], Performed], inputs: tuple[View, ...]) -> View:
        """Do the work of a stage in a Prefect task, in the subflow of the iteration that is under way."""
        if stage is Stage.WEIGHT_SYNC and iteration < self._last:
            self._ahead = self._opened(iteration + 1)  # a second or two before it is needed
        context = self._iterations[-1].context if self._iterations else self._parent
        # a copy, because a rollout may run beside a training
        return outcome(context.copy().run(stage_task(stage), iteration, work, inputs, self._shown_elsewhere))

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        self._iterations = [one for one in self._iterations if one.alive()]
        self._published = [one for one in self._published if not _stored(one, 0)]
        if self._ahead is not None and self._ahead.number == number:
            one, self._ahead = self._ahead, None
        else:
            one = self._opened(number)
        self._drop_ahead()
        one.begin(self._parent, self._patience_s)
        if not one.is_subflow:
            self._retry = max(self._retry, time.monotonic() + _AGAIN_S)
        self._iterations.append(one)
        end: State[Any] | None = None
        try:
            yield
        except Exception as error:
            elsewhere = self._shown_elsewhere(error)
            end = (
                Cancelled(message=f"iteration {number} was stopped, because storing failed")
                if elsewhere
                else Failed(message=f"iteration {number}: {without_secrets(str(error))}")
            )
            raise
        except BaseException:
            end = Cancelled(message=f"iteration {number} was interrupted; what it has committed is kept")
            raise
        finally:
            one.close(end)

    def storing(self, iteration: int, what: str, published: "Future[None]") -> None:
        if self._iterations:
            self._published.append(published)
            self._iterations[-1].follow(what, published)

    def advanced(self, portion: Portion) -> None:
        if self._advanced is not None:
            self._advanced(portion)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        deadline = time.monotonic() + (_LINGER_S if isinstance(error, Exception | None) else _INTERRUPTED_S)
        self._drop_ahead()
        for one in self._iterations:
            one.join(deadline)

    def _opened(self, number: int) -> "_Iteration":
        one = _Iteration(self._run, number, self._turn)
        if time.monotonic() >= self._retry:
            one.open(self._parent)
        return one

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.discard()
            self._iterations.append(self._ahead)
            self._ahead = None

    def _shown_elsewhere(self, error: BaseException) -> bool:
        return any(one.done() and not one.cancelled() and one.exception() is error for one in self._published)


@dataclass
class _Iteration:
    """One iteration: its thread waits for what is to be stored until the stages are done and all of it is durable."""

    run: str
    number: int
    turn: threading.Lock
    """Held by the thread that asks the server: with SQLite it refuses one of two requests at once, and the client then
    waits."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    is_subflow: bool = False  # True if its stages are shown in a subflow run of their own
    _queue: "SimpleQueue[tuple[str, Future[None]] | None]" = field(default_factory=SimpleQueue)
    _opened: threading.Event = field(default_factory=threading.Event)
    _claim: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)
    _end: State[Any] | None = None
    _unused: bool = False

    def open(self, parent: contextvars.Context) -> None:
        """Ask for a subflow run, without waiting."""
        self._start(parent, self._as_subflow)

    def begin(self, parent: contextvars.Context, patience_s: float) -> None:
        """Wait for the subflow run that was asked for, at most `patience_s`, else go on without one."""
        if self._threads:
            self._opened.wait(patience_s)
        if not self._opened.is_set():
            self._start(parent, lambda: self._show(subflow=False))
            self._opened.wait()

    def close(self, end: State[Any] | None) -> None:
        """End it with that state, or as Completed, once all of it is durable."""
        self._end = end
        self._queue.put(None)

    def discard(self) -> None:
        """End it before it began. The server is to forget it."""
        self._unused = True
        self.close(Cancelled(message="the run has ended before this iteration began"))

    def alive(self) -> bool:
        """True while something of it may still be shown."""
        return any(thread.is_alive() for thread in self._threads)

    def follow(self, what: str, published: "Future[None]") -> None:
        self._queue.put((what, published))

    def join(self, deadline: float) -> None:
        """Wait until the server knows the end of it, or until `deadline`, a time of `time.monotonic`."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, parent: contextvars.Context, body: Callable[[], object]) -> None:
        # a daemon: a server that is away keeps no process alive
        thread = threading.Thread(target=parent.copy().run, args=(body,), name="iteration", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _as_subflow(self) -> None:
        shown: list[tuple[UUID, State[Any]]] = []

        def body(number: int) -> State[Any]:
            identity, end = this_flow_run(), Cancelled(message=f"iteration {number} was suspended")
            self.turn.release()
            try:
                end = self._show(subflow=True)
                return end
            finally:
                if identity is not None:
                    shown.append((identity, end))
                self.turn.acquire()

        made = flow(name="iteration", flow_run_name=f"{self.run} iteration {{number}}", persist_result=False)(body)
        try:
            with self.turn:
                made(self.number, return_state=True)
                if self._unused:
                    for identity, _ in shown:
                        _forget(identity)
                    shown.clear()
        except (Pause, *_SERVER_ERRORS) as error:  # Prefect ends no subflow run of a flow run that a person suspends
            if not isinstance(error, Pause):
                logger.warning("the subflow run of iteration %d is not up to date: %s", self.number, error)
            for identity, end in shown:
                _report(identity, end)

    def _show(self, subflow: bool) -> State[Any]:
        if not self._claim.acquire(blocking=False):
            return Cancelled(message="the server did not answer in time; the stages are shown in the run's flow run")
        self.context, self.is_subflow = contextvars.copy_context(), subflow
        self._opened.set()
        unstored: State[Any] | None = None
        for what, published in iter(self._queue.get, None):
            # what waits behind a state is published within moments, or not at all if that failed: only more is shown
            if what == Stage.TRAIN or not (unstored or _stored(published, _SHORT_S)):
                state = show_storing(self.number, what, published)
                if state.is_failed():
                    unstored = Failed(message=f"iteration {self.number}: {state.message}")
        return unstored or self._end or Completed(message=f"iteration {self.number} is durable")


def _forget(flow_run: UUID) -> None:
    """Delete a subflow run, and the task run that stands for it in the run's flow run."""
    with get_client(sync_client=True, httpx_settings={"timeout": _ANSWER_S}) as client:
        task_run = client.read_flow_run(flow_run).parent_task_run_id
        client.delete_flow_run(flow_run)
        if task_run is not None:
            client.delete_task_run(task_run)


def _report(flow_run: UUID, end: State[Any]) -> None:
    """Tell the server how a subflow run ended, as soon as it is back; this thread has nothing else to do."""
    while True:
        try:
            # with settings, because that of the flow's context is closed when the flow has ended
            with get_client(sync_client=True, httpx_settings={"timeout": _ANSWER_S}) as client:
                client.set_flow_run_state(flow_run, end, force=True)
                return
        except _SERVER_ERRORS:
            time.sleep(_LOOK_S)


def _stored(published: "Future[None]", within_s: float) -> bool:
    waiting = wait([published], within_s).not_done
    return not (waiting or published.cancelled() or published.exception())
