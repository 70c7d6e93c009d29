"""Explanations of invalid command lines, with the command that was probably meant."""

import difflib
import re
from collections.abc import Sequence

from cyclopts import CycloptsError, UnknownCommandError
from cyclopts.exceptions import UnusedCliTokensError
from pydantic import ValidationError

from flows.cli.options import option_name
from storage.errors import InputError
from tasks.config.code_version import PROJECT_ROOT, VERSION
from tasks.config.credentials import shown_setting
from tasks.stages.names import Stage

_SETTING = re.compile(r"[a-z_]+(\.[A-Za-z0-9_]+)+=.*", re.DOTALL)
_MEANT = {
    "train": "run", "start": "run", "resume": "run", "continue": "run", "launch": "run", "sample": "samples",
    "list": "ls", "runs": "ls", "delete": "rm", "remove": "rm", "kill": "stop", "eval": "evaluate", "test": "evaluate",
    "validate": "check", "save": "export", "new": "init", "plot": "report", "redo": "rerun", "score": "reward",
    "branch": "fork", "clean": "gc", "help": "--help",
}  # fmt: skip
_NEAR = 0.6
_OURS = ("flows", "tasks", "trainer_core", "storage", "infra")


def missing_extra(error: ModuleNotFoundError) -> InputError:
    """The error of a command that lacks an extra, and how to add it. Raises `error` for a module of ours."""
    name = (error.name or "").partition(".")[0]
    if not name or name in _OURS:
        raise error
    return InputError(
        f"this needs {name}, which is not installed: without an extra, Ratchet only looks at runs. The extra [cpu], or "
        "[gpu] with gpu.txt, is added by two commands:\n"
        f"  pip install --no-deps --require-hashes -r {PROJECT_ROOT / 'infra' / 'requirements' / 'cpu.txt'}\n"
        f"  pip install --no-deps ratchet-{VERSION}-py3-none-any.whl"
    )


def explained(error: CycloptsError) -> str:
    words = error.command_chain or ()
    return f"{_fact(error, words)}\n{' '.join(('ratchet', *words))} --help tells more"


def _fact(error: CycloptsError, words: Sequence[str]) -> str:
    if isinstance(error.__cause__, ValidationError):
        flaws = [(f"--{option_name(str(one['loc'][0]))}", one["input"], one["msg"]) for one in error.__cause__.errors()]
        return "\n".join(f"{option} {value}: {flaw}" for option, value, flaw in flaws)
    left = [str(token) for token in error.unused_tokens or ()]
    if isinstance(error, UnknownCommandError) and left:
        return _unknown(left[0], words, sorted(name for name in error.app or () if not name.startswith("-")))
    return _unused(left) if isinstance(error, UnusedCliTokensError) and left else str(error)


def _unknown(given: str, words: Sequence[str], commands: Sequence[str]) -> str:
    meant = {**({} if words else _MEANT), **{name: name for name in commands}}
    if near := difflib.get_close_matches(given, meant, n=1, cutoff=_NEAR):
        return f"{given!r} is not a command: did you mean `{' '.join(('ratchet', *words, meant[near[0]]))}`?"
    return f"{given!r} is not a command: there are {', '.join(commands)}"


def _unused(left: Sequence[str]) -> str:
    settings = [token for token in left if _SETTING.fullmatch(token)]
    if settings == list(left):
        shown = " ".join(f"--set {shown_setting(one)}" for one in settings)
        return f"a setting is given with --set: {shown}"
    words = [word for token in left for word in token.split("@")]
    numbers, stages = [word for word in words if word.isdigit()], [word for word in words if word in list(Stage)]
    if len(numbers) + len(stages) == len(words):
        form = "".join(["RUN", *(f"@{one}" for one in numbers[:1]), *(f":{one}" for one in stages[:1])])
        return f"{' '.join(left)}: iteration and stage are named with the run, as {form}"
    return f"this command does not take {' '.join(map(repr, left))}"
