"""`ratchet doctor`: what of this machine and its site would stop a run, and how to fix each."""

import importlib.metadata
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

import httpx
from packaging.requirements import Requirement
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName
from prefect.events.schemas.automations import EventTrigger
from pydantic import BaseModel, ConfigDict

from flows.server.history import TAG
from flows.site.automations import silence
from flows.site.folder import SiteFolder, SiteRecord
from flows.site.planned import Fact, free_port, listeners, told
from flows.site.up import connected, running
from storage.backends.clock import seconds_ahead
from storage.backends.root import open_root
from storage.errors import RatchetError
from tasks.config.code_version import code_version
from tasks.config.environment import HEARTBEAT_S, Settings
from tasks.workers.scratch import check_folders

_ANSWER_S = 10.0
_CLOCK_S = 5.0
_BEATS = 3  # two may be lost on the way

Level = Literal["ok", "warning", "error"]


class Finding(BaseModel):
    """The result of one check."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    level: Level
    text: str
    """The fact, and the repair if there is something to repair."""


class Diagnosis(BaseModel):
    """All checks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is an error; a warning is none."""
        return all(one.level != "error" for one in self.findings)


def diagnose(folder: SiteFolder, root: str) -> Diagnosis:
    """Check this machine, the storage root and the site in `folder`, if there is one."""
    return Diagnosis(findings=(*_machine(root), *_site(folder)))


def _machine(root: str) -> Iterator[Finding]:
    yield _versions()
    yield _passes("temporary folder and Prefect's home", check_folders)
    yield _passes(f"storage root {root}", lambda: open_root(root).check_writable())
    yield from _storage_mode(root)
    yield from _storage_clock(root)
    cards = Settings.from_environment().gpus
    text = f"{len(cards)} visible" if cards else "none is visible: runs compute on the CPU, which is for small models"
    yield Finding(check="GPU", level="ok" if cards else "warning", text=text)


def _storage_mode(url: str) -> Iterator[Finding]:
    root = open_root(url)
    folder = Path(root.path)
    if root.protocol == "file" and folder.is_dir() and folder.stat().st_mode & 0o077:
        text = f"other users can look into {folder}: `chmod 700 {shlex.quote(str(folder))}` keeps them out"
        yield Finding(check="storage mode", level="warning", text=text)


def _storage_clock(root: str) -> Iterator[Finding]:
    try:
        ahead = seconds_ahead(open_root(root))
    except RatchetError:
        return  # it cannot be written, which is said
    text = "the store's agrees with ours" if abs(ahead) <= _CLOCK_S else (
        f"the store's clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}, and cleaning compares ages by "
        "it: set both by NTP"
    )  # fmt: skip
    yield Finding(check="store's clock", level="ok" if abs(ahead) <= _CLOCK_S else "error", text=text)


def _versions() -> Finding:
    wrong = [] if sys.version_info[:2] == (3, 12) else [f"Python {sys.version.split()[0]} is not 3.12"]
    try:
        lines = importlib.metadata.requires("ratchet") or ()
    except importlib.metadata.PackageNotFoundError:
        text = "not compared: Ratchet is on PYTHONPATH, and not installed"
        return Finding(check="versions", level="warning", text=text)
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": "trainer"}):
            wrong += _mismatch(wanted)
    text = "as pinned" if not wrong else f"{'; '.join(wrong)}: run `make setup`"
    return Finding(check="versions", level="error" if wrong else "ok", text=text)


def _mismatch(wanted: Requirement) -> list[str]:
    try:
        found = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return [f"{wanted.name} is not installed"]
    return [] if wanted.specifier.contains(found, prereleases=True) else [f"{wanted.name} {found} is not {wanted}"]


def _passes(check: str, work: Callable[[], object]) -> Finding:
    try:
        work()
    except RatchetError as error:
        return Finding(check=check, level="error", text=str(error))
    return Finding(check=check, level="ok", text="can be written")


def _site(folder: SiteFolder) -> Iterator[Finding]:
    record = folder.record()
    if record is None or not record.processes:
        yield Finding(check="site", level="warning", text="not running: `ratchet up` starts it")
        yield _of(free_port())
        return
    yield _of(listeners(record.processes))
    for role in ("server", "worker"):
        process = running(record, role)
        if process is None:
            yield Finding(check=role, level="error", text=f"it has ended ({folder.log(role)}): `ratchet up` starts it")
        elif process.version != code_version():
            yield Finding(check=role, level="warning", text="another version of Ratchet: `ratchet down`, then `up`")
        else:
            yield Finding(check=role, level="ok", text=f"process {process.process}")
    if running(record, "server") is not None:
        yield from _server(folder, record)


def _server(folder: SiteFolder, record: SiteRecord) -> Iterator[Finding]:
    try:
        answer = httpx.get(f"{record.api}/health", timeout=_ANSWER_S)
        with connected(folder, record), get_client(sync_client=True) as client:
            yield _clock(answer)
            yield _heartbeats(client)
            yield _schedules(client)
            yield from map(_of, told(client))
    except httpx.HTTPError as error:
        yield Finding(check="API", level="error", text=f"it does not answer ({error}): see {folder.log('server')}")


def _of(fact: Fact) -> Finding:
    return Finding(check=fact.check, level=fact.level, text=fact.text)


def _clock(answer: httpx.Response) -> Finding:
    apart = abs((datetime.now(UTC) - parsedate_to_datetime(answer.headers["date"])).total_seconds())
    if apart > _CLOCK_S:
        return Finding(check="clocks", level="error", text=f"the server's is {apart:.0f} s apart: set both by NTP")
    return Finding(check="clocks", level="ok", text="the server's agrees with ours")


def _heartbeats(client: SyncPrefectClient) -> Finding:
    wanted = silence(TAG)
    found = client.read_automations_by_name(wanted.name)
    if not found or not found[0].enabled or not isinstance(found[0].trigger, EventTrigger):
        text = f"automation {wanted.name!r} is missing or paused, so a dead flow run stays Running: `ratchet up`"
        return Finding(check="heartbeats", level="error" if not found else "warning", text=text)
    within = found[0].trigger.within.total_seconds()
    if within < _BEATS * HEARTBEAT_S:
        text = (
            f"automation {wanted.name!r} waits {within:.0f} s for a heartbeat that comes every {HEARTBEAT_S} s, so a "
            f"living flow run is declared dead: set it to {_BEATS * HEARTBEAT_S} s or more"
        )
        return Finding(check="heartbeats", level="error", text=text)
    return Finding(check="heartbeats", level="ok", text=f"every {HEARTBEAT_S} s, dead after {within:.0f} s")


def _schedules(client: SyncPrefectClient) -> Finding:
    late = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Late"])))
    )
    if late:
        text = f"{len(late)} flow runs are late: the worker is busy (`ratchet up --at-once`), or schedules overlap"
        return Finding(check="schedules", level="warning", text=text)
    return Finding(check="schedules", level="ok", text="no flow run is late")
