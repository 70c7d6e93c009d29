"""Texts about the acts of a reward function, as they may be stored: short, without its secrets, encodable."""

import re
import reprlib
import signal
import traceback
from collections.abc import Iterable
from pathlib import Path

from trainer_core import user_code

LONGEST = 1000  # characters of a text, about
SAID_LAST = "; it said last: "  # before the words of which the last ones matter
_PLACE = re.compile(r" \([^()\n]{1,100}, line \d+\)$")
_ROOM = 8 * LONGEST  # the owner knows more secrets, and shortens after it has taken them out
_MASK = "***"
_SIGNALS = {one.value: one.name for one in signal.Signals}  # those between SIGRTMIN and SIGRTMAX have no name
_LIBRARIES = ("site-packages", "importlib", "asyncio")
_OURS = (Path(__file__).parents[1], Path(user_code.__file__).parent)

_brief = reprlib.Repr(maxstring=_ROOM, maxother=_ROOM)  # few of many, but no text cut in two
_hidden: list[str] = []


def hide(secrets: Iterable[str]) -> None:
    """Keep these values out of every text of this process."""
    _hidden[:] = sorted(filter(None, {*_hidden, *secrets}), key=len, reverse=True)  # one may contain another


def storable(text: str) -> str:
    """A text without secrets and without signs that UTF-8 cannot encode."""
    for secret in _hidden:
        text = text.replace(secret, _MASK)
    return text[:_ROOM].encode(errors="backslashreplace").decode()


def shortened(text: str) -> str:
    """The beginning of a text, with the place of an error, and the end of the words that were said last."""
    head, mark, said = text.partition(SAID_LAST)
    place = _PLACE.search(head[LONGEST:])
    return head[:LONGEST] + (place.group() if place else "") + mark + said[-LONGEST // 2 :]


def exit_words(code: int) -> str:
    """The end of a process by its exit code; one below 0 is that of a signal."""
    return f"by signal {_SIGNALS.get(-code, -code)}" if code < 0 else f"with code {code}"


def shown(value: object) -> str:
    try:
        return _brief.repr(storable(value) if isinstance(value, str) else value)
    except Exception:  # noqa: BLE001 - the value's own __repr__
        return f"a {type(value).__name__}"


def described(error: BaseException) -> str:
    """An error, with the line of the user's file that raised it. A group of one error is that error."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return described(error.exceptions[0])
    try:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # noqa: BLE001 - the error's own __str__
        text = type(error).__name__
    frames = [(frame, Path(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [one for one in frames if not any(one[1].is_relative_to(folder) for folder in _OURS)]
    own = [one for one in theirs if not any(library in one[0].filename for library in _LIBRARIES)]
    return storable(text) + "".join(f" ({file.name}, line {frame.lineno})" for frame, file in own[-1:])
