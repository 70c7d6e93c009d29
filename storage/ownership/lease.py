"""The lease of a run, with fencing tokens, built on put-if-absent alone: docs/durability.md, "The lease".

The holder counts its period from before it asked for its entry, a watcher from after it saw it, so their times do not
overlap if both clocks run at the same speed. Independent of clocks: a holder that was replaced commits nothing."""

import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Literal, Self

from storage import layout, meter
from storage.backends.root import Root
from storage.errors import (
    DigestMismatch,
    InputError,
    LeaseHeld,
    LeaseLost,
    SchemaMismatch,
    StorageError,
    StorageUnavailable,
)
from storage.ownership import log
from storage.ownership.log import Entry, newest
from storage.ownership.process import SYSTEM, Clock, Life, Owner, is_stopped, life, this_process

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0  # period for which a silent holder keeps the run

STOP_SIGNAL = signal.SIGUSR1
"""Ends a holder that a flow run has started, without another try. SIGTERM may mean that the machine stops."""

ASKED_FOR = "flow run "  # prefix of the name of such a holder

_LOOK_SECONDS = 0.1
_RENEWALS = 3  # per period
_LOOKS = 60  # per period, by a process that watches
_RELEASE_SECONDS = 5.0  # patience of the last entry: without it the run is free one period later

_ENDED: set[str] = set()  # tokens of this process's leases whose end could not be written

_SIGNAL = signal.SIGURG  # ignored by the system where nothing handles it, so a late one does no harm


class Lease:
    """A lease held by this process. Safe to use from several threads."""

    def __init__(self, root: Root, run: str, entry: Entry, confirmed: float, clock: Clock = SYSTEM) -> None:
        self.root, self.run, self.clock = root, run, clock
        self.seconds = entry.seconds
        self._entry, self._confirmed = entry, confirmed
        self._lost: str | None = None
        self._listeners: list[Callable[[LeaseLost], object]] = []
        self._lock = threading.RLock()

    @property
    def epoch(self) -> int:
        return self._entry.epoch

    @property
    def lost(self) -> LeaseLost | None:
        """Reason why this process no longer holds the lease, as far as it has noticed; None while it does."""
        return None if self._lost is None else self._loss()

    def on_lost(self, listener: Callable[[LeaseLost], object]) -> None:
        """Call `listener` once, in the thread that notices the loss; at once if the lease is already lost."""
        with self._lock:
            if self._lost is None:
                self._listeners.append(listener)
                return
        listener(self._loss())

    def check(self) -> None:
        """Check in the store that the lease is still held; if its period is over, renew it. Raises LeaseLost if it was
        taken over or ended; StorageInterrupted if that is not known, because the store does not answer."""
        with self._lock:
            self._refuse_if_lost()
            if self.clock.steady() - self._confirmed >= self.seconds:
                self._append("renewed", self.root)
            elif log.newest_number(self.root, self.run) != self._entry.number:
                self._follow(newest(self.root, self.run))

    def renew(self, patience: float | None = None) -> None:
        """Hold it for another whole period from now, even if the last one is over and no one took over. It is retried
        for `patience` seconds, by default those of the root. Raises LeaseLost or StorageInterrupted as `check`."""
        with self._lock:
            self._refuse_if_lost()
            self._append("renewed", self.root if patience is None else self.root.cap_patience(patience))

    def prune(self) -> None:
        log.prune(self.root, self.run, self._entry.number, log.KEPT_ENTRIES)

    def release(self) -> None:
        """Free the run for another process at once; a lease that is already lost stays lost."""
        with self._lock:
            if self._lost is None:
                self._lost = "it was released"  # before another process can have it
                try:
                    self._append("released", self.root.cap_patience(_RELEASE_SECONDS))
                except LeaseLost:
                    pass
                except StorageError as failure:
                    _ENDED.add(self._entry.token)
                    logger.warning("the lease of run %s could not be released: %s", self.run, failure)

    def _loss(self) -> LeaseLost:
        return LeaseLost(f"this process no longer drives run {self.run}: {self._lost}. Start the same command again")

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            raise self._loss()

    def _append(self, kind: Literal["renewed", "released"], root: Root) -> None:
        seconds = timedelta(seconds=self.seconds if kind == "renewed" else 0)
        while True:
            before, now = self.clock.steady(), self.clock.wall()
            following = {"number": self._entry.number + 1, "kind": kind, "written": now, "expires": now + seconds}
            if kind == "released":
                following["choices"] = log.recorded_choices(root, self.run)
            entry = self._entry.model_copy(update=following)
            last = log.append(root, self.run, entry)
            if last == entry:
                self._entry, self._confirmed = entry, before
                return
            self._follow(last)

    def _follow(self, last: Entry | None) -> None:
        """Adopt `last` if it is a renewal of ours whose answer was lost; it confirms nothing."""
        if last == self._entry:
            return
        if last is not None and (last.token, last.kind) == (self._entry.token, "renewed"):
            self._entry = last
            return
        if last is None or last.number < self._entry.number:
            self._lost = f"its entry {layout.lease_key(self.run, self._entry.number)} was removed"
        else:
            unlocked = last.kind == "released" and last.epoch in (self.epoch, last.number)
            self._lost = f"it was {'ended' if unlocked else 'taken over'} by {last.owner}"
        loss, listeners, self._listeners = self._loss(), self._listeners, []
        for listener in listeners:
            listener(loss)
        raise loss


def holder(root: Root, run: str) -> Entry | None:
    """The newest entry of the process that drives the run, or None if another may take it over at once."""
    entry = newest(root, run)
    return None if _is_free(entry) else entry


def check_free(root: Root, run: str) -> None:
    """Refuse early what `acquire` would. Raises LeaseHeld if a running process of this machine drives the run."""
    entry = newest(root, run)
    if entry is not None and _is_at_work(entry, SYSTEM):
        raise LeaseHeld(explain(run, entry))


def acquire(
    root: Root,
    run: str,
    owner: Owner,
    seconds: float = LEASE_SECONDS,
    clock: Clock = SYSTEM,
    pause: Callable[[float], None] = time.sleep,
) -> Lease:
    """Acquire the lease; from a holder that may be alive, only after it was silent for one of its periods. Raises
    LeaseHeld if the holder is a running process of this machine, or has renewed its lease."""
    watch: Watch | None = None
    while True:
        asked = clock.steady()
        last = newest(root, run)
        if _is_free(last) or (watch is not None and watch.is_over(last, asked)):
            before, entry = clock.steady(), _acquisition(last and last.number, owner, seconds, clock)
            entry = entry.model_copy(update={"choices": log.check_choices(root, run, last)})
            if log.append(root, run, entry) == entry:
                return Lease(root, run, entry, before, clock)
            continue
        assert last is not None
        if _is_at_work(last, clock) or (watch is not None and watch.entry != last):
            raise LeaseHeld(explain(run, last, clock))
        if watch is None:
            logger.warning("%s", explain(run, last, clock))
        watch = Watch.going_on(watch, last, asked, clock.steady())
        pause(last.seconds / _LOOKS)


class Watch:
    """Watches an entry for changes, when it is not known whether its holder is alive."""

    def __init__(self, entry: Entry, since: float) -> None:
        self.entry, self.since = entry, since

    @classmethod
    def going_on(cls, before: "Watch | None", entry: Entry, asked: float, answered: float) -> "Watch":
        """The same watch, or a new one that begins with this look. A slow look means that the store was away. The
        holder could not renew either, so it gets another period."""
        slow = answered - asked > entry.seconds / _RENEWALS
        return cls(entry, answered) if before is None or slow else before

    def is_over(self, entry: Entry | None, asked: float) -> bool:
        """True if `entry`, requested at time `asked`, has stayed the same for one of its holder's periods."""
        return entry == self.entry and asked - self.since >= self.entry.seconds


@contextmanager
def hold(root: Root, run: str, owner: str, seconds: float = LEASE_SECONDS) -> Iterator[Lease]:
    """Hold the lease of `run` for a block of code, renewing it from its own thread. If another process takes it over, a
    block in the main thread ends with LeaseLost as soon as that is noticed. In another thread, `check()`, `lost` or
    `on_lost` report the loss. Raises LeaseHeld if another process drives the run, LeaseLost if another process took the
    run over during the block."""
    lease = acquire(root, run, this_process(owner), seconds)
    stop, every = threading.Event(), seconds / _RENEWALS
    thread = threading.Thread(target=_keep, args=(lease, stop, every), name=f"lease-{run}", daemon=True)
    thread.start()
    try:
        for folder in (layout.manifest_folder(run), layout.revision_folder(run), layout.copy_folder(run)):
            root.flush_recent(folder)  # what is published from now on depends on these
        with Interruptible() as block:
            lease.on_lost(block.end_with)
            yield lease
    finally:
        stop.set()
        thread.join(2 * every)
        lease.release()


def unlock(root: Root, run: str, owner: Owner, *, force: bool = False, clock: Clock = SYSTEM) -> tuple[bool, str]:
    """End the lease of a dead holder, or of any with `force`. Returns whether the run is free, and who held it. Raises
    StorageUnavailable if the store has no room for the entry, even without the older ones."""
    try:
        last = newest(root, run)
    except (DigestMismatch, SchemaMismatch) as error:
        if not force:
            return False, str(error)
        # the next number: whoever wrote the entry that cannot be read notices that another has followed
        last, explanation = _acquisition(log.newest_number(root, run), owner, 0.0, clock), str(error)
    else:
        found = log.recorded_choices(root, run)
        if last is None or (last.kind == "released" and last.choices <= found):
            return True, f"run {run} is not driven by any process"
        explanation = explain(run, last, clock)
        if not force and (not _is_free(last) or last.choices > found):
            return False, explanation
        last = last.model_copy(update={"number": last.number + 1, "choices": found})
    now = clock.wall()
    entry = last.model_copy(update={"kind": "released", "owner": owner, "written": now, "expires": now})
    try:
        winner = log.append(root, run, entry)
    except StorageUnavailable:  # a full disk: entries that others followed make room, if there are any
        log.prune(root, run, entry.number - 1, kept=1)
        winner = log.append(root, run, entry)
    return (True, explanation) if winner == entry else (False, explain(run, winner, clock))


def end_holder(root: Root, run: str, seconds: float) -> tuple[Entry | None, bool]:
    """Ask the process that drives a run to end, as Ctrl-C would, and wait for that. Returns the newest entry of that
    process, None if the run is free, and whether it has ended within `seconds`. Raises InputError if the process is not
    known on this machine, or belongs to another user."""
    entry = holder(root, run)
    if entry is None:
        return None, True
    owner = entry.owner
    if life(owner) is not Life.ALIVE:
        fact = f"run {run!r} is driven by {owner}, which cannot be seen from here: run this command on that machine"
        raise InputError(f"{fact}, or `ratchet unlock {run} --force` if you know that the process is dead")
    # SIGINT is ignored by what a shell has started in the background
    number = STOP_SIGNAL if owner.name.startswith(ASKED_FOR) else signal.SIGTERM
    try:
        os.kill(owner.process, number)
    except PermissionError:
        raise InputError(f"run {run!r} is driven by {owner}, a process of another user: ask that user") from None
    except ProcessLookupError:
        return entry, True
    deadline = time.monotonic() + seconds
    while life(owner) is Life.ALIVE:
        if time.monotonic() >= deadline:
            return entry, False
        time.sleep(_LOOK_SECONDS)
    return entry, True


def describe(entry: Entry, clock: Clock = SYSTEM) -> str:
    """The holder in a few words, and since when it has been silent if that is longer than its period."""
    silent = clock.wall() >= entry.expires
    return f"{entry.owner}{f', silent since {entry.written:%Y-%m-%d %H:%M:%S} UTC' if silent else ''}"


def explain(run: str, entry: Entry, clock: Clock = SYSTEM) -> str:
    heard = f"last heard from at {entry.written:%Y-%m-%d %H:%M:%S} UTC"
    if life(entry.owner) is Life.DEAD:
        return f"run {run} was driven by {entry.owner}, which is gone: the run can be taken over at once"
    if _is_at_work(entry, clock):
        state = f"stopped (`kill -CONT {entry.owner.process}` continues it)" if is_stopped(entry.owner) else "alive"
        return f"run {run} is driven by {entry.owner}, which is {state} and was {heard}. Wait for it or end it"
    return (
        f"run {run} is driven by {entry.owner}, {heard}. Another process takes the run over after it has waited "
        f"{entry.seconds:.0f} s without hearing from the holder; if you know that it is dead, "
        f"`ratchet unlock {run} --force` frees the run now"
    )


def _is_free(entry: Entry | None) -> bool:
    return entry is None or entry.kind == "released" or entry.token in _ENDED or life(entry.owner) is Life.DEAD


def _is_at_work(entry: Entry, clock: Clock) -> bool:
    # one machine has one wall clock; if it jumps, only a refusal is premature or delayed by a watch
    return not _is_free(entry) and life(entry.owner) is Life.ALIVE and clock.wall() < entry.expires


def _acquisition(newest: int | None, owner: Owner, seconds: float, clock: Clock) -> Entry:
    number, now, token = (newest or 0) + 1, clock.wall(), uuid.uuid4().hex
    end = now + timedelta(seconds=seconds)
    return Entry(
        number=number, kind="acquired", epoch=number, token=token, owner=owner, written=now, expires=end, choices=0
    )


def _keep(lease: Lease, stop: threading.Event, every: float) -> None:
    while not stop.wait(every):
        try:
            with meter.separate():  # no stage waits for this
                lease.renew(patience=every)
                lease.prune()
        except LeaseLost:
            return  # the listeners were called
        except StorageError as failure:
            logger.warning("the lease of run %s cannot be renewed at the moment: %s", lease.run, failure)


class Interruption(KeyboardInterrupt):
    """Raised in the block: code that lets Ctrl-C through and cleans up after it treats this alike."""


class Interruptible:
    """A block that `end_with` ends from another thread, as Ctrl-C would; it then raises the given error. The block must
    run in the main thread, which alone executes Python's signal handlers; elsewhere `end_with` has no effect."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._armed, self._interrupted = False, False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(_SIGNAL, self._interrupt)
            self._armed = True
        return self

    def end_with(self, error: Exception) -> None:
        """End the block; called in the main thread, it only notes the error."""
        self._error = error
        main = threading.main_thread()
        if self._armed and threading.current_thread() is not main and main.ident is not None:
            signal.pthread_kill(main.ident, _SIGNAL)  # also wakes it from a system call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._armed or self._interrupted:
            self._armed = False
            signal.signal(_SIGNAL, self._before or signal.SIG_DFL)
        # the interrupt may have become another error on the way, as it does at the start of a Prefect task run
        if self._interrupted and error is not None and self._error is not None:
            raise self._error from error

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._error is None and callable(self._before):
            self._before(number, frame)  # the handler of an enclosing block
        elif self._armed and self._error is not None:
            self._armed, self._interrupted = False, True
            raise Interruption(str(self._error))
