"""One weight update as a transaction over all engines: in the end all of them serve the new weights, or none does."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from storage import layout
from storage.errors import RatchetError, SyncMismatch, WorkerLost
from storage.kill_points import Point
from storage.ownership.scratch import scratch
from tasks.engine.protocol import BASE, Arrived, EngineIdentity, weights_digest
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.proof import agreed_plan, proven
from tasks.workers.interface import EngineHandle, Pending, TrainerGroup
from tasks.workers.placement import transport
from trainer_core.collector import paused
from trainer_core.protocol import Planned, Sent, TrainerProtocol
from trainer_core.weights.channel import Channel, Transport, fail
from trainer_core.weights.plan import Form

_DEADLINE_S = 600.0  # for which one side waits for the other
_SHARE = 0.8  # of the deadline of a call, which ends the process: this one must come first, which only fails the update


@dataclass(frozen=True)
class Delivery:
    """The outcome of one update of every engine."""

    weights_digest: str  # identity of all weights together
    digests: dict[str, str]  # `tensor_digest` of each weight by name
    bytes: int
    landed: int  # tensors that each engine has found again in its live parameters
    quantized: str | None  # digest of the FP8 numbers and scales that the kernels of each engine read
    base_bytes: int  # of the frozen weights that engines got before a live adapter; 0 if all had them
    exchanges: int  # exchanges of metadata between trainer ranks
    seconds: dict[str, float]
    """Time by step: plan, prepare, send, verify, commit; the last three together are `pause`; by what ranks and engines
    spent theirs on, of the slowest: send_convert, receive_load and so on."""

    def metrics(self) -> dict[str, float]:
        """As a manifest records it."""
        return {
            "tensors": float(len(self.digests.keys() - {BASE})),
            "bytes": float(self.bytes),
            "landed": float(self.landed),
            "metadata_exchanges": float(self.exchanges),
            **({"base_bytes": float(self.base_bytes)} if self.base_bytes else {}),
            **{f"{step}_s": took for step, took in self.seconds.items()},
        }


def deliver(
    context: RunContext,
    engines: Mapping[int, EngineHandle],
    group: TrainerGroup,
    version: int,
    expected: str | None = None,
    stored: Path | None = None,
    noted: Callable[[Point], object] = lambda _: None,
    form: Form | None = None,
) -> Delivery:
    """Bring the weights that the trainer ranks hold, or those of a stored state, into all of these engines, in place.
    With a live adapter these are its factors; an engine that does not hold the frozen weights of the trainer gets them
    first, by an update of its own, after which it serves nothing until the adapter is committed.
    Until the first commit nothing serves the new weights. An engine that was not written to serves the old ones if this
    fails; one that was refuses to, until the next delivery. A repetition is safe at any time. `engines` are by number.
    The weights must have the `weights_digest` `expected`; by default any. `stored` is a local folder with the weights
    of a saved state, to be sent in place of those that the ranks hold. `noted` is called at the points of a
    transaction. `form` is by default that of `engine.adapter`. Raises SyncMismatch (ranks disagree, or what engines
    received or loaded is not exactly what was sent; no engine has committed, unless the failure is that of a commit) or
    WorkerLost (a process was lost)."""
    form = form or ("adapter" if context.config.engine.adapter == "live" else "whole")
    section = context.config.sync
    place = context.workers.placement()
    way = transport(section.transport, place)
    with _between_hosts(context, version) if place.apart else scratch(memory=way != "files") as folder:
        channel = _channel(context, way, folder, len(engines))
        update = _Update(context, engines, group, channel, stored, noted, form)
        try:
            with paused():
                return update.perform(version, section.arena_mib << 20, expected)
        except BaseException as error:
            update.abort(error)
            raise


@contextmanager
def _between_hosts(context: RunContext, version: int) -> Iterator[str]:
    """A folder of the run in its storage root, for a block."""
    root, key = context.root, layout.update_folder(context.run, version, Stage.WEIGHT_SYNC, uuid.uuid4().hex)
    if root.folder is not None:
        Path(root.folder, key).mkdir(parents=True)
    try:
        yield f"{root.url}/{key}"
    finally:
        for written in root.keys(key):
            root.remove(written)
        root.remove_empty(key)


def _channel(context: RunContext, way: Transport, folder: Path | str, engines: int) -> Channel:
    return Channel(
        transport=way,
        folder=str(folder),
        receivers=engines * context.config.engine.tensor,
        deadline_s=min(_DEADLINE_S, _SHARE * context.config.workers.call_deadline_s),
    )


@dataclass
class _Clock:
    """Time by step, each from the end of the one before."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def ended(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step], self.last = now - self.last, now


@dataclass(frozen=True)
class _Update:
    context: RunContext
    engines: Mapping[int, EngineHandle]
    group: TrainerGroup
    channel: Channel
    stored: Path | None
    noted: Callable[[Point], object]
    form: Form

    def perform(self, version: int, arena_bytes: int, expected: str | None) -> Delivery:
        clock = _Clock()
        planned, held = self._plan(version, arena_bytes)
        plan, base = agreed_plan(planned, version), None
        if lacking := {number: self.engines[number] for number, one in held.items() if one != plan.base}:
            base = deliver(self.context, lacking, self.group, version, form="base")  # no state changes these weights
            clock.ended("base")
            planned, _ = self._plan(version, arena_bytes)
            plan = agreed_plan(planned, version)
        clock.ended("plan")
        finishing = self.context.config.sync.in_flight == "wait"  # for longer, it may be, than ranks wait for engines
        if finishing:
            self._prepare(planned[0])
        with self._sending(planned[0].digest) as sending:
            if not finishing:
                self._prepare(planned[0])
        clock.ended("prepare")
        calls = [partial(self.group.results, sending), *(engine.receive_update for engine in self.engines.values())]
        sent, *arrived = at_once(calls, lambda error: fail(self.channel.folder, _reason(error)))
        clock.ended("send")
        digests = proven(plan, sent, dict(zip(self.engines, arrived, strict=True)), expected)
        clock.ended("verify")
        self._commit(version, weights_digest(digests))
        clock.ended("commit")
        return Delivery(
            weights_digest=weights_digest(digests),
            digests=digests,
            bytes=plan.nbytes,
            landed=min(one.landed for one in arrived),
            quantized=arrived[0].quantized,
            base_bytes=0 if base is None else base.bytes,
            exchanges=max(one.exchanges for one in planned),
            seconds={
                **clock.seconds,
                "pause": sum(clock.seconds[step] for step in ("send", "verify", "commit")),
                **_parts("send", sent),
                **_parts("receive", arrived),
            },
        )

    def abort(self, error: BaseException) -> None:
        """Make everybody stop, and every engine forget the update."""
        reason = _reason(error)
        fail(self.channel.folder, reason)
        for number, engine in self.engines.items():
            try:
                serves = engine.abort_update(reason)
            except RatchetError:  # it is lost; the next attempt starts a new one
                continue
            if not serves:
                self.context.say(f"engine {number} refuses to sample until the next weight sync: {reason}")

    def _plan(self, version: int, arena_bytes: int) -> tuple[list[Planned], dict[int, str | None]]:
        """Plans of all ranks, made while the engines look at their models; and, for an adapter, the digest of the
        frozen weights that each engine holds, by its number."""
        planning = self.group.submit(TrainerProtocol.plan_weights, version, arena_bytes, self.form)
        surveying = (engine.survey_model for engine in self.engines.values())
        planned, *held = at_once([partial(self.group.results, planning), *surveying])
        return planned, dict(zip(self.engines, held, strict=True)) if self.form == "adapter" else {}

    def _prepare(self, planned: Planned) -> None:
        plan, digest = planned.plan or "", planned.digest
        tensor, in_flight = self.context.config.engine.tensor, self.context.config.sync.in_flight
        calls = [
            partial(engine.prepare_update, plan, digest, self.channel, place * tensor, in_flight)
            for place, engine in enumerate(self.engines.values())
        ]
        computed = at_once(calls)
        for number, found in zip(self.engines, computed, strict=True):
            if found != digest:
                raise SyncMismatch(
                    f"engine {number} has computed {found} as the digest of the plan of the weight update, the trainer "
                    f"{digest}: they run different versions of Ratchet. Start both again"
                )

    @contextmanager
    def _sending(self, digest: str) -> Iterator[Pending[list[Sent]]]:
        """Ranks begin to send into their own arenas. If the block fails they stop, and are waited for."""
        sending = self.group.submit(TrainerProtocol.send_weights, digest, self.channel, self.stored)
        try:
            yield sending
        except BaseException as error:
            fail(self.channel.folder, _reason(error))
            with suppress(RatchetError):  # which the block's explains
                self.group.results(sending)
            raise

    def _commit(self, version: int, digest: str) -> None:
        self.noted(Point.SENT)
        committed = EngineIdentity(weight_version=version, weights_digest=digest)
        for number, engine in self.engines.items():
            held = engine.commit_update(version, digest)
            self.noted(Point.SERVED)
            if held != committed:
                fact = f"engine {number} serves {held} after {committed} was committed"
                raise SyncMismatch(f"{fact}; sync the weights again")


def _reason(error: BaseException) -> str:
    return str(error) or "the weight sync was interrupted"


def _parts(side: str, processes: Sequence[Sent] | Sequence[Arrived]) -> dict[str, float]:
    """Durations by activity, of the slowest process."""
    steps = {step for process in processes for step in process.seconds}
    return {f"{side}_{step}": max(process.seconds.get(step, 0.0) for process in processes) for step in sorted(steps)}


def at_once(calls: Sequence[Callable[[], Any]], stop: Callable[[BaseException], object] = lambda _: None) -> list[Any]:
    """Results of calls that wait for other processes, made at the same time for the caller's stage, in order. `stop` is
    called as soon as one has failed, so that the others do not wait for it. Raises WorkerLost if a process was lost,
    which explains the errors of those that waited for it; else the first error."""
    failures: list[BaseException] = []

    def made(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            failures.append(error)
            stop(error)
            raise

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(copy_context().run, made, call) for call in calls]
        try:
            wait(futures)
        except BaseException as error:  # an interruption
            stop(error)
            raise
    if failures:
        raise next((one for one in failures if isinstance(one, WorkerLost)), failures[0])
    return [future.result() for future in futures]
