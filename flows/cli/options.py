"""Options that several commands have in common."""

from typing import Annotated

from cyclopts import Parameter

DEFAULT_ROOT = "file://./runs"

RootUrl = Annotated[str, Parameter(help="Storage root: file://some/folder or s3://bucket/prefix.")]
Json = Annotated[bool, Parameter(help="Only JSON on standard output; the last line is the result.", negative=())]
