"""Programs against tests, in the sandbox."""

import itertools
import re
import secrets
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tasks.rewards.sandbox import ProgramLimits, Ran, check_image, check_sandbox, run_in_container, run_python

_FENCE = re.compile(r"[ \t]*(```+|~~~+)[ \t]*([\w+.-]*)")
_PYTHON = ("python", "python3", "py")
_PAIR = {"input", "output"}
_LONGEST = 200  # characters of an error that is told
SECONDS = 3.0  # for all tests of a response together, unless the arguments say otherwise


def code_tests(
    record: Mapping[str, Any],
    response: str,
    *,
    field: str = "tests",
    seconds: float = SECONDS,
    memory_mb: int = 512,
    image: str = "",
) -> float:
    """1.0 if the response's program passes all tests of the record; else 0.0, also if it needs more than `seconds` for
    all of them or more than `memory_mb` MiB. It runs under bubblewrap, or in a container of podman's `image`.

    The program is the last fenced block of Python, else the last without a name, else the whole response; what is
    thought before </think> does not count. A test is a text of Python statements, as `assert double(2) == 4`, which run
    after the program, or a table with the `input` that the program reads from standard input and the `output` that it
    must print. Raises as `read_tests`, and SandboxFailed, which are not scores."""
    return float(failed_test(record, response, field=field, seconds=seconds, memory_mb=memory_mb, image=image) is None)


def failed_test(
    record: Mapping[str, Any],
    response: str,
    *,
    field: str = "tests",
    seconds: float = SECONDS,
    memory_mb: int = 512,
    image: str = "",
) -> str | None:
    """The flaw at the first test that a response's program does not pass, in words that tell nothing of the test but
    the last line of the program's errors; None if all pass. Arguments and raises as `code_tests`."""
    statements, pairs = read_tests(record, field)
    program, until = program_of(response), time.monotonic() + seconds
    sandbox = partial(run_in_container, image) if image else run_python

    def run(text: str, given: str = "") -> Ran | None:
        left = until - time.monotonic()
        return sandbox(text, ProgramLimits(seconds=left, memory_mb=memory_mb), given) if left > 0 else None

    flaws = itertools.chain(
        (_flaw_of_statements(program, statements, run) for _ in statements[:1]),
        (_flaw(run(program, given), lambda out, of=expected: _lines(out) == _lines(of)) for given, expected in pairs),
    )
    return next((flaw for flaw in flaws if flaw is not None), None)


def check_programs(image: str = "") -> None:
    """Run a program as `code_tests` would with that image. Raises InputError: there is no such sandbox here."""
    if image:
        check_image(image)
    else:
        check_sandbox()


def read_tests(record: Mapping[str, Any], field: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The record's tests: statements, and pairs of input and output. Raises KeyError, TypeError, ValueError,
    SyntaxError: it has none, or one that is neither."""
    value = record[field]
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(f"{field} {value!r} has no test: give a text of statements, or a list")
    statements = [test for test in tests if isinstance(test, str)]
    pairs = [(test["input"], test["output"]) for test in tests if isinstance(test, dict) and set(test) == _PAIR]
    if len(statements) + len(pairs) < len(tests) or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise TypeError(
            f"{field} has a test that is neither a text of statements nor a table of input and output texts"
        )
    compile("\n".join(statements), field, "exec")
    return statements, pairs


def reads_tests(record: Mapping[str, Any], response: str, *, field: str = "tests") -> float:
    """1.0 if the record's tests can be read. Raises as `read_tests`."""
    return float(bool(read_tests(record, field)))


def program_of(response: str) -> str:
    answer = response.rpartition("</think>")[2]
    blocks = list(_blocks(answer))
    named, plain = ([text for name, text in blocks if name in some] for some in (_PYTHON, ("",)))
    return (named or plain or [answer])[-1]


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of an answer: the word behind the fence, in small letters, and the text."""
    opened, lines = None, list[str]()
    for line in answer.split("\n"):
        fence = _FENCE.match(line)
        if opened is None:
            opened, lines = fence, []
        elif fence and fence[1] == opened[1] and not fence[2]:
            yield opened[2].lower(), textwrap.dedent("".join(f"{one}\n" for one in lines))
            opened = None
        else:
            lines.append(line)


def _flaw_of_statements(program: str, statements: Sequence[str], run: Callable[[str], Ran | None]) -> str | None:
    """None if the program and the statements after it run to their end: a word that the program does not know is
    printed last, so that leaving early is not passing."""
    word = secrets.token_hex(16)
    ran = run("\n".join([program, *statements, f"print({word!r})"]))
    return _flaw(ran, lambda output: output.endswith(f"{word}\n"))  # the program may leave its last line open


def _flaw(ran: Ran | None, right: Callable[[str], bool]) -> str | None:
    if ran is None or ran.stopped == "seconds":
        return "it takes too long"
    if ran.stopped is not None:
        return "it writes too much"
    if ran.code != 0:
        return (ran.errors.strip().splitlines() or [f"exit code {ran.code}"])[-1][:_LONGEST]
    return None if right(ran.output) else "its output is not the expected one"


def _lines(text: str) -> list[str]:
    """Lines without the white space at their ends, and without blank lines after the last."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
