"""Processes of pytest-xdist, forked from the one that reports once that has imported the tests.

Else each of them imports the tests and all they use, for 15 seconds of processor.
"""

import atexit
import gc
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO, get_execmodel
from execnet.xspec import XSpec
from hypothesis.internal.conjecture.providers import _get_local_constants

from tests.fork_servers import PROJECT
from trainer_core.collector import paused


class _Forked(Popen2IO):
    """A process that is one of ours, and its ends of two pipes; see execnet's `Popen2IOMaster`."""

    def __init__(self, others: Iterable["_Forked"]) -> None:
        (orders, ours), (theirs, answers) = os.pipe(), os.pipe()
        self._process = os.fork()
        if not self._process:
            for file in (ours, theirs, *(file.fileno() for one in others for file in (one.infile, one.outfile))):
                os.close(file)
            _become(orders, answers)
        os.close(orders)
        os.close(answers)
        super().__init__(os.fdopen(ours, "wb"), os.fdopen(theirs, "rb"), get_execmodel("main_thread_only"))

    def wait(self) -> int | None:
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        return None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)


def fork(specs: Sequence[XSpec], places: Iterable[Path]) -> None:
    """Fork a process for each specification, before any thread of execnet is started, and let execnet take these.

    One that is started later, in place of one that has crashed, begins as always.
    """
    with paused():
        _import_tests(places)
        _get_local_constants()  # Hypothesis reads all our files for them, in each process that has not yet done so
    gc.freeze()  # else each process would copy what is imported when it first collects garbage
    made: list[_Forked] = []
    with warnings.catch_warnings():
        # pyarrow's allocator has threads, of which Python warns at each fork; pyarrow is safe to fork
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in specs:
            made.append(_Forked(made))
    begun, create = iter(made), gateway_io.create_io

    def create_io(spec: XSpec, execmodel: ExecModel) -> Popen2IO:
        return next(begun, None) or create(spec, execmodel)

    gateway_io.create_io = create_io


def _import_tests(places: Iterable[Path]) -> None:
    """Import the modules of tests there; one that cannot be imported fails where its tests are collected."""
    for place in map(Path.resolve, places):
        for file in sorted(place.rglob("test_*.py")) if place.is_dir() else [place]:
            with suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(file.relative_to(PROJECT).with_suffix("").parts))


def _become(orders: int, answers: int) -> None:
    """Turn this process into what `python -c` with execnet's first line is."""
    code = 1
    try:
        for number, file in enumerate((orders, answers)):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(file, mode, closefd=False) for file, mode in enumerate("rww"))
        sys.argv, sys.modules["__main__"] = ["-c"], ModuleType("__main__")
        exec(gateway_io.popen_bootstrapline, vars(sys.modules["__main__"]))
        code = 0
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        os._exit(code)
