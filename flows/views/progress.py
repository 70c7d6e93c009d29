"""Progress of a run on a terminal: a live line, below it a sample, and one line for every finished iteration."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flows.views.history import EXPLANATIONS, IterationRecord
from flows.views.output import count
from flows.views.samples import Samples, printable
from flows.views.status import Change, Changes, RunStatus
from tasks.config.evaluation import EXACT
from tasks.stages.context import Portion
from tasks.stages.names import Stage

_REFRESH_PER_SECOND = 4
_BAR = 24
_WIDE = 110  # columns from which there is room for the run's name and a bar
_PLAIN_S = 30.0
_SHOWN_S = 0.05
_PACE = 5  # iterations that the time left follows from


class Follower(Protocol):
    """Another display of a run."""

    def begins(self, iteration: int, stage: Stage) -> None:
        """Show the stage that begins."""

    def advanced(self, portion: Portion) -> None:
        """Report progress within a stage."""


class Progress:
    """Display on standard error; plain lines if that is not a terminal."""

    def __init__(self, run: str, iterations: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._run = run
        self._iterations = iterations
        self._finished = 0
        self.stage: str | None = None  # the stage that began last, and its iteration
        self._doing = "starting"
        self._since = time.monotonic()
        self._listeners: list[Callable[[IterationRecord], object]] = []
        self._followers: list[Follower] = []
        self._stage: tuple[int, Stage] | None = None
        self._counting: tuple[object, int, float] | None = None
        self._due = 0.0
        self._pace: deque[float] = deque(maxlen=_PACE)
        self._paced = 0.0
        self._sample: str | None = None
        self._live = Live(
            get_renderable=self._shown,
            console=self._console,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,  # with --json it belongs to a program
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def refresh(self) -> None:
        """Draw the display now instead of at the next refresh."""
        self._live.refresh()

    def say(self, text: str) -> None:
        """Print a line and show it as what is being done."""
        self._begin(text)
        self.note(text)

    def note(self, text: str) -> None:
        """Print a line beside what is being done."""
        self._console.print(Text(text), soft_wrap=True)

    def expect(self, iterations: int) -> None:
        self._iterations = iterations

    def begins(self, iteration: int, stage: Stage) -> None:
        self._finished = max(iteration - 1, 0)
        self._stage = iteration, stage
        self.stage = f"{stage} of iteration {iteration}"
        self._begin(f"iteration {iteration}: {stage}")
        for follower in self._followers:
            follower.begins(iteration, stage)
        if iteration == 0 and not self._console.is_terminal:
            self.note(f"iteration 0: {stage}")  # the start is slow: processes, warm-up

    def finished(self, record: IterationRecord) -> None:
        """Print the line of a finished iteration and why nothing can be learned from it, and tell the listeners."""
        self._finished = record.iteration
        if record.iteration:  # the preparation is like no other
            self._pace.append(record.seconds)
            self._paced = time.monotonic()
        self.note(iteration_line(record, self._iterations))
        for trouble in record.troubles:
            self.warn(f"iteration {record.iteration}: {EXPLANATIONS[trouble]}")
        for listener in self._listeners:
            listener(record)

    def sampled(self, found: Samples) -> None:
        """Show the first of these samples, on one line of a terminal. May be called in any thread."""
        if found.samples:
            one = found.samples[0]
            score = "not scored" if one.reward is None else f"reward {one.reward:.3g}"
            texts = " -> ".join(" ".join((text or "?").split()) for text in (one.prompt, one.response))
            self._sample = printable(f"iteration {found.iteration}, {score}: {texts}")

    def advanced(self, portion: Portion) -> None:
        """Show how much of a stage is done. May be called in any thread."""
        self._doing = f"iteration {portion.iteration}: {portion_text(portion)}"
        for follower in self._followers:
            follower.advanced(portion)

    def counted(self, done: int, of: int, unit: str, note: str = "") -> None:
        """Show progress within the current stage, as a process reports it."""
        if self._stage is None or self._stage[1] is not Stage.TRAIN:
            return
        portion = Portion(*self._stage, done, of, unit, note=note, left_s=self._left(done, of, unit))
        self.advanced(portion)
        if note and not self._console.is_terminal and time.monotonic() >= self._due:
            self.note(f"iteration {portion.iteration}: {portion_text(portion)}")
            self._due = time.monotonic() + _PLAIN_S

    def _left(self, done: int, of: int, unit: str) -> float | None:
        """Seconds until all is done, from when the same was first counted."""
        now, what = time.monotonic(), (self._stage, of, unit)
        if self._counting is None or self._counting[0] != what or done < self._counting[1]:
            self._counting = (what, done, now)
        _, first, since = self._counting
        return (now - since) * (of - done) / (done - first) if done > first else None

    def follow(self, follower: "Follower") -> None:
        """Tell `follower` of each stage that begins, and of how much of it is done."""
        self._followers.append(follower)

    def on_finished(self, listener: Callable[[IterationRecord], object]) -> None:
        self._listeners.append(listener)

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}")

    def _begin(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()

    def _shown(self) -> Group:
        sample = [] if self._sample is None else [Text(self._sample, style="dim", no_wrap=True, overflow="ellipsis")]
        return Group(self._line(), *sample)

    def _run_left(self) -> list[str]:
        """Time until the last iteration is finished, at the pace of the last ones."""
        to_do = self._iterations - self._finished
        if not self._pace or to_do <= 0:
            return []
        left = statistics.mean(self._pace) * to_do - (time.monotonic() - self._paced)
        return [f"| {duration(max(left, 0))} left"]

    def _line(self) -> Table:
        bar = ProgressBar(max(self._iterations, 1), self._finished, width=_BAR)
        cells = [
            Spinner("dots"),
            *([Text(self._run, style="bold"), bar] if self._console.width >= _WIDE else []),
            f"{self._finished}/{self._iterations}",
            Text(self._doing, style="cyan", no_wrap=True, overflow="ellipsis"),
            f"{time.monotonic() - self._since:.0f} s",
            *self._run_left(),
        ]
        line = Table.grid(padding=(0, 1))
        for _ in cells:
            line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(*cells)
        return line


def portion_text(portion: Portion) -> str:
    speed = f", {portion.tokens / portion.seconds:.0f} tokens/s" if portion.tokens and portion.seconds else ""
    note = f", {portion.note}" if portion.note else ""
    left = "" if portion.left_s is None or not portion.note else f", {duration(portion.left_s)} left"
    return f"{portion.stage}, {portion.done} of {portion.of} {portion.unit}{speed}{note}{left}"


def duration(seconds: float) -> str:
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def iteration_line(record: IterationRecord, iterations: int) -> str:
    """One iteration in one line; `iterations` is how many there are to be, which a run may have gone beyond."""
    iterations = max(iterations, record.iteration)
    figures = [
        ("reward", record.reward, ".3f"),
        ("held-out reward", None if record.passing == EXACT else record.held_out_reward, ".3f"),
        ("held-out pass rate", record.pass_rate, ".3f"),
        ("KL before||after", record.kl, ".2e"),
        ("entropy", record.entropy, ".3f"),
        ("grad norm", record.grad_norm, ".3f"),
        ("turns", record.turns, ".1f"),
        ("environment failures", record.environment_failures or None, "d"),
        ("tokens/s", record.tokens_per_second, ".0f"),
    ]
    reasons = ", ".join(f"{reason} {count}" for reason, count in record.unscored.items())
    width = len(str(iterations))
    shown = [f"{name} {value:{form}}" for name, value, form in figures if value is not None]
    shown += [f"without reward {sum(record.unscored.values())} ({reasons})"] if reasons else []
    took = {**record.stage_seconds, **({"start": record.start_seconds} if record.start_seconds >= _SHOWN_S else {})}
    stages = " ".join(f"{stage} {seconds:.1f}" for stage, seconds in took.items())
    place = f"iteration {record.iteration:{width}d}/{iterations}"
    return " | ".join([place, *shown, f"{record.seconds:.1f} s ({stages})"])


def closing_lines(status: RunStatus) -> list[str]:
    return [
        f"run {status.run}: {count(status.iterations, 'iteration')} complete",
        *(f"{name:<22}{_change(change)}{remark}" for name, change, remark in figures_of(status.changes)),
        f"{'stored in':<22}{status.root}/{status.run}",
        *([f"{'plot':<22}{status.report}"] if status.report else []),
        *(f"{'warning':<22}{text}" for text in status.warnings),
    ]


def figures_of(changes: Changes) -> list[tuple[str, Change, str]]:
    """The figures of a run, by their names, with a remark. Where the reward is 0 or 1, its mean is the pass rate."""
    exact, known = changes.passing == EXACT, changes.pass_rate.last is not None
    held_out = changes.held_out_reward.last is not None  # a retraining evaluates nothing
    remark = "" if exact or not known else f"  ({changes.passing})"
    return [
        ("mean reward", changes.reward, ""),
        *([("held-out mean reward", changes.held_out_reward, "")] if held_out and not (exact and known) else []),
        *([("held-out pass rate", changes.pass_rate, remark)] if known else []),
    ]


def status_lines(status: RunStatus) -> Sequence[str]:
    earlier = status.history[0].iteration if status.history else 0
    lines = [f"(iterations 0 to {earlier - 1}: --all)"] if earlier else []
    lines += [iteration_line(record, status.asked) for record in status.history]
    head = [f"{'revision':<22}{status.revision}"] if status.revision else []
    redoing = [f"{'to be done again':<22}{status.redoing}"] if status.redoing else []
    closing = [*closing_lines(status), *head, *redoing]
    if status.current is None:
        return [*lines, *closing]
    stages = ", ".join(f"{item.stage} {'done' if item.done else 'to do'}" for item in status.stages)
    return [*lines, *closing, f"{'continues with':<22}iteration {status.current}: {stages}"]


def _change(change: Change) -> str:
    if change.first is None or change.last is None:
        return "none yet"
    since = f" since iteration {change.since}" if change.apart else ""
    return f"{change.first:.3f} -> {change.last:.3f}{since}"
