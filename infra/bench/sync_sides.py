"""The processes of the sync bench, started as a run starts them, and the three ways from trainer to engine."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infra.bench.sync_calls import SyncEngineHandle, SyncGroup
from infra.bench.sync_cases import SyncCase, SyncRound
from infra.bench.sync_engine import StockTensors, SyncEngine
from infra.bench.sync_start import start_sync_rank
from storage.backends.root import open_root
from storage.errors import SyncMismatch
from storage.ownership.scratch import new_folder, scratch
from tasks.config.document import parse_config
from tasks.config.environment import engine_environment
from tasks.config.run import RunConfig, TransportChoice
from tasks.engine.protocol import Sampling
from tasks.stages.context import RunContext
from tasks.stages.transaction import Delivery, at_once, deliver
from tasks.workers.actors import fresh_names, spawn
from tasks.workers.cluster import LOOPBACK, Cluster
from tasks.workers.fleet import Fleet
from tasks.workers.placement import transport
from tasks.workers.ranks import RankActors, start_trainers
from trainer_core.config import Device, OptimizerConfig, PolicyConfig, TrainerConfig
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Bucket, WeightPlan

_LENGTH = 96  # tokens of a sequence of the probe
_PROBE = 8  # sequences
_PROMPT, _SAMPLED = 24, 40  # tokens, of their beginnings and of the samples
_SAMPLES = ("response_tokens", "logprobs")  # columns
_CACHE_MIB = {"cpu": 64, "cuda": 2 << 10}
_TOGETHER = 16  # sequences decoded together: the fewer, the shorter the start with CUDA graphs
_PAUSES = 4  # pairs of a round, with digests and without
_MOST_APART = 0.1  # nat, on average over the probe: the same weights differ by a tenth of it in bf16


class Sides:
    """Trainer ranks and an engine, and the ways from one to the other."""

    def __init__(self, context: RunContext, group: SyncGroup, engine: SyncEngineHandle) -> None:
        place = context.workers.placement()
        self.device, self.place = place.device, place
        self.transport = transport(context.config.sync.transport, place)
        self._context, self._group, self._engine = context, group, engine
        self._workers = context.config.engine.tensor
        self._apart = self.device == "cuda" and not {*place.ranks} & {*place.engines[0]}
        self._tensors: StockTensors = []
        self._version = 0
        drawn = np.random.default_rng(0).integers(3, 500, (_PROBE, _LENGTH), dtype=np.int32)
        self._probe = list(drawn)  # (S,) each

    def wait_until_ready(self) -> None:
        """Wait until all processes have started, so that the first round measures itself alone."""
        self._group.draw(0)
        self._engine.score(self._probe)
        if self._apart:
            port = _free_port()
            at_once([partial(side.stock_meet, port, self._workers) for side in (self._group, self._engine)])
            self._tensors = self._group.stock_tensors()

    def link(self) -> float | None:
        """Bytes a second of a plain copy of an arena to the engine's first worker, from the rank with the slowest
        link; None if the cards cannot read each other's memory. Call it after a round.
        """
        if self.device == "cuda" and not (self.place.one_card or self.place.reads):
            return None
        size = self._group.arena_bytes()  # or a rank would make other ones
        ranks = range(self._context.config.train.parallel.world_size)
        buckets = tuple(Bucket(number=rank, sender=rank, nbytes=size) for rank in ranks)
        plan = WeightPlan(version=0, tensors=(), buckets=buckets, arena_bytes=size)
        with scratch(memory=True) as folder:
            way = "cuda" if self.device == "cuda" else "memory"
            channel = Channel(transport=way, folder=str(folder), receivers=self._workers)
            self._group.show_arenas(channel, plan)
            return size / max(self._engine.copy_seconds(channel, plan))

    def round(self, number: int) -> SyncRound:
        """Run each way once. The weights are others each time, but the kept plan moves the same ones again.

        Raises:
            SyncMismatch: engine and trainer disagree afterwards.
        """
        self._group.draw(2 * number)
        self._version += 1
        delivery, seconds, object_collectives, extra = self._measured(self._ours)
        probe_s, difference = self._probed("ours")
        sample_difference = self._sampled()
        self._group.keep_plan(True)
        _, kept_s, _, _ = self._measured(self._ours)
        self._group.keep_plan(False)
        pauses = [self._pauses(turn) for turn in range(_PAUSES)]
        self._group.draw(2 * number + 1)
        _, stock_s, stock_objects, stock_extra = self._measured(self._stock)
        return SyncRound(
            delivery=delivery,
            seconds=seconds,
            kept_plan_seconds=kept_s,
            pauses=pauses,
            stock_seconds=stock_s,
            probe_s=probe_s,
            probe_difference=difference,
            sample_difference=sample_difference,
            stock_probe_difference=self._probed("the stock way")[1],
            object_collectives=object_collectives,
            stock_object_collectives=stock_objects,
            extra_bytes=extra,
            stock_extra_bytes=stock_extra,
        )

    def _ours(self) -> Delivery:
        return deliver(self._context, {0: self._engine}, self._group, self._version)

    def _pauses(self, turn: int) -> tuple[float, float]:
        """The pause of ours with digests and without, one after the other, in turns; both after the same."""
        found: dict[bool, float] = {}
        for seen in (True, False) if turn % 2 else (False, True):
            self._group.draw(turn)
            self._look(seen)
            found[seen] = self._ours().seconds["pause"]
        self._look(True)
        return found[True], found[False]

    def _look(self, seen: bool) -> None:
        self._group.look(seen)
        self._engine.look(seen)

    def _stock(self) -> None:
        with scratch(memory=True) as folder:
            if self.device == "cpu":
                self._group.stock_files(str(folder))
                self._engine.stock_files(str(folder))
            elif self._apart:
                at_once([self._group.stock_broadcast, partial(self._engine.stock_broadcast, self._tensors)])
            else:
                sending = partial(self._group.stock_handles, str(folder), self._workers)
                at_once([sending, partial(self._engine.stock_handles, str(folder))])

    def _measured[R](self, way: Callable[[], R]) -> tuple[R, float, int, int]:
        """Result of one way, its seconds, collectives of objects, and bytes of cards that it took and kept."""
        self._group.object_collectives()
        before = self._card_bytes()
        begun = time.perf_counter()
        found = way()
        seconds = time.perf_counter() - begun
        return found, seconds, self._group.object_collectives(), self._card_bytes() - before

    def _card_bytes(self) -> int:
        return self._group.card_bytes() + (self._engine.card_bytes() if self._apart else 0)

    def _probed(self, way: str) -> tuple[float, float]:
        begun = time.perf_counter()
        trainer, engine = self._group.logprobs(self._probe), self._engine.score(self._probe)
        seconds = time.perf_counter() - begun
        return seconds, _apart(engine, trainer, way)

    def _sampled(self) -> float:
        """Mean difference of log-probabilities between engine and trainer over tokens that the engine samples."""
        prompts = [sequence[:_PROMPT] for sequence in self._probe]
        found = self._engine.generate(prompts, range(_PROBE), Sampling(max_tokens=_SAMPLED))
        responses, engine = ([np.asarray(row) for row in found[name].to_pylist()] for name in _SAMPLES)
        sequences = [
            np.concatenate((prompt, one)).astype(np.int32) for prompt, one in zip(prompts, responses, strict=True)
        ]
        trainer = [logprobs[_PROMPT - 1 :] for logprobs in self._group.logprobs(sequences)]
        return _apart(engine, trainer, "sampling")


def _apart(engine: list[NDArray[np.float32]], trainer: list[NDArray[np.float32]], when: str) -> float:
    difference = float(np.abs(np.concatenate(engine) - np.concatenate(trainer)).mean())
    if not difference < _MOST_APART:
        raise SyncMismatch(f"after {when}, engine and trainer differ by {difference:.3g} nat: the bench is wrong")
    return difference


@contextmanager
def sides(model: Path, case: SyncCase, cluster: Cluster, wanted: TransportChoice) -> Iterator[Sides]:
    """Start the processes; they end with the block."""
    device = cluster.settings.device("auto")
    config = _config(model, case, device, wanted)
    fleet = Fleet("bench", config, cluster)
    context = RunContext("bench", open_root(str(model)), config, "", fleet, model)
    cluster.start()
    group = SyncGroup.of(_trainers(model, case, device, cluster, config), config.workers)
    try:
        engine = SyncEngineHandle.of(_engine(model, fleet, cluster, config), config.workers)
        try:
            yield Sides(context, group, engine)
        finally:
            engine.end()
    finally:
        group.end()


def _config(model: Path, case: SyncCase, device: Device, wanted: TransportChoice) -> RunConfig:
    return parse_config(
        {
            "model": {"source": str(model)},
            "data": {"generate": {}},
            "engine": {
                "max_model_len": _LENGTH + 8,
                "max_num_seqs": _TOGETHER,
                "kv_cache_mib": _CACHE_MIB[device],
                "precision": case.precision,
                "tensor": case.tensor,
                "cards": case.cards,
            },
            "sync": {"transport": wanted},
            "train": {
                "max_length": _LENGTH,
                "optimizer": {"learning_rate": 1e-6},
                "parallel": case.parallel.model_dump(),
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
        parallel=case.parallel,
    )
    deadline_s = config.workers.start_deadline_s
    return start_trainers(
        "bench/trainers", str(model), trainer, device, cluster.settings, deadline_s, start=start_sync_rank
    )  # fmt: skip


def _engine(model: Path, fleet: Fleet, cluster: Cluster, config: RunConfig) -> RankActors:
    settings, spec, cards = cluster.settings, fleet.engine_spec(model), fleet.placement().engines[0]
    # `receive_handles` and others are sent to vLLM's worker
    environment = engine_environment(spec.device, cards, settings.local) | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    names = fresh_names("bench/engine-0", 1)
    place = new_folder() if spec.tensor > 1 else None
    group = RankActors(["engine 0"], spawn(names, [environment], detached=not settings.local), place)
    group.start(SyncEngine, [(spec, None if place is None else str(place))], config.workers.start_deadline_s)
    return group


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return int(found.getsockname()[1])
