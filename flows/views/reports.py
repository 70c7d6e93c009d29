"""Reports of a run in progress: made from each iteration's row behind the work, in threads of their own.

The files of a run (CSV, TensorBoard, curves) hold one row for each iteration, whatever was killed: at a start they are
compared with what is complete, and at the end made again from the manifests alone. A failure here is said once and ends
nothing."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from flows.views.curves import store_plot
from flows.views.events import TensorBoard
from flows.views.history import IterationRecord, last_iteration, read_history, read_record
from flows.views.samples import Choice, Samples, chosen
from flows.views.table import MetricsFile, Row, Series, warmup_csv
from flows.views.trackers import Makes, TrackedRun, Tracker, trackers
from storage import layout
from storage.backends.root import Root
from storage.errors import user_line
from storage.manifest import find
from storage.upkeep.catalog import names
from tasks.config.environment import without_secrets
from tasks.config.run import RunConfig
from tasks.data.tokenizer import StoredTexts, texts_of
from tasks.stages.names import Stage

Say = Callable[[str], object]

Publish = Callable[[Samples], object]
_PLOT_SECONDS = 15.0
_PLOT_SHARE = 20.0  # drawing takes at most this fraction of the time
_LINGER_SECONDS = 30.0
_INTERRUPTED_SECONDS = 2.0


class Lane:
    """Jobs one after another. A job that fails does not keep the next from being tried."""

    def __init__(self, name: str, say: Say) -> None:
        self._name, self._say = name, say
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._told = False
        # a daemon: a tracker that does not answer keeps no process alive
        self._thread = threading.Thread(target=self._work, name=f"report-{name}", daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def mute(self) -> None:
        """Report no more failures: interrupted jobs may fail."""
        self._told = True

    def finish(self, deadline: float) -> None:
        """Wait until every job is done, or until `deadline`, a time of `time.monotonic`."""
        self._jobs.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._failed("it has not finished in time")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with contextlib.ExitStack() as tried:
                tried.push(self._ended)
                job()

    def _ended(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Report the error of a job, whatever it is: the code in it is that of libraries."""
        if error is not None:
            first = str(error).strip().partition("\n")[0].rstrip(".")
            self._failed(f"{type(error).__name__}: {first}{user_line(error)}")
        return True

    def _failed(self, why: str) -> None:
        if not self._told:
            self._told = True
            self._say(without_secrets(f"{self._name}: {why}. The run goes on; later attempts are not reported"))


def write_report(root: Root, run: str) -> bytes:
    """Make the files of a run from its manifests alone, and return the plot; what is right already stays."""
    rows = [record.row for record in read_history(root, run)]
    MetricsFile(root, run).write(rows)
    events = _Sender(root, run, "tensorboard", lambda: TensorBoard(root, run))
    events.send(*rows)
    events.end(complete=True)
    write_warmup(root, run)
    return store_plot(root, run, rows)


def write_warmup(root: Root, run: str) -> None:
    """Write the losses of the warm-up's steps, if there was one."""
    if steps := warmup_csv(find(root, run, 0, Stage.TRAIN)):
        root.replace(layout.report_key(run, layout.WARMUP), steps)


def finish_report(root: Root, run: str, config: RunConfig, say: Say) -> bytes:
    """`write_report` of a complete run. Trackers, too, get what a process that died at the end did not send them."""
    if trackers(config.report):
        with Reports(root, run, config, say) as reports:
            reports.add(read_record(root, run, last_iteration(root, run, config)))
    return write_report(root, run)


class Reports(contextlib.AbstractContextManager["Reports", None]):
    """The reports of one process that drives a run; as a context manager it ends them."""

    def __init__(self, root: Root, run: str, config: RunConfig, say: Say, publish: Sequence[Publish] = ()) -> None:
        self._files = Lane("report", say)
        self._writer = Files(root, run)
        self._lanes: dict[str, Lane] = {}
        self._senders: dict[str, _Sender] = {}
        for name, makes in trackers(config.report).items():
            self._lanes[name], self._senders[name] = Lane(name, say), _Sender(root, run, name, makes)
        self._publish = publish if config.report.examples else ()
        if self._publish:
            self._lanes["examples"] = Lane("examples", say)
        self._texts: StoredTexts | None = None
        self._last, self._root, self._run, self._config = -1, root, run, config

    def add(self, record: IterationRecord) -> None:
        self._last, row = record.iteration, record.row
        self._files.add(lambda: self._writer.add(row))
        for name, sender in self._senders.items():
            self._lanes[name].add(lambda sender=sender: sender.send(row))
        if self._publish and record.iteration:
            self._lanes["examples"].add(lambda: self._show_examples(record.iteration))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        interrupted = not isinstance(error, Exception | None)
        deadline = time.monotonic() + (_INTERRUPTED_SECONDS if interrupted else _LINGER_SECONDS)
        self._files.add(self._writer.flush)
        complete = error is None and self._last == last_iteration(self._root, self._run, self._config)
        for name, sender in self._senders.items():
            self._lanes[name].add(lambda sender=sender: sender.end(complete))
        for lane in (self._files, *self._lanes.values()):
            if interrupted:
                lane.mute()
            lane.finish(deadline)

    def _show_examples(self, iteration: int) -> None:
        if self._texts is None:
            self._texts = texts_of(self._root, self._run)
        choice = Choice(best=self._config.report.examples, worst=self._config.report.examples)
        found = chosen(self._root, self._run, iteration, choice, self._texts, self._config.train.policy)
        for publish in self._publish:
            publish(found)


class Files:
    def __init__(self, root: Root, run: str) -> None:
        self._root, self._run = root, run
        self._table, self._events = MetricsFile(root, run), self._sender([])
        self._next: int | None = None
        self._due = 0.0
        self._undrawn = False

    def add(self, row: Row) -> None:
        if self._next != row.iteration:
            self._begin(row.iteration)
        self._next = None  # until both have it
        self._table.add(row)
        self._events.send(row)
        if row.iteration == 0:
            write_warmup(self._root, self._run)
        self._next, self._undrawn = row.iteration + 1, True
        if time.monotonic() >= self._due:
            self._draw()

    def flush(self) -> None:
        self._table.flush()
        self._events.end(complete=True)
        if self._undrawn:
            self._draw()

    def _begin(self, iteration: int) -> None:
        rows = self._table.load(iteration)
        for missing in range(len(rows), iteration):
            rows.append(read_record(self._root, self._run, missing).row)
            self._table.add(rows[-1])
        self._events = self._sender(rows)

    def _sender(self, rows: list[Row]) -> "_Sender":
        return _Sender(self._root, self._run, "tensorboard", lambda: TensorBoard(self._root, self._run), rows)

    def _draw(self) -> None:
        began = time.monotonic()
        store_plot(self._root, self._run, self._table.rows())
        now = time.monotonic()
        self._due, self._undrawn = now + max(_PLOT_SECONDS, _PLOT_SHARE * (now - began)), False


class _Sender:
    """Sends rows to one tracker: each once, in their order, however often it fails."""

    def __init__(self, root: Root, run: str, name: str, makes: Makes, earlier: list[Row] | None = None) -> None:
        """A sender to one tracker. `earlier` are the rows before those that are sent, if they were read already."""
        self._root, self._run, self._name, self._makes, self._earlier = root, run, name, makes, earlier
        self._tracker: Tracker | None = None
        self._rows: list[Row] = []

    def send(self, *rows: Row) -> None:
        self._rows += rows
        if self._rows and self._tracker is None:
            self._tracker = self._begun(self._makes())
        while self._rows and self._tracker is not None:
            row = self._rows[0]
            self._tracker.log(row.model_copy(update={"values": self._series.named(row)}))
            self._rows.pop(0)

    def end(self, complete: bool) -> None:
        if self._tracker is not None:
            self._tracker.end(complete)

    def _begun(self, tracker: Tracker) -> Tracker:
        """Connect, and put the rows that the tracker lacks before those that wait."""
        first = tracker.begin(TrackedRun(self._root, self._run, self._name))
        if type(first) is not int or first < 0:
            raise TypeError(f"begin must return the number of the first iteration that is not there, not {first!r}")
        self._series = Series(self._first_of_each(first) if first else ())
        missing = map(self._row, range(first, self._rows[0].iteration))
        self._rows = [*missing, *(row for row in self._rows if row.iteration >= first)]
        return tracker

    def _row(self, iteration: int) -> Row:
        return self._earlier[iteration] if self._earlier else read_record(self._root, self._run, iteration).row

    def _first_of_each(self, below: int) -> list[Row]:
        """The first rows with rewards and with an evaluation, whose functions name the curves."""
        newest = names(self._root, self._run).newest
        scored = [[at for at, stage in newest if stage == one and at < below] for one in (Stage.REWARD, Stage.EVALUATE)]
        return [self._row(min(found)) for found in scored if found]
