"""What people see of a run while it goes on: made from each iteration's row behind the work, in threads of its own.

The files of a run (CSV, TensorBoard, curves) hold one row for each iteration, whatever was killed: at a start they are
compared with what is complete, and at the end made again from the manifests alone. A failure here is said once and ends
nothing.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from flows.views.curves import store_plot
from flows.views.events import EventFile
from flows.views.history import IterationRecord, read_history, read_record
from flows.views.lane import Lane, Say
from flows.views.retrained import last_iteration
from flows.views.samples import Choice, Samples, chosen
from flows.views.table import MetricsFile, Row, warmup_csv
from flows.views.trackers import Tracker, trackers
from storage import layout
from storage.backends.root import Root
from storage.manifest import find, need
from tasks.config.run import RunConfig
from tasks.data.stored_texts import StoredTexts
from tasks.stages.names import Stage

Publish = Callable[[Samples], object]
"""Shows examples of an iteration."""

_PLOT_SECONDS = 15.0
_PLOT_SHARE = 20.0  # drawing takes at most this fraction of the time
_LINGER_SECONDS = 30.0
_INTERRUPTED_SECONDS = 2.0


def write_report(root: Root, run: str, history: list[IterationRecord] | None = None) -> bytes:
    """Make the files of a run from its manifests alone; what is right already stays.

    Args:
        history: what `read_history` gave, if it was read already.

    Returns:
        The plot.
    """
    rows = [record.row for record in (read_history(root, run) if history is None else history)]
    table = MetricsFile(root, run)
    table.write(rows)
    EventFile(root, run).load(rows)
    write_warmup(root, run)
    return store_plot(root, run, rows)


def write_warmup(root: Root, run: str) -> None:
    """Write the losses of the warm-up's steps, if there was one."""
    if steps := warmup_csv(find(root, run, 0, Stage.TRAIN)):
        root.replace(layout.report_key(run, layout.WARMUP), steps)


def finish_report(root: Root, run: str, config: RunConfig, say: Say) -> bytes:
    """`write_report` of a complete run. Trackers, too, get what a process that died at the end did not send them."""
    if trackers(root, run, config):
        with Reports(root, run, config, say) as reports:
            reports.add(read_record(root, run, last_iteration(root, run, config)))
    return write_report(root, run)


class Reports:
    """The reports of one process that drives a run; as a context manager it ends them."""

    def __init__(self, root: Root, run: str, config: RunConfig, say: Say, publish: Publish | None = None) -> None:
        self._files = Lane("report", say)
        self._writer = Files(root, run)
        self._lanes: dict[str, Lane] = {}
        self._senders: dict[str, _Sender] = {}
        for name, tracker in trackers(root, run, config).items():
            self._lanes[name], self._senders[name] = Lane(name, say), _Sender(root, run, tracker)
        self._examples = None
        if publish is not None and config.report.examples:
            self._lanes["examples"] = Lane("examples", say)
            self._examples = _Examples(root, run, config, publish)
        self._last, self._root, self._run, self._config = -1, root, run, config

    def add(self, record: IterationRecord) -> None:
        """An iteration is complete: it and its manifests are published. Takes no time."""
        row = self._last_row(record)
        self._files.add(lambda: self._writer.add(row))
        for name, sender in self._senders.items():
            self._lanes[name].add(lambda sender=sender: sender.send(row))
        if self._examples is not None and record.iteration:
            examples = self._examples
            self._lanes["examples"].add(lambda: examples.show(record.iteration))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _last_row(self, record: IterationRecord) -> Row:
        self._last = record.iteration
        return record.row


class Files:
    """The files below a run."""

    def __init__(self, root: Root, run: str) -> None:
        self._root, self._run = root, run
        self._table, self._events = MetricsFile(root, run), EventFile(root, run)
        self._next: int | None = None
        self._due = 0.0
        self._undrawn = False

    def add(self, row: Row) -> None:
        """Write the row, after those of earlier iterations that are not there yet."""
        if self._next != row.iteration:
            self._begin(row.iteration)
        self._next = None  # until both have it
        self._table.add(row)
        self._events.add(row)
        if row.iteration == 0:
            write_warmup(self._root, self._run)
        self._next, self._undrawn = row.iteration + 1, True
        if time.monotonic() >= self._due:
            self._draw()

    def flush(self) -> None:
        """Upload and draw what is new."""
        self._table.flush()
        self._events.flush()
        if self._undrawn:
            self._draw()

    def _begin(self, iteration: int) -> None:
        rows = self._table.load(iteration)
        for missing in range(len(rows), iteration):
            rows.append(read_record(self._root, self._run, missing).row)
            self._table.add(rows[-1])
        self._events.load(rows)

    def _draw(self) -> None:
        began = time.monotonic()
        store_plot(self._root, self._run, self._table.rows())
        now = time.monotonic()
        self._due, self._undrawn = now + max(_PLOT_SECONDS, _PLOT_SHARE * (now - began)), False


class _Sender:
    """Sends rows to one tracker: each once, in their order, however often it fails."""

    def __init__(self, root: Root, run: str, tracker: Tracker) -> None:
        self._root, self._run, self._tracker = root, run, tracker
        self._next: int | None = None
        self._rows: list[Row] = []

    def send(self, row: Row) -> None:
        self._rows.append(row)
        if self._next is None:
            self._next = self._tracker.begin()
            earlier = range(self._next, self._rows[0].iteration)
            self._rows = [*(read_record(self._root, self._run, one).row for one in earlier), *self._rows]
        while self._rows:
            if self._rows[0].iteration >= self._next:
                self._tracker.log(self._rows[0])
            self._rows.pop(0)

    def end(self, complete: bool) -> None:
        if self._next is not None:
            self._tracker.end(complete)


class _Examples:
    """Samples of each iteration for people."""

    def __init__(self, root: Root, run: str, config: RunConfig, publish: Publish) -> None:
        self._root, self._run, self._publish = root, run, publish
        self._choice = Choice(best=config.report.examples, worst=config.report.examples)
        self._policy = config.train.policy
        self._texts: StoredTexts | None = None

    def show(self, iteration: int) -> None:
        if self._texts is None:
            self._texts = StoredTexts.of(self._root, need(self._root, self._run, 0, Stage.PREPARE))
        self._publish(chosen(self._root, self._run, iteration, self._choice, self._texts, self._policy))
