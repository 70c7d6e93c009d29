"""`ratchet doctor`: the facts of this machine and its site that would stop a run, each with its repair."""

import importlib.metadata
import ipaddress
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Literal

import httpx
import psutil
from packaging.requirements import Requirement
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import EventTrigger
from prefect.exceptions import ObjectNotFound
from pydantic import BaseModel

from flows.server.history import TAG, those
from flows.site.processes import RunningProcess, SiteFolder, SiteRecord, find, taken
from flows.site.registration import POOL, queues_of, silence
from flows.site.up import connected, running
from storage.backends.root import open_root
from storage.errors import RatchetError
from tasks.config.code_version import code_version
from tasks.config.environment import HEARTBEAT_S, Settings
from tasks.rewards.sandbox import check_sandbox
from tasks.workers.folders import check_folders

PORT = 4200  # port of the server of `ratchet up` unless it is told otherwise
SETTLES = timedelta(minutes=5)
"""A schedule that is younger may have no flow run planned yet: the server plans about once a minute."""

_ANSWER_S = 10.0
_CLOCK_S = 5.0
_BEATS = 3  # two may be lost on the way
_PAGE = 200

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    text: str  # the fact, and the repair if there is something to repair


class Diagnosis(BaseModel, frozen=True, extra="forbid"):
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """True if no finding is an error; a warning is none."""
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
    yield _passes("sandbox", check_sandbox, "runs programs of the policy", "warning", "code rewards cannot run: ")
    cards = Settings.from_environment().gpus
    text = f"{len(cards)} visible" if cards else "none is visible: runs compute on the CPU, which is for small models"
    yield Finding("GPU", "ok" if cards else "warning", text)


def _storage_mode(url: str) -> Iterator[Finding]:
    folder = open_root(url).folder
    if folder is not None and folder.is_dir() and folder.stat().st_mode & 0o077:
        text = f"other users can look into {folder}: `chmod 700 {shlex.quote(str(folder))}` keeps them out"
        yield Finding("storage mode", "warning", text)


def _storage_clock(root: str) -> Iterator[Finding]:
    try:
        ahead = open_root(root).seconds_ahead()
    except RatchetError:
        return  # another finding says that it cannot be written
    fact = f"the store's clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
    wrong = f"{fact}, and cleaning compares ages by it: set both by NTP" if abs(ahead) > _CLOCK_S else None
    yield Finding("store's clock", "error" if wrong else "ok", wrong or "the store's agrees with ours")


def _versions() -> Finding:
    wrong = [] if sys.version_info[:2] == (3, 12) else [f"Python {sys.version.split()[0]} is not 3.12"]
    try:
        lines = importlib.metadata.requires("ratchet") or ()
    except importlib.metadata.PackageNotFoundError:
        return Finding("versions", "warning", "not compared: Ratchet is on PYTHONPATH, and not installed")
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            wrong += _mismatch(wanted)
    text = "as pinned" if not wrong else f"{'; '.join(wrong)}: run `make setup`"
    return Finding("versions", "error" if wrong else "ok", text)


def _mismatch(wanted: Requirement) -> list[str]:
    try:
        found = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return [f"{wanted.name} is not installed"]
    return [] if wanted.specifier.contains(found, prereleases=True) else [f"{wanted.name} {found} is not {wanted}"]


def _passes(
    check: str, work: Callable[[], object], passed: str = "can be written", level: Level = "error", before: str = ""
) -> Finding:
    try:
        work()
    except RatchetError as error:
        return Finding(check, level, f"{before}{error}")
    return Finding(check, "ok", passed)


def _site(folder: SiteFolder) -> Iterator[Finding]:
    record = folder.record()
    if record is None or not record.processes:
        yield Finding("site", "warning", "not running: `ratchet up` starts it")
        yield free_port()
        return
    yield listeners(record.processes)
    for role in ("server", "worker"):
        process = running(record, role)
        if process is None:
            yield Finding(role, "error", f"it has ended ({folder.log(role)}): `ratchet up` starts it")
        elif process.version != code_version():
            yield Finding(role, "warning", "another version of Ratchet: `ratchet down`, then `up`")
        else:
            yield Finding(role, "ok", f"process {process.process}")
    if running(record, "server") is not None:
        yield from _server(folder, record)


def free_port(port: int = PORT) -> Finding:
    """Check the port of `ratchet up`, on a machine without a site."""
    if (why := taken(port)) is not None:
        return Finding("ports", "warning", f"{port} {why}: `ratchet up --port` takes another one")
    return Finding("ports", "ok", f"{port} is free for `ratchet up`")


def listeners(processes: Sequence[RunningProcess]) -> Finding:
    """Check that the processes of a site and their children listen on this machine alone."""
    beyond: list[str] = []
    count = 0
    for one in filter(None, map(find, processes)):
        for process in (one, *one.children(recursive=True)):
            places = _listening(process)
            count += len(places)
            beyond += [f"process {process.pid} on {ip}:{port}" for ip, port in places if not is_loopback(ip)]
    if beyond:
        text = f"others can connect to {', '.join(beyond)}: unset what makes it listen there, or close it by a firewall"
        return Finding("ports", "error", text)
    return Finding("ports", "ok", f"{count} listen, on the loopback interface alone")


def is_loopback(ip: str) -> bool:
    """True for an address that only this machine reaches, also for one of IPv4 on a socket of IPv6."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _listening(process: psutil.Process) -> list[tuple[str, int]]:
    try:
        found = process.net_connections("inet")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]


def _server(folder: SiteFolder, record: SiteRecord) -> Iterator[Finding]:
    try:
        answer = httpx.get(f"{record.api}/health", timeout=_ANSWER_S)
        with connected(folder, record), get_client(sync_client=True) as client:
            yield _clock(answer)
            yield _heartbeats(client)
            yield _schedules(client)
            yield from told(client)
    except httpx.HTTPError as error:
        yield Finding("API", "error", f"it does not answer ({error}): see {folder.log('server')}")


def _clock(answer: httpx.Response) -> Finding:
    apart = abs((datetime.now(UTC) - parsedate_to_datetime(answer.headers["date"])).total_seconds())
    if apart > _CLOCK_S:
        return Finding("clocks", "error", f"the server's is {apart:.0f} s apart: set both by NTP")
    return Finding("clocks", "ok", "the server's agrees with ours")


def _heartbeats(client: SyncPrefectClient) -> Finding:
    wanted = silence(TAG)
    found = client.read_automations_by_name(wanted.name)
    if not found or not found[0].enabled or not isinstance(found[0].trigger, EventTrigger):
        text = f"automation {wanted.name!r} is missing or paused, so a dead flow run stays Running: `ratchet up`"
        return Finding("heartbeats", "error" if not found else "warning", text)
    within = found[0].trigger.within.total_seconds()
    if within < _BEATS * HEARTBEAT_S:
        fact = f"automation {wanted.name!r} waits {within:.0f} s for a heartbeat that comes every {HEARTBEAT_S} s"
        repair = f"set it to {_BEATS * HEARTBEAT_S} s or more"
        return Finding("heartbeats", "error", f"{fact}, so a living flow run is declared dead: {repair}")
    return Finding("heartbeats", "ok", f"every {HEARTBEAT_S} s, dead after {within:.0f} s")


def _schedules(client: SyncPrefectClient) -> Finding:
    if late := client.read_flow_runs(flow_run_filter=those(state={"name": {"any_": ["Late"]}})):
        fact = f"{len(late)} flow runs are late, and none of them is skipped"
        why = "the worker is busy (`ratchet up --at-once`), or a schedule is faster than what it starts"
        return Finding("schedules", "warning", f"{fact}: {why} (pause it in the UI, or lengthen its interval)")
    return Finding("schedules", "ok", "no flow run is late")


def told(client: SyncPrefectClient, now: datetime | None = None) -> Iterator[Finding]:
    yield _pool(client)
    ours = DeploymentFilter.model_validate({"tags": {"all_": [TAG]}})
    deployments = client.read_deployments(deployment_filter=ours, limit=_PAGE)
    old = [one.name for one in deployments if one.version != code_version()]
    if not deployments:
        yield Finding("deployments", "error", "none is registered: `ratchet up` does that")
    elif old:
        text = f"{', '.join(old)} were registered by another version of Ratchet: `ratchet up` registers them again"
        yield Finding("deployments", "warning", text)
    else:
        yield Finding("deployments", "ok", ", ".join(sorted(one.name for one in deployments)))
    yield _planned(client, deployments, now or datetime.now(UTC))


def _pool(client: SyncPrefectClient) -> Finding:
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        return Finding("work pool", "error", f"there is no work pool {POOL!r}: `ratchet up` makes it")
    if pool.is_paused:
        text = f"work pool {POOL!r} is paused, so no flow run starts: resume it in the UI under Work Pools"
        return Finding("work pool", "warning", text)
    if pool.concurrency_limit is not None:
        text = f"work pool {POOL!r} has one limit of {pool.concurrency_limit}, so upkeep waits for training"
        return Finding("work pool", "warning", f"{text}: remove it in the UI under Work Pools; its queues have limits")
    limits = [f"{name} {one.concurrency_limit or 'any number'}" for name, one in queues_of(client).items()]
    return Finding("work pool", "ok", f"{POOL}, flow runs at once by queue: {', '.join(limits)}")


def _planned(client: SyncPrefectClient, deployments: Sequence[DeploymentResponse], now: datetime) -> Finding:
    scheduled = those(state={"type": {"any_": [StateType.SCHEDULED]}})
    idle, active = [], 0
    for one in deployments:
        due = [schedule for schedule in one.schedules if schedule.active and not one.paused]
        active += len(due)
        if not any(schedule.created and schedule.created < now - SETTLES for schedule in due):
            continue
        chosen = DeploymentFilter.model_validate({"id": {"any_": [one.id]}})
        if not client.read_flow_runs(flow_run_filter=scheduled, deployment_filter=chosen, limit=1):
            idle.append(one.name)
    if idle:
        fact = f"deployments {', '.join(idle)} have a schedule, but no flow run is planned"
        why = "the server's scheduler does not work (its log says why), or the schedule has no further time"
        return Finding("planned", "error", f"{fact}: {why}. `ratchet down`, then `ratchet up`")
    return Finding("planned", "ok", f"{active or 'no'} active schedules")
