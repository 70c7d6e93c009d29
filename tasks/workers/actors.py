"""Groups of Ray actors that hold one object each, and what happens when one of them fails."""

import errno
import math
import operator
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import ray
import ray.exceptions
import ray.util
from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME

from storage.errors import OutOfMemory, RatchetError, WorkerLost, first_line
from tasks.workers.cluster import NAMESPACE
from tasks.workers.connection import CONNECTION
from tasks.workers.silence import SILENCE, Wait, Where, here
from tasks.workers.stalls import Watch, current_stage, within
from trainer_core.progress import listen

_GRACE_S = 5.0  # time the others get to end their part of a call after one member has failed
_PING_S = 0.2  # a dead actor is known at once; a busy one does not answer and counts as alive
_ATTACH_S = 10.0
_START = "the start"
_MEMORY = {"MemoryError", "OutOfMemoryError"}  # of Python, numpy, Arrow; of torch, which is not imported here
_CUDA_MEMORY = 2  # cudaErrorMemoryAllocation, outside of torch's own allocator
_CHANGES_NOTHING = frozenset({"send_weights"})  # members that end such a call differently are still in step
_DEADLINES = {_START: "start_deadline_s", "collect": "step_deadline_s"}
TOKEN_CHARACTERS = 8  # length of the part of a group's name that no other group has


class WorkerDied(WorkerLost):
    """The process died, unlike one that failed and was ended by us."""


class Host:
    """The Ray actor class: a process that makes one object and calls its methods, one at a time."""

    def __init__(self, label: str = "worker") -> None:
        listen()
        self._label = label
        self._held: Any = None
        self._calls = 0
        self._watch = Watch(lambda text: sys.stdout.write(f"{text}\n"))
        self._watch.begin()

    def __repr__(self) -> str:
        """The label that Ray puts before the lines that this process prints."""
        return self._label

    def make(self, factory: Callable[..., Any], arguments: tuple[Any, ...], stage: str = "") -> None:
        """Make the object, for a stage. One that this process has made before is let go first."""
        self._held = None
        with within(stage), self._watch.over(_START):
            self._held = factory(*arguments)

    def become(self, label: str) -> None:
        """Take another label, also before the lines that this process prints."""
        self._label = label
        for stream in (sys.stdout, sys.stderr):
            stream.write(f"{LOG_PREFIX_ACTOR_NAME}{label}\n")
            stream.flush()

    def label(self) -> str:
        """The label that it has now."""
        return self._label

    def call(self, stage: str, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the object, for a stage."""
        self._calls += 1
        with within(stage), self._watch.over(method):
            return operator.methodcaller(method, *arguments, **options)(self._held)

    def where(self) -> Where:
        """This process and its host."""
        return here()

    def calls(self) -> int | None:
        """Number of calls that were begun; None before the object is made."""
        return self._calls if self._held is not None else None


class WorkerGroup:
    """A `Group` of actors."""

    def __init__(self, labels: Sequence[str], actors: Sequence[Any]) -> None:
        self._labels = list(labels)
        self._actors = list(actors)
        self._starting: list[Any] = []
        self._start_deadline_s = 0.0
        self._ended = False
        self._left: dict[int, Any] = {}
        self._ray = CONNECTION.held_by(self)
        self.keeps = False
        """True if members that outlive another are kept, for the next group. Their calls end soon after its death."""
        self._where: list[Any] = []

    @classmethod
    def found(cls, name: str, labels: Sequence[str], actors: Sequence[Any]) -> Self:
        """A group that an earlier flow process has started, by its name."""
        return cls(labels, actors)

    def start(self, factory: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], deadline_s: float) -> None:
        """Have each member make its object from its own arguments. Does not wait; the first call does."""
        self._start_deadline_s = deadline_s
        self._where = self._asked()
        members = zip(self._actors, arguments, strict=True)
        self._starting = [actor.make.remote(factory, own, current_stage()) for actor, own in members]

    def submit(self, method: str, *arguments: Any, **options: Any) -> "PendingCall":
        if self._over:
            raise WorkerLost(f"{self._labels[0]} has ended; the next attempt starts a new one")
        return CONNECTION.call(self._ray, self._send, method, arguments, options)

    def _send(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> "PendingCall":
        self._where = self._where or self._asked()
        shared = arguments if len(self._actors) == 1 else [ray.put(argument) for argument in arguments]
        references = [actor.call.remote(current_stage(), method, *shared, **options) for actor in self._actors]
        return PendingCall(self, references, method)

    @property
    def _over(self) -> bool:
        return self._ended or self._ray != CONNECTION.number

    def gather(self, references: list[Any], what: str, deadline_s: float) -> list[Any]:
        """Results of a call in the order of members; raises as `Pending.wait`."""
        if self._starting:
            try:
                self._waited(self._starting, _START, self._start_deadline_s)
            except RatchetError:
                _answered(references, _GRACE_S)  # else Ray prints what a call raises that has no object
                raise
            self._starting = []
        return self._waited(references, what, deadline_s)

    def _waited(self, references: list[Any], what: str, deadline_s: float) -> list[Any]:
        named = f"{what} ({current_stage()})" if current_stage() else what
        with SILENCE.over(Wait(named, self._ray, self._places)):
            return self._collect(references, what, deadline_s)

    def _places(self) -> dict[Where, str]:
        """Members by their processes, of those that have said where they are."""
        known = ray.wait(self._where, num_returns=len(self._where), timeout=0)[0] if self._where else []
        named, found = dict(zip(self._where, self._labels, strict=True)), dict[Where, str]()
        for reference in known:
            with suppress(ray.exceptions.RayError):  # it died before it could say so
                found[ray.get(reference)] = named[reference]
        return found

    def _host_of(self, label: str) -> str:
        """The end of a phrase that tells a member's host, if that is known."""
        places = CONNECTION.call(self._ray, self._places)
        return next((f" on host {place.host}" for place, name in places.items() if name == label), "")

    def alive(self) -> bool:
        if self._over:
            return False
        pings = [actor.calls.remote() for actor in self._actors]
        if _answered(pings, _PING_S)[1]:
            self.end(_answered(pings, _GRACE_S)[0])
        return not self._ended

    def survivors(self) -> dict[int, Any]:
        """Hand over the members that outlived another one, by their place in this group."""
        left, self._left, self._actors = self._left, {}, []
        return left

    def processes(self) -> list[int]:
        """A member that is at work answers once it has ended its call. A group with a dead member is ended."""
        try:
            found = self._collect(CONNECTION.call(self._ray, self._asked), "where", math.inf)
        except WorkerLost:
            return []
        return [place.process for place in found]

    def _asked(self) -> list[Any]:
        return [actor.where.remote() for actor in self._actors]

    def in_step(self) -> bool:
        """True if all members are idle and have begun the same number of calls, so that new calls can be made."""
        counts = [actor.calls.remote() for actor in self._actors]
        ready, late = ray.wait(counts, num_returns=len(counts), timeout=_ATTACH_S)
        try:
            begun = set(ray.get(ready))
            return not late and len(begun) == 1 and None not in begun
        except ray.exceptions.RayError:
            return False

    def end(self, spared: Collection[int] = ()) -> None:
        """As `Group.end`; the members in those places live on, for `survivors`."""
        self._ended = True
        spared = spared if self.keeps else ()
        self._left = {place: self._actors[place] for place in spared}
        with suppress(WorkerLost):  # with Ray itself they have ended
            for place, actor in enumerate(self._actors):
                if place not in spared:
                    CONNECTION.call(self._ray, ray.kill, actor)

    def _collect(self, references: list[Any], what: str, deadline_s: float) -> list[Any]:
        results: dict[Any, Any] = {}
        failures: dict[int, RatchetError] = {}
        places = {reference: place for place, reference in enumerate(references)}
        pending, deadline = references, time.monotonic() + deadline_s
        while pending:
            left = max(0.0, deadline - time.monotonic())
            ready, pending = CONNECTION.wait(self._ray, pending, min(grace_s(failures.values(), self.keeps), left))
            if not ready:
                break
            for reference in ready:
                member = places[reference]
                try:
                    results[reference] = CONNECTION.call(self._ray, ray.get, reference)
                except ray.exceptions.RayError as error:
                    label = self._labels[member]
                    failures[member] = _explained(error, label, f"{what}{self._host_of(label)}")
        if len(results) == len(references):
            return [results[reference] for reference in references]
        if not failures:
            member = places[pending[0]]
            failures[member] = self._late(member, what, deadline_s)
        ended = len(failures) + (len(results) if what in _CHANGES_NOTHING else 0)
        in_step = ended == len(references)
        if not in_step or any(isinstance(failure, WorkerLost) for failure in failures.values()):
            self.end(_outlived(failures, [places[reference] for reference in results]))
        # a death explains the errors of those that waited for the dead one
        raise min((failures[one] for one in sorted(failures)), key=lambda failure: not isinstance(failure, WorkerDied))

    def _late(self, member: int, what: str, deadline_s: float) -> WorkerLost:
        setting = _DEADLINES.get(what, "call_deadline_s")
        return WorkerLost(
            f"{self._labels[member]} did not finish {what} within {deadline_s:g} s and was ended; the next attempt "
            f"starts a new one. If the work takes that long, raise workers.{setting}"
        )


class ObservedGroup(WorkerGroup):
    """The group of a run that others drive: its processes are never ended from here."""

    def end(self, spared: Collection[int] = ()) -> None:
        """Detach; the processes keep running."""
        self._ended = True


class PendingCall:
    """A `Pending` call of a group."""

    def __init__(self, group: WorkerGroup, references: list[Any], method: str) -> None:
        self._group, self._references, self._method = group, references, method
        CONNECTION.held_by(self)

    def wait(self, deadline_s: float) -> list[Any]:
        return self._group.gather(self._references, self._method, deadline_s)


def spawn(
    names: Sequence[str],
    environments: Sequence[dict[str, str]],
    detached: bool,
    seats: Sequence[Mapping[str, Any]] = (),
) -> list[Any]:
    """Start one actor per name, each with its environment variables on top of the inherited ones. Without `seats`,
    Ray's options of each, they reserve nothing: on two cores of one host a pipeline of two ranks and an engine would
    otherwise wait for ever, and CUDA_VISIBLE_DEVICES decides which card an actor sees."""
    host = ray.remote(Host)
    lifetime = "detached" if detached else None
    return [
        host.options(
            **{"num_cpus": 0, "num_gpus": 0, **seat},
            max_restarts=0,  # a restarted process would have lost its weights without our knowing
            name=name,
            namespace=NAMESPACE,
            lifetime=lifetime,
            runtime_env={"env_vars": environment},
        ).remote(short_name(name))
        for name, environment, seat in zip(names, environments, seats or [{}] * len(names), strict=True)
    ]


def placed(
    names: Sequence[str],
    environment: dict[str, str],
    detached: bool,
    seats: Sequence[Mapping[str, Any]],
    there: Mapping[int, Any],
) -> list[Any]:
    """An actor for each name, in their order. Those that are `there` already, by the place of their name, take its
    label at the end of what they do; the others are spawned."""
    new = [place for place in range(len(names)) if place not in there]
    chosen = [seats[place] for place in new] if seats else ()
    spawned = spawn([names[place] for place in new], [environment] * len(new), detached, chosen)
    by_place = {**there, **dict(zip(new, spawned, strict=True))}
    for place, actor in there.items():
        actor.become.remote(short_name(names[place]))
    return [by_place[place] for place in range(len(names))]


def fresh_names(prefix: str, count: int) -> list[str]:
    """Names for a new group below `prefix`: no name is used twice, because a dead actor frees its name late."""
    token = uuid.uuid4().hex[:TOKEN_CHARACTERS]
    return [f"{prefix}/{token}/{index}" for index in range(count)]


def short_name(name: str) -> str:
    """Label of an actor in logs, from its name: `trainer-RANK` or `engine-NUMBER`."""
    role, index = name.split("/")[1], name.rpartition("/")[2]
    return f"trainer-{index}" if role == "trainers" else role


def group_name(name: str) -> str:
    """The group of the actor with that name, as `find_groups` gives it."""
    return name.rpartition("/")[0]


def find_groups(prefix: str) -> dict[str, list[Any]]:
    """Actors of earlier flow processes below `prefix`, by group, in the order of their indices."""
    groups: dict[str, dict[int, Any]] = {}
    for name in ray.util.list_named_actors():
        if name.startswith(f"{prefix}/"):
            index = int(name.rpartition("/")[2])
            groups.setdefault(group_name(name), {})[index] = ray.get_actor(name, namespace=NAMESPACE)
    return {group: [members[index] for index in sorted(members)] for group, members in groups.items()}


def label_of(actor: Any) -> str:
    """The label of an actor once it has ended what it does; empty if it has died."""
    try:
        return ray.get(actor.label.remote())
    except ray.exceptions.RayError:
        return ""


def living[K](actors: Mapping[K, Any]) -> dict[K, Any]:
    """Those that are not known to be dead."""
    dead = _answered([actor.calls.remote() for actor in actors.values()], _PING_S)[1]
    return {key: actor for place, (key, actor) in enumerate(actors.items()) if place not in dead}


def _answered(references: list[Any], timeout_s: float) -> tuple[set[int], set[int]]:
    """Places of the calls that end in time: those with an answer, and those whose actor has died."""
    ready, _ = ray.wait(references, num_returns=len(references), timeout=timeout_s) if references else ([], [])
    dead: set[int] = set()
    for reference in ready:
        try:
            ray.get(reference)
        except ray.exceptions.RayError:
            dead.add(references.index(reference))
    return {references.index(reference) for reference in ready} - dead, dead


def grace_s(failures: Collection[RatchetError], keeps: bool) -> float:
    """Time for the others to end their part of a call after these failures. Those that a death leaves in the middle of
    one, and who are not kept, get none; their errors would not be told."""
    if not failures:
        return math.inf
    return _GRACE_S if keeps or not any(isinstance(one, WorkerDied) for one in failures) else 0.0


def _outlived(failures: Mapping[int, RatchetError], done: Iterable[int]) -> set[int]:
    """Members that are idle and whose group has ended only because another one died."""
    died = {member for member, failure in failures.items() if isinstance(failure, WorkerDied)}
    return {*failures, *done} - died if died else set()


def _explained(error: ray.exceptions.RayError, label: str, what: str) -> RatchetError:
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return OutOfMemory(f"{label} was ended during {what}, because its host has no memory: {first_line(error)}")
    if not isinstance(error, ray.exceptions.RayTaskError):
        return WorkerDied(f"{label} died during {what} ({first_line(error)}); the next attempt starts a new one")
    cause = error.cause
    if isinstance(cause, RatchetError):
        return type(cause)(f"{label}: {cause}")
    kind = OutOfMemory if lacks_memory(cause) else WorkerLost
    lost = kind(f"{label} failed in {what} and was ended: {type(cause).__name__}: {cause}")
    lost.add_note(str(error))  # the traceback of the other process
    return lost


def lacks_memory(cause: BaseException) -> bool:
    """True if an error says, by its type or code, that memory of a host or card could not be had."""
    if isinstance(cause, OSError):
        return cause.errno == errno.ENOMEM
    named = {kind.__name__ for kind in type(cause).__mro__}
    return bool(_MEMORY & named) or ("AcceleratorError" in named and vars(cause).get("error_code") == _CUDA_MEMORY)
