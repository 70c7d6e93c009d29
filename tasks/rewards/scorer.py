"""The process in which a reward function runs: forked by `tasks.rewards.worker`, killed by it at the end."""

import ctypes
import importlib
import inspect
import json
import os
import signal
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from tasks.rewards.calling import Caller, NotCallable
from tasks.rewards.sample import Sample
from tasks.rewards.words import described, storable

_PARENT_DEATH_SIGNAL = 1
_FILE_MODULE = "ratchet_reward_file"
_OURS = {"flows", "tasks", "trainer_core", "storage"}
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARY = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")}


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
    before = set(sys.modules)
    function, file = _loaded(order["place"], order["attribute"], order["text"])
    if not callable(function):
        raise NotCallable(f"{order['attribute']} is a {type(function).__name__}, not a function")
    caller = Caller(function, order["arguments"], order["weights"], order["batch"], caught=BaseException)
    own, text = (file, file.read_bytes()) if order["text"] is None else (Path(order["place"]), order["text"].encode())
    read = [text, *(one.read_bytes() for one in _imported(before, own))]
    # storage.digest would import pyarrow, whose threads forbid a fork
    digests = [xxhash.xxh3_128_hexdigest(one) for one in read]
    return caller, digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())


def _imported(before: Set[str], own: Path) -> list[Path]:
    """The other files of the user's own that the import of a function has read: not of installed packages, not ours."""
    new = {name: one for name, one in sys.modules.items() if name not in before and isinstance(one, types.ModuleType)}
    theirs = [vars(one).get("__file__") for name, one in new.items() if name.partition(".")[0] not in _OURS]
    files = {Path(place) for place in theirs if isinstance(place, str)}
    return sorted(one for one in files - {own} if one.is_file() and not _is_installed(one))


def _is_installed(file: Path) -> bool:
    parts = file.parts
    return bool(_INSTALLED & set(parts)) or any(file.is_relative_to(place) for place in _LIBRARY)


def _loaded(place: str, attribute: str, text: str | None) -> tuple[Any, Path]:
    """The function, and the file it is from."""
    if text is None:
        module = importlib.import_module(place)
    else:
        stem = Path(place).stem
        module = types.ModuleType(_FILE_MODULE if stem in sys.modules else stem)
        module.__file__ = place
        sys.modules[module.__name__] = module  # dataclasses and pickle look for it
        sys.path.insert(0, str(Path(place).parent))
        # from the text and not from a cache of compiled code, which an edit within one second would not invalidate
        exec(compile(text, place, "exec"), vars(module))
    if attribute not in vars(module):
        raise AttributeError(f"{Path(place).name} has no {attribute!r}")
    function = vars(module)[attribute]
    return function, Path(_file_of(function) or inspect.getfile(module))


def _file_of(function: Callable[..., Any]) -> str | None:
    code = inspect.unwrap(function) if callable(function) else function
    return code.__code__.co_filename if isinstance(code, types.FunctionType) else None


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
