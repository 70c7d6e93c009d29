"""Output of the command line: results to standard output, everything else to standard error."""

import json as json_format
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import IO, Self

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from storage.errors import StageFailed

_STDOUT, _STDERR = 1, 2


def figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def size(count: int) -> str:
    """Bytes in units of 1024."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(number: int, noun: str) -> str:
    """A number of things, as `1 run` or `2 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: Sequence[str], most: int, left: str = "", between: str = ", ") -> str:
    """The first names, and how many more there are; `left` says where those can be found."""
    more = f" and {len(names) - most} more{left}" if len(names) > most else ""
    return f"{between.join(names[:most])}{more}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [row.rstrip() for row in aligned]


class Output:
    """Standard output for the result, standard error for messages.

    With `json`, inside the `with` block the descriptor of standard output leads to standard error, so that no output of
    a library or a child process mixes with the JSON."""

    def __init__(self, json: bool = False) -> None:
        self.json = json
        self.console = Console(stderr=True)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):  # a prompt may have signs that the terminal's encoding lacks
                stream.reconfigure(errors="backslashreplace")
        self._result: IO[str] = sys.stdout
        self._saved: int | None = None

    def __enter__(self) -> Self:
        if self.json:
            sys.stdout.flush()
            self._saved = os.dup(_STDOUT)
            os.dup2(_STDERR, _STDOUT)
            self._result = os.fdopen(self._saved, "w", closefd=False, errors="backslashreplace")
        return self

    def __exit__(self, *_: object) -> None:
        self._result.flush()
        if self._saved is not None:
            os.dup2(self._saved, _STDOUT)
            os.close(self._saved)

    def result(self, model: BaseModel, lines: Sequence[str | Text]) -> None:
        """Write the result: one line of JSON, in which a number that is not finite is null, or lines for people."""
        if self.json:
            self._result.write(f"{json_format.dumps(json_format.loads(model.model_dump_json()))}\n")
        else:
            for line in lines:
                self._line(line)
        self._result.flush()

    @classmethod
    def show(cls, json: bool, model: BaseModel, lines: Sequence[str | Text], good: bool = True) -> int:
        """Write a result that is complete; returns the exit code, 0 for a good one."""
        with cls(json=json) as output:
            output.result(model, lines)
        return 0 if good else StageFailed.exit_code

    def text(self, text: str) -> None:
        """Write a text to standard output as it is."""
        self._result.write(text)
        self._result.flush()

    def _line(self, line: str | Text) -> None:
        if isinstance(line, Text) and self._result.isatty():
            Console(file=self._result).print(line, soft_wrap=True)
        else:
            self._result.write(f"{line}\n")

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def error(self, message: str) -> None:
        self.console.print(Text(f"ratchet: {message}", style="red"), soft_wrap=True, highlight=False)
