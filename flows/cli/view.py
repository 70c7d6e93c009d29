"""`ratchet view`: the runs of a root in a browser of this machine."""

import secrets
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl
from flows.views.output import Output
from storage.backends.root import open_root
from storage.errors import InputError


class Viewing(BaseModel, frozen=True, extra="forbid"):
    root: str
    url: str  # address with the token


def view_command(
    *,
    port: Annotated[
        int, Parameter(help="Port on 127.0.0.1; 0 takes a free one.", validator=Number(gte=0, lte=65535))
    ] = 0,
    root: RootUrl = DEFAULT_ROOT,
    json: Json = False,
) -> int:
    """Show the runs of a root in a browser of this machine: curves, samples, tokens; live, and read-only."""
    store = open_root(root)
    if store.folder is not None and not store.folder.is_dir():
        raise InputError(f"there is no storage root at {store.url}: check --root, or start a run there first")
    from flows.viewer.server import HOST, listening, serve

    server, token = listening(port), secrets.token_urlsafe(32)
    viewing = Viewing(root=store.url, url=f"http://{HOST}:{server.getsockname()[1]}/?token={token}")
    Output.show(json, viewing, [f"open {viewing.url}", "Ctrl-C ends the viewer"])
    serve(store, server, token)
    return 0
