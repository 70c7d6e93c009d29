"""Commands for a Prefect site on this machine: up, down, doctor."""

import signal
import threading
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import BaseModel

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl, flag
from flows.views.output import Output
from tasks.config.code_version import PROJECT_ROOT

DEPLOYMENTS = PROJECT_ROOT / "infra" / "prefect.yaml"

Folder = Annotated[Path, Parameter(help="Where the site keeps its secret, logs and database.")]
DEFAULT_FOLDER = Path("~/.ratchet/site")
AtOnce = Annotated[
    int | None,
    Parameter(
        help="Flow runs that may train at the same time; 1 at first, then the number given last.",
        validator=Number(gte=1),
    ),
]
Notify = Annotated[
    str | None, Parameter(help="URL of a webhook for each flow run that fails, or env:NAME; off ends the calls.")
]
Deployments = Annotated[Path, Parameter(help="Deployments to register.")]


class Registered(BaseModel, frozen=True, extra="forbid"):
    deployments: tuple[str, ...]  # as flow/deployment


def up_command(
    *,
    port: Annotated[
        int, Parameter(help="Port of the server, on 127.0.0.1.", validator=Number(gte=1, lte=65535))
    ] = 4200,
    database: Annotated[
        str | None, Parameter(help="PostgreSQL, as postgresql://user@host:port/name or env:NAME; else SQLite.")
    ] = None,
    at_once: AtOnce = None,
    notify: Notify = None,
    deployments: Deployments = DEPLOYMENTS,
    folder: Folder = DEFAULT_FOLDER,
    stay: Annotated[
        bool, flag("Stay, and start again what ends; SIGTERM or Ctrl-C ends the site. For systemd.")
    ] = False,
    json: Json = False,
) -> int:
    """Start what is missing of a Prefect site on this machine: server, worker, deployments. It may be repeated."""
    from flows.site import up as sites  # imports Prefect
    from flows.site.processes import SiteFolder

    wanted = sites.Wanted(deployments.expanduser().absolute(), port, database, at_once, notify)
    place = SiteFolder.at(folder)
    with Output(json=json) as output:
        site = sites.up(place, wanted, output.say)
        lines = [
            f"UI          {site.ui}",
            f"sign in     with the text in {site.secret_file}",
            f"prefect     in a shell after `. {site.client_file}`",
            *(f"deployment  {name}" for name in site.deployments),
            f"started     {', '.join(site.started) or 'nothing: everything was running'}",
        ]
        output.result(site, lines)
        if stay:
            stopped = threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stopped.set())
            sites.stay(place, lambda: sites.up(place, wanted, output.say), stopped, output.say)
    return 0


def register_command(
    *, at_once: AtOnce = None, notify: Notify = None, deployments: Deployments = DEPLOYMENTS, json: Json = False
) -> int:
    """Register work pool, deployments, ... with your own Prefect server (PREFECT_API_URL).

    Workers execute the flow runs with the Python and the checkout of this command, so run it where they run, or in the
    same image. A work pool `ratchet` that exists is used, of whatever type."""
    from flows.site.registration import register_elsewhere  # imports Prefect

    with Output(json=json) as output:
        names = register_elsewhere(deployments.expanduser().absolute(), at_once, notify)
        output.result(Registered(deployments=names), [f"deployment  {name}" for name in names])
    return 0


def down_command(*, folder: Folder = DEFAULT_FOLDER, json: Json = False) -> int:
    """End what `ratchet up` has started: the worker with its flow runs, then the server. The runs can be continued."""
    from flows.site.processes import SiteFolder
    from flows.site.up import down

    with Output(json=json) as output:
        ended = down(SiteFolder.at(folder))
        output.result(ended, [f"ended {', '.join(ended.ended) or 'nothing: nothing was running'}"])
    return 0


def doctor_command(*, root: RootUrl = DEFAULT_ROOT, folder: Folder = DEFAULT_FOLDER, json: Json = False) -> int:
    """Check this machine, a storage root and the site, and say how to fix what is wrong; exit code 1 if anything is."""
    from flows.site.doctor import diagnose
    from flows.site.processes import SiteFolder

    with Output(json=json) as output:
        diagnosis = diagnose(SiteFolder.at(folder), root)
        output.result(diagnosis, [f"{one.level:8}{one.check}: {one.text}" for one in diagnosis.findings])
    return 0 if diagnosis.healthy else 1
