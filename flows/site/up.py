"""`ratchet up` and `ratchet down`: one command to a working site, which may be repeated, and one that ends it."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, get_current_settings, temporary_settings
from pydantic import BaseModel

from flows.server.temporary import answers, last_output
from flows.site import processes
from flows.site.entries import read_deployments
from flows.site.processes import HOST, RunningProcess, SiteFolder, SiteRecord, end, end_tree, find, strays
from flows.site.reconciling import set_right
from flows.site.registration import POOL, register, webhook_url
from storage.errors import InputError, WorkerLost
from tasks.config.code_version import code_version
from tasks.config.credentials import has_credentials
from tasks.config.environment import resolve, site_environment

_SERVER, _WORKER = "server", "worker"
_APP = "flows.server.sqlite:site_app"
_WORKER_MODULE = "flows.site.worker"
_ANSWER_DEADLINE_S = 300.0  # the first start makes the tables of the database, on a busy machine
_ANSWER_S = 2.0
_PAUSE_S = 0.3
_LOOK_S = 2.0


@dataclass(frozen=True)
class Wanted:
    deployments: Path  # a file in the format of prefect.yaml
    port: int = 4200
    database: str | None = None  # URL of the server's database; None keeps what the site has
    at_once: int | None = None  # flow runs that the worker executes at the same time
    notify: str | None = None
    """URL of a webhook for each flow run that ends red; `off` ends the calls; None keeps what the site has."""


class Site(BaseModel, frozen=True, extra="forbid"):
    api: str
    ui: str
    secret_file: str  # file with the text that the browser asks for
    client_file: str  # shell file with the settings for Prefect's own commands
    deployments: tuple[str, ...]  # registered deployments, as flow/deployment
    started: tuple[str, ...]  # processes that this command has started


class Ended(BaseModel, frozen=True, extra="forbid"):
    ended: tuple[str, ...]
    gone: tuple[str, ...]  # processes of the record that had already ended


def up(folder: SiteFolder, wanted: Wanted, say: Callable[[str], object]) -> Site:
    """Start what is missing of a site and register everything; what runs is left alone. Raises InputError if the port
    is taken, the site runs on another database, or the deployments cannot be read, WorkerLost if the server does not
    answer, or ends meanwhile."""
    deployments = read_deployments(wanted.deployments)  # before anything starts
    webhook = None if wanted.notify is None else webhook_url(wanted.notify)
    with folder.locked():
        before = folder.record()
        recorded = before.processes if before else ()
        # flow runs go on
        for process in (one for word in (_APP, _WORKER_MODULE) for one in strays(folder.path, recorded, word)):
            say(f"ending process {process.pid}, which an interrupted `ratchet up` has started")
            end_tree(process)
        record = _served(folder, wanted, before, say)
        try:
            with connected(folder, record):
                registered = register(deployments, wanted.at_once, webhook)
        except httpx.TransportError as error:
            fact = f"the Prefect server ended while deployments were registered ({error})"
            raise WorkerLost(f"{fact}: see {folder.log(_SERVER)}. `ratchet up` starts it again") from None
        record = _worked(folder, record, say)
        old = {one.process for one in recorded}
        return Site(
            api=record.api,
            ui=record.api.removesuffix("/api"),
            secret_file=str(folder.secret_file),
            client_file=str(folder.client_file),
            deployments=registered,
            started=tuple(one.role for one in record.processes if one.process not in old),
        )


def down(folder: SiteFolder) -> Ended:
    """End exactly what `up` has started, the worker and its flow runs first; also what nothing has recorded."""
    with folder.locked():
        record = folder.record()
        ended, gone = [], []
        for one in reversed(record.processes if record else ()):  # the server last
            was_running = end(one, starts=one.role == _WORKER)
            (ended if was_running else gone).append(one.role)
            if record is not None and one.role == _WORKER and running(record, _SERVER):
                _continue(folder, record)
        for process in strays(folder.path, ()):
            end_tree(process)
            ended.append("stray")
        if record is not None:
            folder.keep(record.model_copy(update={"processes": ()}))
        return Ended(ended=tuple(ended), gone=tuple(gone))


def stay(
    folder: SiteFolder,
    again: Callable[[], object],
    stopped: threading.Event,
    say: Callable[[str], object],
    every_s: float = _LOOK_S,
) -> Ended:
    """Keep a site up until `stopped` is set, then end it. Every `every_s` seconds its processes are looked for, and
    `again` starts what is missing, as `up` does. Raises its RatchetError, and leaves the site as it is; a server that
    ends while it is started is started again."""
    while not stopped.wait(every_s):
        record = folder.record()
        if gone := [role for role in (_SERVER, _WORKER) if record is None or running(record, role) is None]:
            say(f"{' and '.join(gone)} ended: starting again")
            try:
                again()
            except WorkerLost as error:
                say(str(error))
    return down(folder)


@contextlib.contextmanager
def connected(folder: SiteFolder, record: SiteRecord) -> Iterator[None]:
    """Let Prefect in this process use the site's server."""
    if record.api == get_current_settings().api.url and not record.processes:
        yield  # a server of the user's, with the credentials of the user's own settings
        return
    with temporary_settings({PREFECT_API_URL: record.api, PREFECT_API_AUTH_STRING: folder.secret()}):
        yield


def running(record: SiteRecord, role: str) -> RunningProcess | None:
    return next((one for one in record.processes if one.role == role and find(one)), None)


def _served(folder: SiteFolder, wanted: Wanted, record: SiteRecord | None, say: Callable[[str], object]) -> SiteRecord:
    """The record with a server that answers."""
    if record is not None and (server := running(record, _SERVER)) is not None:
        if wanted.database not in (None, record.database):
            raise InputError("the site runs on another database: `ratchet down` first")
        _wait(record.api, server, folder)
        return record
    database = wanted.database or (record.database if record else None)
    if (why := processes.taken(wanted.port)) is not None:
        raise InputError(f"port {wanted.port} {why}: give another --port")
    api = f"http://{HOST}:{wanted.port}/api"
    say(f"starting the Prefect server on {HOST}:{wanted.port}")
    environment = site_environment(folder.path, folder.prefect_home, api, folder.secret(), _connection(database))
    # what `prefect server start` runs, without its parent process
    where = ["--host", HOST, "--port", f"{wanted.port}", "--log-level", "warning"]
    command = [sys.executable, "-m", "uvicorn", "--factory", _APP, *where]
    server = processes.start(_SERVER, command, environment, folder.log(_SERVER))
    workers = [] if record is None else [one for one in record.processes if one.role == _WORKER and find(one)]
    record = SiteRecord(api=api, database=database, processes=(server, *workers))
    folder.keep(record)
    _wait(api, server, folder)
    lines = (f"export PREFECT_API_URL={api}", f"export PREFECT_API_AUTH_STRING={folder.secret()}")
    folder.write(folder.client_file, "\n".join([*lines, f"export PREFECT_HOME={folder.prefect_home}\n"]))
    return record


def _worked(folder: SiteFolder, record: SiteRecord, say: Callable[[str], object]) -> SiteRecord:
    """The record with a worker of this version; an older one that has no flow run is replaced."""
    worker = running(record, _WORKER)
    if worker is not None and worker.version != code_version():
        if (process := find(worker)) is not None and process.children():
            say("the worker runs an older version of Ratchet, and has a flow run: `ratchet up` replaces it after that")
        else:
            end(worker, starts=True)
            worker = None
    if worker is None:
        say("starting a worker")
        for process in strays(folder.path, record.processes):  # no worker could cancel it any more
            say(f"ending flow run process {process.pid}, whose worker is gone: it continues with the new worker")
            processes.kill_tree(process)  # asked to end, it would report itself as crashed, and not go on
        _continue(folder, record)
        environment = site_environment(folder.path, folder.prefect_home, record.api, folder.secret())
        command = [sys.executable, "-m", _WORKER_MODULE]
        worker = processes.start(_WORKER, command, environment, folder.log(_WORKER))
    servers = [one for one in record.processes if one.role == _SERVER]
    record = record.model_copy(update={"processes": (*servers, worker)})
    folder.keep(record)
    return record


def _continue(folder: SiteFolder, record: SiteRecord) -> None:
    if answers(record.api, _ANSWER_S):
        with connected(folder, record), get_client(sync_client=True) as client:
            set_right(client, POOL)


def _connection(database: str | None) -> str | None:
    """The URL as SQLAlchemy wants it, with its secret."""
    if database is None:
        return None
    if has_credentials(database):
        raise InputError("--database has a password in it, which would be stored: give it as env:NAME, and export NAME")
    url = resolve(database, "--database")
    if not isinstance(url, str) or not url.startswith(("postgresql://", "postgresql+asyncpg://", "postgres://")):
        raise InputError("--database is not the URL of a PostgreSQL database: postgresql://user@host:port/name")
    return f"postgresql+asyncpg://{url.partition('://')[2]}"


def _wait(api: str, server: RunningProcess, folder: SiteFolder) -> None:
    deadline = time.monotonic() + _ANSWER_DEADLINE_S
    while not answers(api, _ANSWER_S):
        if find(server) is None or time.monotonic() > deadline:
            log = folder.log(_SERVER)
            last = last_output(log.read_bytes())
            raise WorkerLost(f"the Prefect server does not answer at {api}. {last} All of it: {log}")
        time.sleep(_PAUSE_S)
