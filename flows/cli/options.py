"""Options that several commands share."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter, Token

from storage.errors import InputError
from storage.ids import check_run_name
from tasks.config.credentials import check_root_url
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
Iterations = Annotated[int | None, Parameter(help="Total RL iterations; overrides run.iterations.")]
Settings = Annotated[
    tuple[str, ...],
    Parameter(name="--set", help="A setting, as section.key=value; may be repeated.", negative=(), show_default=False),
]
RunId = Annotated[str, Parameter(help="Id of the run.")]
FileOrRun = Annotated[str, Parameter(help="Path or URL of a TOML file, or the id of an existing run.")]
RunName = Annotated[str | None, Parameter(help="Id of the run; an existing run is continued.")]
Json = Annotated[bool, Parameter(help="Write only JSON to standard output; the last line is the result.", negative=())]


_FORM = re.compile(r"(?P<run>[^@:]*)(?:@(?P<iteration>[^:]*))?(?::(?P<stage>.*))?")


@dataclass(frozen=True)
class Place:
    """The named run, iteration and stage."""

    run: str
    iteration: int | None
    """None if none is named."""
    stage: str | None
    """The value of a Stage, or the name of an evaluation on request; None if none is named."""


def place_in(text: str, form: str = "RUN[@ITERATION][:STAGE]") -> Place:
    """Read `RUN[@ITERATION][:STAGE]`. `form` is what the command takes, in brackets what may be left out. Raises
    InputError if `text` has another form, or names no stage."""
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
        raise InputError(f"{text!r}: {given!r} is no iteration: write a number, as in {_example(form)}")
    return None if given is None else int(given)


def _stage(given: str | None) -> str | None:
    stages = [stage.value for stage in Stage]
    if given is None or given in stages or given.startswith(PREFIX):
        return given
    near = difflib.get_close_matches(given, stages, n=1)
    raise InputError(
        f"{given!r} is no stage: {f'did you mean {near[0]!r}?' if near else f'write one of {", ".join(stages)}'}"
    )
