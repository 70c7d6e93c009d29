"""Who drives a run: a lease with fencing tokens, from put-if-absent alone.

The lease of a run is a log of numbered entries, each published put-if-absent: acquired, renewed, released. A renewal
and a takeover contend for the same number, so exactly one of them happens, and the number of the `acquired` entry is a
fencing token that rises with every holder. The newest entry says who drives the run until when.

What this gives: two processes whose clocks agree never drive one run at once. What does not rest on clocks: a holder
that was asleep past its time may still publish a manifest that it was just about to publish. Then that manifest is the
truth, which the process that took over meets and uses, because a manifest is published put-if-absent too.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Literal

from pydantic import BaseModel, ConfigDict

from storage import layout, meter, records
from storage.backends.root import Root
from storage.errors import LeaseHeld, LeaseLost, StorageError
from storage.ownership.process import SYSTEM, Clock, Life, Owner, life, this_process

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""How long a holder that is heard of no more keeps the run."""


class Entry(BaseModel):
    """One entry of a lease's log."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    """Version of this record's own format."""
    number: int
    """Position in the log, from 1."""
    kind: Literal["acquired", "renewed", "released"]
    epoch: int
    """Fencing token: number of the entry by which this holder acquired the lease."""
    token: str
    """Random: tells this acquisition from all others."""
    owner: Owner
    """Who holds it; of a `released` entry, who ended it."""
    written: datetime
    """By the holder's clock (UTC)."""
    expires: datetime
    """Until when it holds without a further entry."""


class Lease:
    """A lease held by this process. Safe to use from several threads."""

    def __init__(self, root: Root, run: str, entry: Entry, confirmed: float, clock: Clock = SYSTEM) -> None:
        self.root, self.run, self.clock = root, run, clock
        self.seconds = (entry.expires - entry.written).total_seconds()
        self._entry, self._confirmed = entry, confirmed
        self._lost: str | None = None
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """Fencing token: higher for every later holder."""
        return self._entry.epoch

    def check(self) -> None:
        """See that the lease is still held, by the clock and in the store.

        Raises:
            LeaseLost: it ran out, was taken over, or was ended.
        """
        with self._lock:
            self._check_time()
            while self.root.exists(layout.lease_key(self.run, self._entry.number + 1)):
                self._yield_to(_read(self.root, self.run, self._entry.number + 1))

    def renew(self) -> None:
        """Hold it for another whole period from now.

        Raises:
            LeaseLost: as `check`.
        """
        with self._lock:
            self._check_time()
            self._append("renewed", self.seconds)

    def release(self) -> None:
        """Let another process have the run at once; a lease that is lost already stays lost."""
        with self._lock:
            if self._lost is None:
                self._lost = "it was released"
                try:
                    self._append("released", 0)
                except StorageError as failure:
                    logger.warning("the lease of run %s could not be released: %s", self.run, failure)

    def _check_time(self) -> None:
        if self._lost is None and self.clock.steady() - self._confirmed >= self.seconds:
            self._lost = f"it was not renewed for {self.seconds:g} s"
        if self._lost is not None:
            raise LeaseLost(f"this process drives run {self.run} no longer: {self._lost}. Start the same command again")

    def _append(self, kind: Literal["renewed", "released"], seconds: float) -> None:
        while True:
            before, now = self.clock.steady(), self.clock.wall()
            entry = self._entry.model_copy(
                update={
                    "number": self._entry.number + 1,
                    "kind": kind,
                    "written": now,
                    "expires": now + timedelta(seconds=seconds),
                }
            )
            winner = _append(self.root, self.run, entry)
            if winner == entry:
                self._entry, self._confirmed = entry, before
                return
            self._yield_to(winner)

    def _yield_to(self, winner: Entry) -> None:
        if winner.token == self._entry.token and winner.kind == "renewed":
            self._entry = winner  # an earlier renewal of ours, whose answer never came: it confirms nothing
            return
        verb = "ended" if winner.kind == "released" else "taken over"
        self._lost = f"it was {verb} by {winner.owner}"
        self._check_time()


def newest(root: Root, run: str) -> Entry | None:
    """The newest entry of a run's lease, or None if nobody ever held it."""
    numbers = [layout.lease_number(key) for key in root.keys(layout.lease_folder(run)) if layout.is_lease(key)]
    return _read(root, run, max(numbers)) if numbers else None


def holder(root: Root, run: str, clock: Clock = SYSTEM) -> Entry | None:
    """The entry by which a process drives the run now, or None if it is free."""
    entry = newest(root, run)
    return None if _is_free(entry, clock) else entry


def check_free(root: Root, run: str, clock: Clock = SYSTEM) -> None:
    """Refuse early what `acquire` would refuse at once.

    Raises:
        LeaseHeld: a process of this machine that is running drives the run.
    """
    entry = holder(root, run, clock)
    if entry is not None and life(entry.owner) is Life.ALIVE:
        raise LeaseHeld(explain(run, entry, clock))


def acquire(
    root: Root,
    run: str,
    owner: Owner,
    seconds: float = LEASE_SECONDS,
    clock: Clock = SYSTEM,
    pause: Callable[[float], None] = time.sleep,
) -> Lease:
    """Get the lease, waiting at most until the present one runs out.

    Of a holder on this machine it is known at once whether it lives. Another one lives if it renews while we wait.

    Raises:
        LeaseHeld: the holder is alive.
    """
    waiting_for: Entry | None = None
    while True:
        last = newest(root, run)
        if _is_free(last, clock):
            before, entry = clock.steady(), _acquisition(last, owner, seconds, clock)
            # looked at again: a number that gc removed long ago could be free without being the newest
            if _append(root, run, entry) == entry == newest(root, run):
                return Lease(root, run, entry, before, clock)
            continue
        assert last is not None
        if life(last.owner) is Life.ALIVE or (waiting_for is not None and waiting_for != last):
            raise LeaseHeld(explain(run, last, clock))
        waiting_for = last
        pause(min(0.5, max(0.01, (last.expires - clock.wall()).total_seconds())))


@contextmanager
def hold(root: Root, run: str, owner: str, seconds: float = LEASE_SECONDS) -> Iterator[Lease]:
    """Hold the lease of `run` for a block of code, renewing it from a thread of its own.

    The block learns of a loss by `check()`, and a commit that is given the lease as its fence refuses.

    Raises:
        LeaseHeld: another process drives the run.
    """
    lease = acquire(root, run, this_process(owner), seconds)
    stop = threading.Event()
    thread = threading.Thread(target=_keep, args=(lease, stop, seconds / 3), name=f"lease-{run}", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        stop.set()
        thread.join()
        lease.release()


def unlock(root: Root, run: str, owner: Owner, *, force: bool = False, clock: Clock = SYSTEM) -> tuple[bool, str]:
    """End the lease of a holder that is dead, or of any with `force`.

    Returns:
        Whether the run is free now, and an explanation of who held it.
    """
    last = newest(root, run)
    if last is None or last.kind == "released":
        return True, f"run {run} is driven by nobody"
    explanation = explain(run, last, clock)
    if not force and not _is_free(last, clock):
        return False, explanation
    now = clock.wall()
    ended = {"number": last.number + 1, "kind": "released", "owner": owner, "written": now, "expires": now}
    entry = last.model_copy(update=ended)
    if _append(root, run, entry) != entry:
        return False, f"{explanation}. It renewed its lease just now, so it is alive"
    return True, explanation


def explain(run: str, entry: Entry, clock: Clock = SYSTEM) -> str:
    """Who drives a run, and what can be done about it."""
    left = (entry.expires - clock.wall()).total_seconds()
    heard = f"last heard of at {entry.written:%Y-%m-%d %H:%M:%S} UTC"
    match life(entry.owner):
        case Life.DEAD:
            return f"run {run} was driven by {entry.owner}, which is gone: the run can be taken over at once"
        case _ if left <= 0:
            return f"run {run} was driven by {entry.owner}, {heard}; its lease has run out: the run can be taken over"
        case Life.ALIVE:
            return f"run {run} is driven by {entry.owner}, which is running. Wait for it or stop it"
        case _:
            return (
                f"run {run} is driven by {entry.owner}, {heard}. If it is heard of no more, the run is free in "
                f"{left:.0f} s; if you know that it is dead, `ratchet unlock {run} --force` frees it now"
            )


def _is_free(entry: Entry | None, clock: Clock) -> bool:
    if entry is None or entry.kind == "released":
        return True
    return clock.wall() >= entry.expires or life(entry.owner) is Life.DEAD


def _acquisition(last: Entry | None, owner: Owner, seconds: float, clock: Clock) -> Entry:
    number, now = 1 if last is None else last.number + 1, clock.wall()
    return Entry(
        number=number,
        kind="acquired",
        epoch=number,
        token=uuid.uuid4().hex,
        owner=owner,
        written=now,
        expires=now + timedelta(seconds=seconds),
    )


def _append(root: Root, run: str, entry: Entry) -> Entry:
    """Publish `entry`, or return the one that has its number."""
    key = layout.lease_key(run, entry.number)
    if records.publish(root, key, entry):
        return entry
    return _read(root, run, entry.number)  # ours after all, if only the answer was lost


def _read(root: Root, run: str, number: int) -> Entry:
    return records.read(root, layout.lease_key(run, number), Entry)


def _keep(lease: Lease, stop: threading.Event, every: float) -> None:
    while not stop.wait(every):
        try:
            with meter.separate():  # no stage waits for it
                lease.renew()
        except LeaseLost as loss:
            logger.warning("%s", loss)
            return
        except StorageError as failure:
            logger.warning("the lease of run %s could not be renewed yet: %s", lease.run, failure)
