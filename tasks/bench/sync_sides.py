"""The processes of the sync bench, started as a run starts them, and the three ways from trainer to engine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from storage.backends.root import open_root
from storage.errors import SyncMismatch
from tasks.bench.sync_calls import SyncEngineHandle, SyncGroup
from tasks.bench.sync_cases import SyncCase, SyncRound
from tasks.bench.sync_engine import SyncEngine
from tasks.bench.sync_start import start_sync_rank
from tasks.config.document import parse_config
from tasks.config.environment import engine_environment
from tasks.config.run import RunConfig
from tasks.engine.protocol import EngineSpec
from tasks.stages.context import RunContext
from tasks.stages.transaction import Delivery, at_once, deliver
from tasks.workers.actors import fresh_names, spawn
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet
from tasks.workers.placement import engine_cards, transport
from tasks.workers.ranks import RankActors, start_trainers
from tasks.workers.scratch import scratch
from trainer_core.config import Device, OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig

_LENGTH = 96  # tokens of a sequence of the probe
_PROBE = 8  # sequences
_CACHE_MIB = {"cpu": 64, "cuda": 2 << 10}
_TOGETHER = 16  # sequences decoded together: the fewer, the shorter the start with CUDA graphs
_MOST_APART = 0.1  # nat, on average over the probe: the same weights differ by a tenth of it in bf16


class Sides:
    """Trainer ranks and an engine, and the ways from one to the other."""

    def __init__(self, context: RunContext, group: SyncGroup, engine: SyncEngineHandle) -> None:
        place = context.workers.placement()
        self.device = place.device
        self.transport = transport(context.config.sync.transport, place)
        self._context, self._group, self._engine = context, group, engine
        self._version = 0
        drawn = np.random.default_rng(0).integers(3, 500, (_PROBE, _LENGTH), dtype=np.int32)
        self._probe = list(drawn)  # (S,) each

    def wait_until_ready(self) -> None:
        """Wait until all processes have started, so that the first round measures itself alone."""
        self._group.draw(0)
        self._engine.score(self._probe)

    def round(self, number: int) -> SyncRound:
        """Each way once. The weights are others each time, but the kept plan moves the same ones again.

        Raises:
            SyncMismatch: engine and trainer disagree afterwards.
        """
        self._group.draw(2 * number)
        self._version += 1
        delivery, seconds, object_collectives, extra = self._measured(self._ours)
        probe_s, difference = self._probed("ours")
        self._group.keep_plan(True)
        _, kept_s, _, _ = self._measured(self._ours)
        self._group.keep_plan(False)
        self._group.draw(2 * number + 1)
        _, stock_s, stock_objects, stock_extra = self._measured(self._stock)
        return SyncRound(
            delivery=delivery,
            seconds=seconds,
            kept_plan_seconds=kept_s,
            stock_seconds=stock_s,
            probe_s=probe_s,
            probe_difference=difference,
            stock_probe_difference=self._probed("the stock way")[1],
            object_collectives=object_collectives,
            stock_object_collectives=stock_objects,
            extra_bytes=extra,
            stock_extra_bytes=stock_extra,
        )

    def _ours(self) -> Delivery:
        return deliver(self._context, {0: self._engine}, self._group, self._version)

    def _stock(self) -> None:
        with scratch(memory=True) as folder:
            if self.device == "cpu":
                self._group.stock_files(str(folder))
                self._engine.stock_files(str(folder))
            else:
                at_once([partial(side.stock_handles, str(folder)) for side in (self._group, self._engine)])

    def _measured[R](self, way: Callable[[], R]) -> tuple[R, float, int, int]:
        """What a way returns, its seconds, collectives of objects, and bytes of the card that it took and kept."""
        self._group.object_collectives()
        before = self._group.card_bytes()
        begun = time.perf_counter()
        found = way()
        seconds = time.perf_counter() - begun
        return found, seconds, self._group.object_collectives(), self._group.card_bytes() - before

    def _probed(self, way: str) -> tuple[float, float]:
        begun = time.perf_counter()
        trainer, engine = self._group.logprobs(self._probe), self._engine.score(self._probe)
        seconds = time.perf_counter() - begun
        difference = float(np.abs(np.concatenate(engine) - np.concatenate(trainer)).mean())
        if not difference < _MOST_APART:
            raise SyncMismatch(f"after {way}, engine and trainer differ by {difference:.3g} nat: the bench is wrong")
        return seconds, difference


@contextmanager
def sides(model: Path, case: SyncCase, cluster: Cluster) -> Iterator[Sides]:
    """Start the processes; they end with the block."""
    device = cluster.settings.device("auto")
    config = _config(model, case, device)
    fleet = Fleet("bench", config, cluster)
    context = RunContext("bench", open_root(str(model)), config, "", fleet, model)
    cluster.start()
    group = SyncGroup(_trainers(model, case, device, cluster, config), config.workers)
    try:
        engine = SyncEngineHandle(_engine(fleet.engine_spec(model), cluster, config), config.workers)
        try:
            yield Sides(context, group, engine)
        finally:
            engine.end()
    finally:
        group.end()


def _config(model: Path, case: SyncCase, device: Device) -> RunConfig:
    return parse_config(
        {
            "model": {"source": str(model)},
            "data": {"generate": {}},
            "engine": {
                "max_model_len": _LENGTH + 8,
                "max_num_seqs": _TOGETHER,
                "kv_cache_mib": _CACHE_MIB[device],
                "precision": case.precision,
            },
            "train": {
                "max_length": _LENGTH,
                "optimizer": {"learning_rate": 1e-6},
                "parallel": {"pipeline": case.pipeline},
            },
        },
        "the bench",
    )


def _trainers(model: Path, case: SyncCase, device: Device, cluster: Cluster, config: RunConfig) -> RankActors:
    trainer = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-6),
        policy=PolicyConfig(),
        precision=case.precision,
        max_length=_LENGTH,
        parallel=ParallelConfig(pipeline=case.pipeline),
    )
    deadline_s = config.workers.start_deadline_s
    return start_trainers(
        "bench/trainers", str(model), trainer, device, cluster.settings, deadline_s, start=start_sync_rank
    )  # fmt: skip


def _engine(spec: EngineSpec, cluster: Cluster, config: RunConfig) -> RankActors:
    settings = cluster.settings
    cards = engine_cards(settings.gpus, 0, spec.tensor) if spec.device == "cuda" else ()
    # `receive_handles` is sent to vLLM's worker
    environment = engine_environment(spec.device, cards, settings.local) | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    actors = spawn(fresh_names("bench/engine-0", 1), [environment], detached=not settings.local)
    group = RankActors(["engine 0"], actors)
    group.start(SyncEngine, [(spec,)], config.workers.start_deadline_s)
    return group
