"""The process in which a reward function runs: forked by `tasks.rewards.worker`, killed by it at the end."""

import ctypes
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from tasks.rewards.calling import Caller, NotCallable
from tasks.rewards.sample import Sample
from tasks.rewards.words import described, storable
from trainer_core.user_code import UserFunction

_PARENT_DEATH_SIGNAL = 1


def serve(order: Mapping[str, Any], samples: int, answers: int, said: int) -> NoReturn:
    """Import the function, then read one line from `samples` and write one to `answers` for each response or batch.

    Args:
        samples, answers: descriptors.
        said: descriptor to which standard output and standard error lead.
    """
    _detach(said)
    pid = os.getpid()
    try:
        caller, source = _prepared(order)
        _answer(pid, answers, {"status": "ready", "source": source, "wants_sample": caller.wants_sample})
        with os.fdopen(samples, "rb") as lines:
            for line in lines:
                _answer(pid, answers, _scored(caller, json.loads(line)))
    except NotCallable as error:
        _answer(pid, answers, {"status": "refused", "detail": storable(str(error))})
    except BaseException as error:  # noqa: BLE001 - a module may raise anything while it is imported, also SystemExit
        _answer(pid, answers, {"status": "refused", "detail": described(error)})
    finally:
        os._exit(0)


def _prepared(order: Mapping[str, Any]) -> tuple[Caller, str]:
    loaded = UserFunction(**order["target"]).load()
    if not callable(loaded.function):
        raise NotCallable(f"{order['target']['attribute']} is a {type(loaded.function).__name__}, not a function")
    caller = Caller(loaded.function, order["arguments"], order["weights"], order["batch"], caught=BaseException)
    return caller, loaded.digest


def _scored(caller: Caller, asked: Mapping[str, Any]) -> dict[str, Any]:
    samples = asked.get("samples")
    given = None if samples is None else [Sample(**{**one, "tokens": tuple(one["tokens"])}) for one in samples]
    if caller.batched:
        scores = caller.batch(asked["records"], asked["responses"], given)
    else:
        scores = [caller.one(asked["records"][0], asked["responses"][0], given[0] if given else None)]
    return {"status": "scored", "scores": [asdict(score) for score in scores]}


def _detach(said: int) -> None:
    keeper = os.getppid()
    os.setsid()  # a function that signals its group does not reach the keeper
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(source, target)


def _answer(pid: int, stream: int, value: Mapping[str, Any]) -> None:
    if os.getpid() != pid:  # the function forked, and this is the other one
        os._exit(0)
    data = memoryview(f"{json.dumps(value)}\n".encode())
    while data:
        data = data[os.write(stream, data) :]
