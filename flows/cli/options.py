"""Options that several commands share."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token

from tasks.config.credentials import check_root_url

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
RunName = Annotated[str | None, Parameter(help="Id of the run; an existing run is continued.")]
Json = Annotated[bool, Parameter(help="Write only JSON to standard output; the last line is the result.", negative=())]
