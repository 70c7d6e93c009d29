"""Options that several commands share."""

import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token
from cyclopts.utils import default_name_transform
from pydantic import BaseModel
from rich.text import Text

from flows.views.output import Output
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.ids import check_run_name
from storage.upkeep.catalog import require_run
from tasks.config.credentials import check_root_url, shown_setting, shown_text
from tasks.config.evaluation import PREFIX
from tasks.stages.names import Stage

DEFAULT_ROOT = "file://./runs"


def root_url(_type: Any, tokens: Sequence[Token]) -> str:
    """The URL of a storage root as it was given, unless it has credentials."""
    check_root_url(tokens[0].value)
    return tokens[0].value


RootUrl = Annotated[str, Parameter(help="Storage root: file://some/folder or s3://bucket/prefix.", converter=root_url)]
Revision = Annotated[
    int | None, Parameter(help="A revision of the run, if stages were done again; by default the head.")
]
RunId = Annotated[str, Parameter(help="Id of the run.")]
FileOrRun = Annotated[str, Parameter(help="Path or URL of a TOML file, or the id of an existing run.")]
Json = Annotated[bool, Parameter(help="Write only JSON to standard output; the last line is the result.", negative=())]


def several(help: str, name: str | None = None) -> Parameter:
    """An option that may be repeated."""
    return Parameter(name=name, help=f"{help}; may be repeated.", negative=(), show_default=False)


def option_name(field: str) -> str:
    """The option of a field of settings: `passing` is --pass, which is not a name in Python."""
    return "pass" if field == "passing" else default_name_transform(field)


def flag(help: str, name: str | None = None) -> Parameter:
    """An option without a value."""
    return Parameter(name=name, help=help, negative=())


Settings = Annotated[tuple[str, ...], several("A setting, as section.key=value", "--set")]


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options of every command that uses a storage root."""

    root: RootUrl = DEFAULT_ROOT
    json: Json = False

    @property
    def store(self) -> Root:
        return open_root(self.root)

    def of_run(self, run: str) -> Root:
        """The storage root, which has that run. Raises InputError if it has not."""
        require_run(store := self.store, run)
        return store

    def show(self, result: BaseModel, lines: Sequence[str | Text], good: bool = True) -> int:
        return Output.show(self.json, result, lines, good)

    def again(self, words: Iterable[str]) -> str:
        """The command line with these words and options, which continues a run; a secret in it is masked."""
        program = ["ratchet"] if Path(sys.argv[0]).name == "ratchet" else ["python", "-m", "ratchet"]
        tail = [f"--root={shown_text(self.root)}", *(["--json"] if self.json else [])]
        return shlex.join([*program, *map(shown_text, words), *tail])


@Parameter(name="*")
@dataclass(frozen=True)
class Changes:
    """Options of the commands that start or continue a run."""

    iterations: Annotated[int | None, Parameter(help="Total RL iterations; overrides run.iterations.")] = None
    settings: Settings = ()
    run: Annotated[str | None, Parameter(help="Id of the run; an existing run is continued.")] = None

    @property
    def replaced(self) -> list[str]:
        """All settings that replace those of the configuration."""
        return [*self.settings, *([] if self.iterations is None else [f"run.iterations={self.iterations}"])]

    @property
    def options(self) -> list[str]:
        """The same as options of a command, with secrets masked."""
        more = [] if self.iterations is None else [f"--iterations={self.iterations}"]
        return [*more, *(f"--set={shown_setting(setting)}" for setting in self.settings)]


_FORM = re.compile(r"(?P<run>[^@:]*)(?:@(?P<iteration>[^:]*))?(?::(?P<stage>.*))?")


@dataclass(frozen=True)
class Place:
    run: str
    iteration: int | None  # None if none is named
    stage: str | None  # the value of a Stage, or the name of an evaluation on request; None if none is named


def place_in(text: str, form: str = "RUN[@ITERATION][:STAGE]") -> Place:
    """Read a place of the form that the command takes, in brackets what may be left out. Raises InputError."""
    found = _FORM.fullmatch(text)
    if found is None or not found["run"]:
        raise InputError(f"{text!r} is not of the form {form}, as in {_example(form)}")
    place = Place(check_run_name(found["run"]), _iteration(text, found["iteration"], form), _stage(found["stage"]))
    for name, given in (("@ITERATION", place.iteration), (":STAGE", place.stage)):
        needed = name in form and f"[{name}]" not in form
        if needed and given is None:
            raise InputError(f"{text!r} lacks {name}: write it as {form}, as in {_example(form)}")
        if given is not None and name not in form:
            raise InputError(f"{text!r} has more than this command takes: write it as {form}, as in {_example(form)}")
    return place


def _example(form: str) -> str:
    named = form.replace("RUN", "my-run").replace("ITERATION", "6").replace("STAGE", "reward")
    return named.replace("[", "").replace("]", "")


def _iteration(text: str, given: str | None, form: str) -> int | None:
    if given is not None and not (given.isascii() and given.isdigit()):
        raise InputError(f"{text!r}: {given!r} is not an iteration: write a number, as in {_example(form)}")
    return None if given is None else int(given)


def _stage(given: str | None) -> str | None:
    stages = [stage.value for stage in Stage]
    if given is None or given in stages or given.startswith(PREFIX):
        return given
    near = difflib.get_close_matches(given, stages, n=1)
    repair = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(stages)}"
    raise InputError(f"{given!r} is not a stage: {repair}")
