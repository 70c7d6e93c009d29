"""Ratchet's weight sync against the stock way, between the same processes: trainer ranks and an engine, as in a run."""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from infra.bench.cases import SyncCaseName
from infra.bench.hollow import hollow_model
from infra.bench.sync_cases import SYNC_CASES, SyncRound
from infra.bench.sync_sides import Sides, sides
from storage.errors import InputError
from tasks.config.environment import Settings
from tasks.config.run import TransportChoice
from tasks.workers.cluster import Cluster


class SyncBench(BaseModel):
    """Measurements: medians over rounds, in which the sides take turns, by the wall clock."""

    device: str
    """Name of the device."""
    case: SyncCaseName
    """Name of the case."""
    ranks: int
    """Trainer ranks."""
    cards: str
    """Cards of the trainer's ranks, and those of the engine."""
    transport: str
    """Transport of Ratchet's side."""
    pairs: int
    """Rounds, after one that does not count."""
    tensors: int
    """Tensors of an update."""
    bytes: int
    """Bytes of an update."""
    seconds: float
    """Ratchet's update, verified: from the plan's first call until every engine has committed, as long as engines stand
    still in a loop that waits for it."""
    pause_s: float
    """The part of it in which an engine could not serve: from the first byte sent until it has committed."""
    first_seconds: float
    """The same in the first round, which opens arenas and compiles the kernel of digests."""
    kept_plan_seconds: float
    """Seconds with the plan of an earlier update; the difference is the cost of planning."""
    stock_seconds: float
    """megatron-bridge's export with fresh tasks into vLLM's own reload: on CPU by safetensors in shared memory, on a
    card by vLLM's transfer of CUDA IPC handles, between cards by its packed broadcasts (NCCL, connected before).
    Nothing is verified."""
    speedup: float
    """Median over rounds of stock by ours."""
    gb_per_s: float
    """Bytes by `seconds`, 10^9 a second."""
    send_gb_per_s: float
    """Bytes by the step `send`, in which they are converted, moved and loaded."""
    link_gb_per_s: float | None
    """A plain copy of an arena to the engine's first worker, from the rank with the slowest link; on CPU within
    memory of the host. None if the cards cannot read each other's memory."""
    link_share: float | None
    """`send_gb_per_s` by that."""
    probe_s: float
    """Log-probabilities of a probe by trainer and engine, after the commit."""
    probe_difference: float
    """Mean |engine - trainer| over the probe after ours, nat; the largest of all rounds."""
    sample_difference: float
    """The same over tokens that the engine samples. On a card its CUDA graphs compute them: if they read other memory
    than the update has written, the difference is a hundred times as large."""
    stock_probe_difference: float
    """The same after the stock way."""
    unverified_pause_s: float
    """The pause without digests of the weights that were sent, arrived and landed; of several updates in each round."""
    verify_share: float
    """Share of the pause for verification: each of those updates has one with digests beside it, before or after it in
    turns; the median over these pairs of 1 minus the one pause by the other."""
    object_collectives: int
    """Collectives of Python objects in one of Ratchet's updates, over all ranks."""
    stock_object_collectives: int
    """The same in one stock update."""
    metadata_exchanges: int
    """Exchanges of metadata between trainer ranks in one update."""
    extra_gib: float
    """Memory of all cards that Ratchet's first update took and kept, by trainer and engine together; 0 on CPU."""
    stock_extra_gib: float
    """The same of the stock way."""
    steps: dict[str, float]
    """Ratchet's update by step, and in each by what the slowest process spent its time on; seconds."""


def bench_sync(case_name: SyncCaseName | None, pairs: int, wanted: TransportChoice = "auto") -> SyncBench:
    """Measure ours, ours with a kept plan, and the stock way in turns, `pairs` times each after one round that does not
    count.

    Without a case it is the one that fits the device: "cpu" without a GPU, "0.75b" with one.

    Args:
        wanted: transport of Ratchet's side.

    Raises:
        InputError: `pairs` is below 1; or the case needs more cards than there are.
        SyncMismatch: an update did not arrive.
        WorkerLost: a process was lost.
    """
    if pairs < 1:
        raise InputError(f"{pairs} rounds measure nothing: give at least 1")
    settings = Settings.from_environment()
    device = settings.device("auto")
    name: SyncCaseName = case_name or ("cpu" if device == "cpu" else "0.75b")
    case = SYNC_CASES[name]
    with tempfile.TemporaryDirectory() as folder, Cluster(settings) as cluster:
        hollow_model(Path(folder), case.model, case.precision)
        with sides(Path(folder), case, cluster, wanted) as ways:
            ways.wait_until_ready()
            first, *rounds = [ways.round(number) for number in range(pairs + 1)]
            return _report(name, ways, first, rounds, ways.link())


def _report(
    name: SyncCaseName, ways: Sides, first: SyncRound, rounds: list[SyncRound], link: float | None
) -> SyncBench:
    def median(of: Callable[[SyncRound], float]) -> float:
        return statistics.median(map(of, rounds))

    delivered = rounds[-1].delivery
    steps = {step: median(lambda one: one.delivery.seconds[step]) for step in delivered.seconds}  # noqa: B023
    seconds = median(lambda one: one.seconds)
    pauses = [pair for one in rounds for pair in one.pauses]
    rate = delivered.bytes / steps["send"]
    return SyncBench(
        device=ways.device,
        case=name,
        ranks=SYNC_CASES[name].pipeline,
        cards=ways.place.shown,
        transport=ways.transport,
        pairs=len(rounds),
        tensors=len(delivered.digests),
        bytes=delivered.bytes,
        seconds=seconds,
        pause_s=steps["pause"],
        first_seconds=first.seconds,
        kept_plan_seconds=median(lambda one: one.kept_plan_seconds),
        stock_seconds=median(lambda one: one.stock_seconds),
        speedup=median(lambda one: one.stock_seconds / one.seconds),
        gb_per_s=delivered.bytes / seconds / 1e9,
        send_gb_per_s=rate / 1e9,
        link_gb_per_s=None if link is None else link / 1e9,
        link_share=None if link is None else rate / link,
        probe_s=median(lambda one: one.probe_s),
        probe_difference=max(one.probe_difference for one in rounds),
        sample_difference=max(one.sample_difference for one in rounds),
        stock_probe_difference=max(one.stock_probe_difference for one in rounds),
        unverified_pause_s=statistics.median(unverified for _, unverified in pauses),
        verify_share=statistics.median(1 - unverified / verified for verified, unverified in pauses),
        object_collectives=max(one.object_collectives for one in rounds),
        stock_object_collectives=max(one.stock_object_collectives for one in rounds),
        metadata_exchanges=delivered.exchanges,
        extra_gib=first.extra_bytes / 2**30,
        stock_extra_gib=first.stock_extra_bytes / 2**30,
        steps=steps,
    )
