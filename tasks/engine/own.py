"""An engine of the user's own: loaded by name, compared with the protocol, and every answer of it checked. As a program
it reads the `engine` table from standard input, and writes the refusal, if there is one, to standard output."""

import contextlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from storage.errors import InputError, RatchetError, user_line
from storage.functions import mismatch, refuses
from tasks.config.run import ENGINES, EngineSection
from tasks.engine.base import BaseEngine
from tasks.engine.protocol import (
    COMPLETIONS,
    NOTHING,
    Arrived,
    Begun,
    Collected,
    EngineIdentity,
    EngineProtocol,
    EngineSpec,
    Increment,
)
from trainer_core.objectives.user_config import found_code
from trainer_core.user_code import UserFunction

_METHODS = {name: one for name, one in vars(EngineProtocol).items() if inspect.isfunction(one) and name[0] != "_"}
_REASONS = ("stop", "length", "abort")

_Queued = dict[int, Sequence[Begun]]  # the beginnings of the responses of each batch that is under way, by its number


def find_engine(function: str, source: str) -> UserFunction:
    """The class that `engine.function` names, not imported. Raises InputError: it is not there, or not of `source`."""
    return found_code(function, source, "engine", ENGINES)[0]


def load_engine(target: UserFunction) -> type[Any]:
    """Import the class. Raises InputError: it cannot be imported, or is not a class with `EngineProtocol`."""
    with _refusing(target):
        kind = target.load().function
    if not isinstance(kind, type):
        raise InputError(f"{_named(target)} is of type {type(kind).__name__}: expected a class with `EngineProtocol`")
    own = BaseEngine.__abstractmethods__ if issubclass(kind, BaseEngine) else ()  # what a subclass must have besides
    for name, method in {**_METHODS, **{name: vars(BaseEngine)[name] for name in own}}.items():
        if (found := inspect.getattr_static(kind, name, None)) is None or found is method:
            raise _unlike(target, kind, f"has no method {name!r}", _form(name, method))
        if inspect.isfunction(found) and (head := mismatch(found, *inspect.signature(method).parameters)) is not None:
            raise _unlike(target, found, f"has {head}", _form(name, method))
    if refuses(kind, "spec"):
        raise _unlike(target, kind, f"is made with {inspect.signature(kind)}", "__init__(self, spec)")
    return kind


class OwnEngine(EngineProtocol):
    """A user's engine behind the protocol. What it answers is checked; an error of its code is an InputError with the
    line, but for those of ours, of the operating system and of memory, after which a stage is tried again."""

    def __init__(self, target: UserFunction, spec: EngineSpec) -> None:
        """Make the engine. Raises InputError: as `load_engine`, or it cannot be made."""
        kind = load_engine(target)
        self._target = target
        self._begun: _Queued = {}
        with _refusing(target):
            self._engine: EngineProtocol = kind(spec)

    @classmethod
    def of(cls, target: UserFunction, spec: EngineSpec) -> Self:
        """An engine; a type checker cannot see that the calls are forwarded, and refuses `cls` by name."""
        return cls(target, spec)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the engine, and check its answer."""
        with _refusing(self._target):
            found = operator.methodcaller(name, *arguments)(self._engine)
        flaw = _CHECKS[name](self._begun, arguments, found) if name in _CHECKS else None
        if flaw is not None:
            place = _line(self._target, inspect.getattr_static(type(self._engine), name))
            raise InputError(f"{_named(self._target)} returns {flaw} from {name}{place}")
        if name == "enqueue":
            number, prompts, _, _, begun, *_ = arguments
            self._begun[number] = begun or [NOTHING] * len(prompts)
        return found


def _forwarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    def forward(self: OwnEngine, *arguments: Any, **options: Any) -> Any:
        bound = signature.bind(self, *arguments, **options)
        bound.apply_defaults()
        return self.call(name, *bound.args[1:])

    return forward


for _name, _method in _METHODS.items():
    setattr(OwnEngine, _name, _forwarded(_name, _method))


def _of_kind(kind: type) -> Callable[[_Queued, tuple[Any, ...], object], str | None]:
    return lambda _, __, found: None if isinstance(found, kind) else f"a {type(found).__name__}, not {kind.__name__},"


def _collected(queued: _Queued, _: tuple[Any, ...], found: object) -> str | None:
    if not isinstance(found, Collected):
        return f"a {type(found).__name__}, not Collected,"
    for one in (*found.finished, *found.increments):
        if one.number not in queued:
            return f"batch {one.number}, which was not queued,"
    for one in found.finished:
        begun = queued[one.number]
        if (flaw := _batch_flaw(one.completions, len(begun)) or _beginning_flaw(one.completions, begun)) is not None:
            return f"{flaw} as batch {one.number}"
    return next(filter(None, (_growth_flaw(one, queued[one.number]) for one in found.increments)), None)


def _beginning_flaw(found: pa.RecordBatch, begun: Sequence[Begun]) -> str | None:
    for row, (one, tokens) in enumerate(zip(begun, found["response_tokens"], strict=True)):
        there = tokens.values.to_numpy()[: len(one.tokens)]
        if not np.array_equal(there, one.tokens):
            return f"response {row} that begins with {there.tolist()}, not with what was begun, {one.tokens.tolist()},"
    return None


def _growth_flaw(one: Increment, begun: Sequence[Begun]) -> str | None:
    if not (0 <= one.row < len(begun) and one.first >= len(begun[one.row].tokens)):
        return f"an increment of batch {one.number} for row {one.row} from token {one.first}, which is not there,"
    tokens, logprobs = one.grown
    fits = len(tokens) == len(logprobs) > 0 and np.isfinite(logprobs).all()
    return None if fits else f"an increment of {len(tokens)} tokens and {len(logprobs)} finite log-probabilities"


def _batch_flaw(found: Any, prompts: int) -> str | None:
    """The flaw of sampled responses, with the expected value; None if there is none."""
    if not isinstance(found, pa.RecordBatch) or found.schema != COMPLETIONS:
        given = found.schema.to_string() if isinstance(found, pa.RecordBatch) else f"a {type(found).__name__}"
        return f"{given!r}, not a record batch of the schema {COMPLETIONS.to_string()!r},"
    if found.num_rows != prompts:
        return f"{found.num_rows} responses to {prompts} prompts"
    tokens, logprobs = found["response_tokens"], found["logprobs"]
    if not tokens.value_lengths().equals(logprobs.value_lengths()):
        return "another number of log-probabilities than of tokens"
    if not np.isfinite(logprobs.flatten().to_numpy()).all():
        return "log-probabilities that are not finite"
    if unknown := set(found["finish_reason"].to_pylist()).difference(_REASONS):
        return f"the finish_reason {sorted(unknown)[0]!r}, not one of {', '.join(_REASONS)},"
    return None


def _scored(_: _Queued, arguments: tuple[Any, ...], found: Any) -> str | None:
    wanted = [len(sequence) - 1 for sequence in arguments[0]]
    arrays = isinstance(found, list) and all(isinstance(one, np.ndarray) and one.dtype == np.float32 for one in found)
    if not arrays:
        return f"a {type(found).__name__}, not a list of float32 arrays,"
    if (sizes := [one.size for one in found]) != wanted:
        return f"arrays of {sizes} log-probabilities, not {wanted},"
    return None if all(np.isfinite(one).all() for one in found) else "log-probabilities that are not finite"


_CHECKS = {
    "identity": _of_kind(EngineIdentity),
    "generate": lambda _, arguments, found: _batch_flaw(found, len(arguments[0])),
    "collect": _collected,
    "score": _scored,
    "prepare_update": _of_kind(str),
    "receive_update": _of_kind(Arrived),
    "commit_update": _of_kind(EngineIdentity),
    "abort_update": _of_kind(bool),
    "held": _of_kind(dict),
    "drop": _of_kind(dict),
    "sleep": _of_kind(bool),
}


def _form(name: str, method: Callable[..., Any]) -> str:
    return f"{name}({', '.join(inspect.signature(method).parameters)})"


def _unlike(target: UserFunction, where: Any, fact: str, form: str) -> InputError:
    return InputError(f"{_named(target)} {fact}{_line(target, where)}: expected `def {form}`")


def _named(target: UserFunction) -> str:
    return f"engine.function {target.name!r}"


def _line(target: UserFunction, where: Any) -> str:
    """Line of a class or function of the user's, as ` (name.py, line 3)`; the file alone if the line is not known."""
    try:
        file, line = inspect.getsourcefile(where) or target.place, inspect.getsourcelines(where)[1]
    except (OSError, TypeError):
        return f" ({Path(target.place).name})"
    return f" ({Path(file).name}, line {line})"


@contextmanager
def _refusing(target: UserFunction) -> Iterator[None]:
    """A block of the user's code, whose errors become ours."""
    try:
        yield
    except (RatchetError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        told = f"{type(error).__name__}: {error}{user_line(error)}"
        raise InputError(f"{_named(target)} fails: {told}") from error


def main() -> None:
    """Load the engine that the table of standard input names."""
    section = EngineSection.model_validate_json(sys.stdin.read())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            load_engine(find_engine(str(section.function), section.source))
    except (RatchetError, OSError, MemoryError) as error:
        sys.stdout.write(str(error))


if __name__ == "__main__":
    main()
