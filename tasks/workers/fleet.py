"""The processes that compute for a run: trainer ranks and engines, started when first needed and then kept warm. Under
our own Ray they live as long as the flow process. On a cluster (RAY_ADDRESS) they are detached and named after the run,
so that the next flow process finds them; what they hold is used only when its identity is committed."""

import itertools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from storage.digest import value_digest
from storage.errors import InputError, RatchetError, WorkerLost
from storage.ownership.scratch import new_folder
from tasks.config.environment import engine_environment, trainer_environment
from tasks.config.model import JudgeEngine
from tasks.config.run import EngineSection, RunConfig
from tasks.engine.own import find_engine
from tasks.engine.protocol import EngineSpec
from tasks.engine.start import import_engine, start_engine
from tasks.workers.actors import (
    ObservedGroup,
    WorkerGroup,
    find_groups,
    fresh_names,
    label_of,
    living,
    placed,
    short_name,
)
from tasks.workers.cluster import Cluster
from tasks.workers.folders import Folders, claimed
from tasks.workers.hosts import HostFolders, Seats, give_up, reserve, reserve_all, this_node
from tasks.workers.interface import EngineHandle, TrainerGroup, inside
from tasks.workers.meeting import forget
from tasks.workers.placement import (
    Placement,
    bundles,
    card_of_judge,
    engines_on_a_card,
    engines_repeat,
    placement,
    taken,
    transport,
)
from tasks.workers.ranks import RankActors, rank_labels, start_trainers
from tasks.workers.standby import Place, Standby, waiting_label
from trainer_core.config import Device, Precision, TrainerConfig
from trainer_core.start import import_trainer

_DTYPES: Mapping[Precision, Literal["float32", "bfloat16"]] = {"fp32": "float32", "bf16": "bfloat16"}
_VLLM = EngineSection()  # names no engine of the user's own

logger = logging.getLogger(__name__)


class Fleet(AbstractContextManager["Fleet", None]):
    """Trainer ranks and engines of one run. As a context manager it leaves Ray at the end. Processes under our own Ray
    end with it. Detached ones end if the block did what it was to do, since then nothing needs them; otherwise they
    stay for the next start."""

    def __init__(self, run: str, config: RunConfig, cluster: Cluster) -> None:
        self._run = run
        self._config = config
        self._cluster = cluster
        self._engines: list[EngineHandle] = []
        self._judge: EngineHandle | None = None
        self._trainers: TrainerGroup | None = None
        self._trained_under: TrainerConfig | None = None
        self._ranks: RankActors | None = None
        self._standby = Standby(run)
        self._starting = threading.RLock()  # a rollout may run beside a training
        self._seats: dict[str, Seats] = {}  # on a cluster, by role
        self.folders: Folders = Folders() if cluster.local else HostFolders()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cluster.local:
            self.close()
        elif error is None:
            self._release()
        self._cluster.shutdown()

    @property
    def device(self) -> Device:
        """The device of trainer and engines. Raises InputError: CUDA is configured, and no card is visible."""
        return self._cluster.settings.device(self._config.device.kind)

    def placement(self) -> Placement:
        found = placement(self._config, self._cluster.settings)
        apart = isinstance(self.folders, HostFolders) and bool(self.folders.others)
        return found.model_copy(update={"apart": True}) if apart else found

    def expect(self) -> None:
        """As `Workers.expect`. On a cluster nothing is begun: processes of an earlier start may live there."""
        if not self._cluster.local:
            return
        with self._starting:
            self._connect()
            judge = [] if self._config.engines is None else [self._place_of_engine("judge")]
            self._standby.fill([*self._places_of_ranks().values(), *self._places_of_engines(), *judge])

    def warm(self, model_dir: Path, config: TrainerConfig) -> None:
        """As `Workers.warm`: each process imports for ten seconds or more."""
        self.trainers(model_dir, config)
        self.engines(model_dir)

    def engines(self, model_dir: Path) -> list[EngineHandle]:
        """As `Workers.engines`. Raises besides InputError as `device`, or because RAY_ADDRESS does not answer."""
        with self._starting:
            self._connect()
            spec, own = self.engine_spec(model_dir), self._config.engine
            kept = {place: engine for place, engine in enumerate(self._engines) if engine.alive()}
            if len(kept) < own.count:
                self._reserve("engines")
            places = range(own.count)
            self._engines = [kept.get(place) or self._engine(f"engine-{place}", spec, own) for place in places]
            if all(engine.awaited for engine in self._engines):
                self._stand_by(self._places_of_engines())
            return list(self._engines)

    def judge(self, model_dir: Path) -> EngineHandle:
        """As `Workers.judge`. Raises besides InputError as `engines`."""
        with self._starting:
            self._connect()
            if self._judge is None or not self._judge.alive():
                self._reserve("judge")
                self._judge = self._engine("judge", self.judge_spec(model_dir), _VLLM)
            else:
                self._stand_by([self._place_of_engine("judge")])
            return self._judge

    def trainers(self, model_dir: Path, config: TrainerConfig) -> TrainerGroup:
        """As `Workers.trainers`. Raises besides InputError as `engines`, or if there are fewer cards than ranks."""
        with self._starting:
            self._connect()
            if self._trainers is not None and config != self._trained_under:
                self._trainers.end()  # a stage that is done again may train under other settings
            if self._trainers is None or not self._trainers.alive():
                self._trainers, self._trained_under = self._trainer_group(str(model_dir), config), config
            elif self._trainers.awaited:
                self._stand_by(self._places_of_ranks().values())
            return self._trainers

    def processes(self) -> dict[str, int]:
        """As `Workers.processes`, and the processes that engines have started, as `inside` names them."""
        ranks = self._trainers.processes() if self._trainers is not None and self._trainers.alive() else []
        engines = [process for engine in self._engines if engine.alive() for process in engine.processes()]
        found = {f"trainer-{rank}": process for rank, process in enumerate(ranks)}
        if self._judge is not None and self._judge.alive():
            found["judge-0"] = self._judge.processes()[0]
        for place, process in enumerate(engines):
            found |= {f"engine-{place}": process, **dict(inside(process, place, self._config.engine.tensor))}
        return found if self._cluster.node is None else {**found, "node": self._cluster.node}

    def close(self) -> None:
        """End the processes, including those on a cluster."""
        for engine in (*self._engines, *([] if self._judge is None else [self._judge])):
            engine.end()
        if self._trainers is not None:
            self._trainers.end()
        self._standby.end()
        self._engines, self._judge, self._trainers = [], None, None

    def _release(self) -> None:
        try:
            release(self._run, self._cluster)
        except RatchetError as failure:
            text = "the processes of run %s stay on the cluster: %s. `ratchet stop %s`, with its --root, ends them"
            logger.warning(text, claimed(self._run), failure, claimed(self._run))

    def _reserve(self, role: str) -> None:
        """Have Ray keep room for a role (`trainers`, `engines`, `judge`) on a cluster. Raises as `reserve`."""
        if not isinstance(self.folders, HostFolders):
            return
        if self._config.workers.standby and self.device == "cuda":
            raise InputError(
                "workers.standby: on cards of a Ray cluster, which Ray gives to a process as it starts, none waits for "
                "the place of another: set it to 0"
            )
        wanted = bundles(self._config, self.device)
        if role not in wanted:  # engines that share the ranks' cards
            role = "trainers"
        if self._seats:
            self._seats[role] = reserve(self._run, role, wanted[role], self._seats[role].nodes)
        else:
            self._seats = reserve_all(self._run, wanted)
        hosts = {node for seats in self._seats.values() for node in seats.nodes}
        tensor, ranks = self._config.train.parallel.tensor, self._seats.get("trainers")
        of_ranks = () if ranks is None else tuple(node for node in ranks.nodes for _ in range(tensor))
        self.folders.moved(hosts - {this_node()}, of_ranks)
        transport(self._config.sync.transport, self.placement())

    def _stand_by(self, places: Iterable[Place]) -> None:
        """Have processes wait for these places; only once theirs have come up, which imports of others would delay."""
        self._standby.fill(itertools.islice(itertools.cycle(places), self._config.workers.standby))

    def _places_of_ranks(self) -> dict[int, Place]:
        """Those of ranks, by rank."""
        settings, deterministic = self._cluster.settings, bool(self._config.device.deterministic)
        environment = tuple(trainer_environment(self.device, settings.gpus, settings.local, deterministic).items())
        parallel = self._config.train.parallel
        seats = [self._seat("trainers", rank // parallel.tensor) for rank in range(parallel.world_size)]
        importing = ("rank", import_trainer, (self.device,), environment)
        return {rank: Place(*importing, *seat) for rank, seat in enumerate(seats)}

    def _place_of_engine(self, name: str) -> Place:
        environment = engine_environment(self.device, self._cards_of_engine(name), self._cluster.settings.local)
        judge = name == "judge"
        seat = self._seat("judge", 0) if judge else self._seat("engines", _number_of(name))
        own = self._config.engine.function is not None and not judge
        return Place("engine", import_engine, (own,), tuple(environment.items()), *seat)

    def _places_of_engines(self) -> list[Place]:
        return [self._place_of_engine(f"engine-{place}") for place in range(self._config.engine.count)]

    def _cards_of_engine(self, name: str) -> tuple[str, ...]:
        if name == "judge":
            return card_of_judge(self._cluster.settings, self.device)
        return self.placement().engines[_number_of(name)]

    def _seat(self, role: str, number: int) -> tuple[str, dict[str, Any]]:
        """Ray's name of the host of that bundle of a role, from the first again when there are no more, and Ray's
        options of a process there. Our own Ray has neither."""
        seats = self._seats.get(role, self._seats.get("trainers"))
        if seats is None:
            return "", {}
        bundle = number % len(seats.nodes)
        return seats.nodes[bundle], seats.options(bundle, taken(self._config, self.device)[role])

    def _connect(self) -> None:
        """Have a Ray, in place of our own one if that has ended: not at the next attempt, of which a stage has few.
        Raises WorkerLost: a cluster does not answer any more; the next call starts everything again."""
        try:
            self._cluster.check_alive()
        except WorkerLost as loss:
            self._engines, self._judge, self._trainers, self._ranks = [], None, None, None
            self._standby = Standby(self._run)
            if not self._cluster.local:
                raise
            logger.warning("%s", loss)
        self._cluster.start()

    def engine_spec(self, model_dir: Path) -> EngineSpec:
        """Arguments that the engines are started with; raises as `device`."""
        section = self._config.engine
        # not visible to the host of a cluster: there engines share the cards of the ranks
        cards = len(self._cluster.settings.gpus) if self._cluster.local else self._config.train.parallel.world_size
        sharing = engines_on_a_card(section, cards) if self.device == "cuda" else 1
        spec = self._spec(model_dir, section)
        return spec.model_copy(
            update={
                "quantization": section.quantization,
                "gpu_memory_utilization": section.gpu_memory_utilization / sharing,
                "together": spec.together and self._config.environment is None,  # a turn waits for its tool alone
                "tensor": section.tensor,
                "sleeps": self.device == "cuda" and section.sleep,
                "routes": self._config.train.experts.replay,
                "adapter": self._config.train.lora if section.adapter == "live" else None,
                "own_core": spec.own_core if section.own_process is None else section.own_process,
            }
        )

    def judge_spec(self, model_dir: Path) -> EngineSpec:
        """The same of the engine that judges."""
        assert self._config.engines is not None
        return self._spec(model_dir, self._config.engines.judge)

    def _spec(self, model_dir: Path, section: EngineSection | JudgeEngine) -> EngineSpec:
        fast, shared = not engines_repeat(self._config, self._cluster.settings), self._config.engine
        return EngineSpec(
            model_dir=str(model_dir),
            dtype=_DTYPES[section.precision],
            max_model_len=section.max_model_len,
            max_num_seqs=section.max_num_seqs,
            kv_cache_bytes=None if section.kv_cache_mib is None else section.kv_cache_mib << 20,
            device=self.device,
            gpu_memory_utilization=section.gpu_memory_utilization,
            enforce_eager=not (fast and shared.cuda_graphs),
            async_scheduling=fast and shared.async_scheduling,
            together=not fast,
            own_core=fast,
        )

    def _engine(self, name: str, spec: EngineSpec, own: EngineSection) -> EngineHandle:
        """An engine under a name of the run: one that an earlier flow process has left, or a new one; of the user's
        class, if `own` names it."""
        cards, labels, role = self._cards_of_engine(name), [name.replace("-", " ")], f"{self._run}/{name}"
        prefix = f"{role}/{engine_digest(spec, cards, own.source)}"
        group, settings = self._found(role, prefix, labels), self._cluster.settings
        if group is None:
            meeting_place = new_folder() if settings.local and spec.has_processes else None
            names, place, detached = fresh_names(prefix, 1), self._place_of_engine(name), not settings.local
            there = self._standby.take({0: place})
            actors = placed(names, dict(place.environment), detached, [place.seat], there)
            group = RankActors(labels, actors, meeting_place)
            folder = None if meeting_place is None else str(meeting_place)
            named = None if own.function is None else find_engine(own.function, own.source)
            group.start(start_engine, [(spec, folder, named)], self._config.workers.start_deadline_s)
        return EngineHandle.of(group, self._config.workers)

    def _trainer_group(self, model_dir: str, config: TrainerConfig) -> TrainerGroup:
        self._reserve("trainers")
        role = f"{self._run}/trainers"
        deterministic = bool(self._config.device.deterministic)
        prefix = f"{role}/{value_digest({**config.model_dump(mode='json'), 'deterministic': deterministic})}"
        labels = rank_labels(config.parallel.world_size)
        found = self._found(role, prefix, labels) if self._ranks is None else None  # of ours some may live on
        if found is None:
            deadline_s = self._config.workers.start_deadline_s
            settings, places = self._cluster.settings, self._places_of_ranks()
            there = {} if self._ranks is None else living(self._ranks.survivors())
            there |= self._standby.take({rank: place for rank, place in places.items() if rank not in there})
            seats = [place.seat for place in places.values()]
            found = start_trainers(
                prefix, model_dir, config, self.device, settings, deadline_s, deterministic, seats=seats, there=there
            )
        replaces, self._ranks = self._ranks is not None, found
        return TrainerGroup.of(found, self._config.workers, replaces)

    def _found(self, role: str, prefix: str, labels: list[str]) -> RankActors | None:
        """A usable group that an earlier flow process left on the cluster; unusable ones are ended."""
        if self._cluster.local:
            return None
        usable: RankActors | None = None
        for name, actors in find_groups(role).items():
            group = RankActors.found(name, labels, actors)
            fits = usable is None and name.startswith(f"{prefix}/") and len(actors) == len(labels)
            if fits and group.in_step():
                usable = group
            else:
                group.end()
        return usable


def _number_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def engine_digest(spec: EngineSpec, cards: Sequence[str], source: str) -> str:
    """Identity of what an engine is started with, and where: one that was left on other cards is not used. `source` is
    the digest of the source of an engine of the user's own; empty for vLLM."""
    return value_digest({**spec.model_dump(mode="json", exclude={"model_dir"}), "cards": list(cards), "source": source})


def release(run: str, cluster: Cluster) -> int:
    """End all processes that a run has left on a cluster, with what Ray keeps for them and their folders, and return
    their number. Raises InputError, WorkerLost: the cluster does not answer."""
    cluster.check_alive()
    cluster.start()
    groups = find_groups(run)
    for name, actors in groups.items():
        WorkerGroup.found(name, [name] * len(actors), actors).end()
    forget(run)
    give_up(run)
    return sum(map(len, groups.values()))


def engines_on(run: str, config: RunConfig, cluster: Cluster) -> dict[str, EngineHandle]:
    """The engines that a run has on a cluster now, by name: `engine-0`. None is started or ended, also if it does not
    answer. Raises InputError, WorkerLost: the cluster does not answer."""
    cluster.check_alive()
    cluster.start()
    found: dict[str, EngineHandle] = {}
    for name, actors in sorted(find_groups(run).items()):
        role = short_name(name + "/0")
        if role == waiting_label("engine"):  # or has waited, and is called after its place now
            role = label_of(actors[0])
        group = ObservedGroup.found(name, [role] * len(actors), actors)
        if role.startswith("engine-") and group.alive():
            found[role] = EngineHandle.of(group, config.workers)
    return found
