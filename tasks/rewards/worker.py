"""A scoring process: forks the process in which the function runs, keeps its deadline, and leaves no process behind.
`tasks.rewards.pool` writes one line for each response or batch and reads one for each. The first line is the order. It
ends, and everything that the function started with it, when its standard input does."""

import ctypes
import json
import os
import re
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import psutil

from tasks.rewards.calling import Caller, NotCallable
from tasks.rewards.sample import Sample
from tasks.rewards.words import SAID_LAST, described, exit_words, hide, storable
from trainer_core.user_code import UserFunction

_PARENT_DEATH_SIGNAL = 1
_CHILD_SUBREAPER = 36
_CHUNK = 1 << 16
_SAID = 8192
_PATIENCE_S = 10.0
_SCORE = re.compile(rb'"reward": [-0-9]')  # of an answer


class OwnerGone(Exception):
    """Nobody waits for an answer any more."""


class Ended(Exception):
    """The process in which the function runs has ended."""


class Unusable(Exception):
    """The function cannot be imported."""


class Scorer:
    """The process in which the function runs."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        (take, self._samples), (self._answers, give), (self._said, say) = os.pipe(), os.pipe(), os.pipe()
        self._ends = [self._samples, self._answers, self._said]
        self.pid = os.fork()
        if self.pid == 0:
            for end in self._ends:
                os.close(end)
            _serve(order, take, give, say)
        for end in (take, give, say):
            os.close(end)
        self._life = os.pidfd_open(self.pid)
        self._open = {self._answers, self._said, self._life, 0}
        self._received, self._last = bytearray(), b""
        self.fresh = self.cold = True
        os.set_blocking(self._samples, False)

    def ask(self, line: bytes, deadline_s: float) -> bytes | None:
        """The answer to a line; None if there is none within the deadline. Raises Ended (the process has ended without
        an answer), or OwnerGone (nobody waits for it any more)."""
        until, pending = time.monotonic() + deadline_s, memoryview(line)
        while (left := until - time.monotonic()) > 0:
            readable, writable, _ = select.select(self._open, [self._samples] if pending else [], [], left)
            if 0 in readable:
                raise OwnerGone
            if writable:
                try:
                    pending = pending[os.write(self._samples, pending[:_CHUNK]) :]
                except BrokenPipeError:
                    pending = pending[:0]  # its end is noticed by its descriptor
            if (answer := self._read(readable)) is not None:
                self.fresh = False
                self.cold = self.cold and _SCORE.search(answer) is None
                return answer
            if self._life in readable and self._answers not in readable:
                raise Ended
        return None

    def stopped(self) -> bool:
        """True if a signal has stopped it: so it does not have the time that passes."""
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def end(self) -> str:
        """The end of the process, in words; it is killed, with everything that it started, if it runs."""
        code = killed_with_descendants(self.pid)
        os.set_blocking(self._said, False)
        with suppress(BlockingIOError):
            self._last += os.read(self._said, _CHUNK)
        for end in (*self._ends, self._life):
            os.close(end)
        words = storable(self._last.decode(errors="replace").strip())
        return f"its process ended {exit_words(code)}" + (f"{SAID_LAST}{words}" if words else "")

    def _read(self, readable: list[int]) -> bytes | None:
        if self._said in readable:
            data = os.read(self._said, _CHUNK)
            self._last = (self._last + data)[-_SAID:]
            self._open -= set() if data else {self._said}
        if self._answers in readable:
            data = os.read(self._answers, _CHUNK)
            self._open -= set() if data else {self._answers}
            self._received += data
            if b"\n" in data:  # the last byte: nothing is asked before the answer
                line, self._received = bytes(self._received), bytearray()
                return line.rstrip(b"\n") + b"\n"
        return None


class Keeper:
    """Answers one line after another, by one scorer after another. The first calls of a scorer import libraries and
    load models. Until one has given a score, each has as long beyond its deadline as the import may take; half of it
    after each time that this was not enough, so that a function that hangs whenever it is called does not hold up the
    run, but not less than twice of what was enough once."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order, self._scorer, self._source = order, None, None
        self._allowance_s, self._needed_s = order["start_deadline_s"] if order["lazy"] else 0.0, 0.0

    def answer(self, deadline_s: float, line: bytes) -> bytes:
        """The answer to one line. A death counts only in a fresh process: it may be due to an earlier sample. A
        time-out counts only in one that had time for loading, unless that has often not been enough; and one that a
        signal had stopped, only the second time, when the function does that itself."""
        stopped = False
        while True:
            current = self.started()
            fresh, cold, begun = current.fresh, current.cold, time.monotonic()
            beyond_s = max(self._allowance_s, self._needed_s)
            patience_s = deadline_s + (beyond_s if cold else 0.0)
            try:
                answer = current.ask(line, patience_s)
            except Ended:
                how = self._end()
                if fresh:
                    return _line(status="failed", reason="exit", detail=how)
                continue
            if answer is None:
                before, stopped = stopped, current.stopped()
                self._end()
                if stopped and not before:
                    continue
                if not cold and beyond_s > deadline_s:
                    continue  # it may be the first that loads something: again, with the time for that
                self._allowance_s /= 2 if cold else 1
                more = f", nor within {patience_s - deadline_s:.3g} s more, which the first calls of a process have"
                late = f"no score within {deadline_s:g} s" + (more if patience_s > deadline_s else "")
                return _line(status="failed", reason="timeout", detail=late)
            if cold:
                self._needed_s = max(self._needed_s, 2 * (time.monotonic() - begun - deadline_s))
            return answer

    def started(self) -> Scorer:
        """The scorer, whose first line is then `hello`. Raises Unusable."""
        if self._scorer is not None:
            return self._scorer
        self._scorer = Scorer(self._order)
        try:
            hello = self._scorer.ask(b"", self._order["start_deadline_s"])
        except Ended:
            raise Unusable(f"while it was imported, {self._end()}") from None
        if hello is None:
            self._end()
            raise Unusable(f"it was not imported within {self._order['start_deadline_s']:g} s")
        said = json.loads(hello)
        if said["status"] != "ready":
            self._end()
            raise Unusable(said["detail"])
        if self._source not in (None, said["source"]):
            self._end()
            raise Unusable("its file has changed while the stage was scoring")
        self._source, self.hello, self._scorer.fresh = said["source"], hello, True
        return self._scorer

    def _end(self) -> str:
        ended, self._scorer = self._scorer, None
        return ended.end() if ended is not None else ""


def main() -> None:
    """Read the order, then lines of a deadline in seconds, a tab and what is to be scored."""
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the function starts stays below this process
    with suppress(OwnerGone, BrokenPipeError):
        order = json.loads(_next_line())
        hide(order["secrets"])
        keeper, given = Keeper(order), None
        while True:
            try:
                if given is None:
                    keeper.started()
                    answer = keeper.hello
                else:
                    deadline, _, line = given.partition(b"\t")
                    answer = keeper.answer(float(deadline), line)
            except Unusable as reason:
                answer = _line(status="refused", detail=str(reason))
            _write(1, answer)
            given = _next_line()
    killed_with_descendants(None)


def _next_line() -> bytes:
    """The next line. The owner writes one, and then waits for the answer."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, _CHUNK)  # without a buffer, which a fork would copy
        if not data:
            raise OwnerGone
        line += data
    return bytes(line)


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _line(**values: Any) -> bytes:
    return f"{json.dumps(values)}\n".encode()


def killed_with_descendants(pid: int | None) -> int:
    """Kill everything below this process until nothing is left; the exit code of `pid`, negative for a signal."""
    code, until = 0, time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        for one in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1]) if ended[0] == pid else code
        except ChildProcessError:
            break
        time.sleep(0.002)
    return code


def _serve(order: Mapping[str, Any], samples: int, answers: int, said: int) -> NoReturn:
    """The forked process: import the function, then read one line from `samples` and write one to `answers` for each
    response or batch. Standard output and standard error lead to `said`."""
    _detach(said)
    pid = os.getpid()
    try:
        caller, source = _prepared(order)
        _answer(pid, answers, status="ready", source=source, wants_sample=caller.wants_sample)
        with os.fdopen(samples, "rb") as lines:
            for line in lines:
                _answer(pid, answers, status="scored", scores=_scored(caller, json.loads(line)))
    except NotCallable as error:
        _answer(pid, answers, status="refused", detail=storable(str(error)))
    except BaseException as error:  # noqa: BLE001 - a module may raise anything while it is imported, also SystemExit
        _answer(pid, answers, status="refused", detail=described(error))
    finally:
        os._exit(0)


def _prepared(order: Mapping[str, Any]) -> tuple[Caller, str]:
    loaded = UserFunction(**order["target"]).load()
    if not callable(loaded.function) or isinstance(loaded.function, type):
        is_class, kind = isinstance(loaded.function, type), type(loaded.function).__name__
        it = "a class, not a function: name an instance of it" if is_class else f"of type {kind}, not a function"
        raise NotCallable(f"{order['target']['attribute']} is {it}")
    caller = Caller(loaded.function, order["arguments"], order["weights"], order["batch"], caught=BaseException)
    return caller, loaded.digest


def _scored(caller: Caller, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    samples = asked.get("samples")
    given = None if samples is None else [Sample(**{**one, "tokens": tuple(one["tokens"])}) for one in samples]
    if caller.batched:
        scores = caller.batch(asked["records"], asked["responses"], given)
    else:
        scores = [caller.one(asked["records"][0], asked["responses"][0], given[0] if given else None)]
    return [asdict(score) for score in scores]


def _detach(said: int) -> None:
    keeper = os.getppid()
    os.setsid()  # a function that signals its group does not reach the keeper
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(source, target)


def _answer(pid: int, stream: int, **value: Any) -> None:
    if os.getpid() != pid:  # the function forked, and this is the other one
        os._exit(0)
    _write(stream, _line(**value))


if __name__ == "__main__":
    main()
