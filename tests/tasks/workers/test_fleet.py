"""Trainer ranks and an engine as real processes: weights pass between them, and the dead are replaced."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import torch

from storage.errors import InputError, SyncMismatch, WorkerLost
from tasks.config.document import parse_config
from tasks.config.environment import Settings
from tasks.config.run import DeviceSection
from tasks.engine.protocol import EngineIdentity, Sampling
from tasks.stages import transaction
from tasks.workers.actors import find_groups
from tasks.workers.cluster import Cluster
from tasks.workers.fleet import Fleet
from tasks.workers.ranks import start_trainers
from tasks.workers.sampling import Batch, sample
from tests.ray_nodes import ray_nodes
from tests.tasks.engine_process import weights_of
from tests.tasks.engine_update import update
from tests.tasks.workers.test_cluster import gone, listening_addresses
from trainer_core.protocol import TrainerProtocol
from trainer_core.weights.digest import tensor_digest

LOCAL = Settings(ray_address=None, gpus=())
PROMPTS = [np.random.default_rng(place).integers(2, 32, 6).tolist() for place in range(8)]


def config_of(model, **parallel):
    return parse_config(
        {
            "model": {"source": model},
            "data": {"generate": {}},
            "engine": {"max_num_seqs": 16, "kv_cache_mib": 16},
            "train": {"max_length": 64, "parallel": parallel, "optimizer": {"learning_rate": 1e-3}},
        },
        "test",
    )


@pytest.fixture(scope="module")
def model(engines):
    return engines["qwen3", False].old


def whole_digests(model):
    return {name: tensor_digest(torch.from_numpy(array)) for name, array in weights_of(model).items()}


def deliver(fleet, config, group, engine, version):
    """Update weights as the stage does; digests of the imported model, which was sent, and of the engine's weights."""
    context = SimpleNamespace(config=config, workers=fleet, say=print)
    delivery = transaction.deliver(context, {0: engine}, group, version)
    assert engine.identity() == EngineIdentity(weight_version=version, weights_digest=delivery.weights_digest)
    assert engine.held() == delivery.digests
    assert delivery.exchanges == 1
    assert delivery.digests == whole_digests(config.model.source)


def kill(group):
    victim = psutil.Process(group.processes()[0])
    victim.kill()
    victim.wait(10)


@pytest.mark.full  # daily: tests/integration/test_faults.py
@pytest.mark.usefixtures("forked")
def test_weights_pass_from_ranks_to_engine_and_the_dead_are_replaced(model, tmp_path):
    config = config_of(model, pipeline=2)
    with Fleet("run", config, cluster := Cluster(LOCAL)) as fleet:
        fleet.warm(model, config.train)
        group, (engine,) = fleet.trainers(model, config.train), fleet.engines(model)
        assert group.identity() is None
        group.import_model()
        group.adopt("state-0")
        assert group.identity() == "state-0"
        deliver(fleet, config, group, engine, 3)
        assert engine.identity().weight_version == 3
        assert fleet.trainers(model, config.train) is group
        assert fleet.engines(model) == [engine]
        ours = group.submit(TrainerProtocol.logprobs, [np.array(prompt, np.int32) for prompt in PROMPTS]).wait(60)
        for scores, *ranks in zip(engine.score(PROMPTS), *ours, strict=True):
            for rank in ranks:
                np.testing.assert_allclose(scores, rank, atol=1e-4)
        processes = cluster.processes()
        assert listening_addresses(processes) == {"127.0.0.1"}

        with pytest.raises(InputError, match="engine 0: prompt 0 has 500 tokens"):
            engine.generate([[5] * 500], [0], Sampling(max_tokens=2))
        assert engine.generate(PROMPTS, range(8), Sampling(max_tokens=2)).num_rows == 8

        kill(group)
        with pytest.raises(WorkerLost, match="trainer rank 0 of 2 died during save"):
            group.save(tmp_path)
        kill(engine)
        again, (revived,) = fleet.trainers(model, config.train), fleet.engines(model)
        assert again is not group
        assert group.began == psutil.Process().create_time() < again.began
        assert again.identity() is None
        assert revived.identity().weight_version is None
        again.import_model()
        deliver(fleet, config, again, revived, 4)
    assert not psutil.wait_procs(processes, timeout=0)[1]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("tensor", "victim"),
    [pytest.param(1, "VLLM::EngineCore", marks=pytest.mark.full), pytest.param(2, None, marks=pytest.mark.slow)],
)
def test_an_engine_of_several_processes_is_one_engine(model, served, tmp_path, tensor, victim):
    """The engine computes as one process does, listens nowhere else, and dies as a whole: `victim`, or the actor."""
    config = config_of(model)
    several = {"own_process": True, "tensor": tensor, "count": 1}
    config = config.model_copy(update={"engine": config.engine.model_copy(update=several)})
    with Fleet("run", config, cluster := Cluster(LOCAL)) as fleet:
        fleet.expect()
        (engine,) = fleet.engines(model)
        assert find_groups("run/engine-0") == {}  # it is the process that was expected
        with pytest.raises(SyncMismatch, match="engine 0: weights 0000 were not received"):
            engine.commit_update(1, "0000")
        arrived = update(engine, tmp_path / "several", model, 2, receivers=tensor)
        one = update(served.engine, tmp_path / "one", model, 2)
        assert (arrived.digests, arrived.bytes) == (one.digests, one.bytes)
        found = []
        sample([engine], [Batch(PROMPTS, range(8))] * 3, Sampling(max_tokens=9), lambda _, one: found.append(one))
        alone = served.engine.generate(PROMPTS, range(8), Sampling(max_tokens=9))
        for one in found:
            assert one["response_tokens"].equals(alone["response_tokens"])
            if tensor == 1:
                assert one.equals(alone)
        scored = zip(engine.score(PROMPTS), served.engine.score(PROMPTS), strict=True)
        assert all(np.allclose(ours, theirs, atol=1e-5) for ours, theirs in scored)

        started = fleet.processes()
        workers = {f"worker-{number}" for number in range(tensor)} if tensor > 1 else set()
        assert started.keys() == {"engine-0", "core-0", "node", *workers}
        (actor,) = map(psutil.Process, engine.processes())
        family = [actor, *actor.children(recursive=True)]
        names = [" ".join(process.cmdline()) for process in family]
        assert sum("VLLM::" in name for name in names) == (1 if tensor == 1 else 3)
        assert {started[name] for name in ("core-0", *workers)} <= {process.pid for process in family}
        assert listening_addresses(cluster.processes()) == {"127.0.0.1"}
        killed = actor if victim is None else family[next(n for n, name in enumerate(names) if victim in name)]
        killed.kill()
        assert gone(family)
        with pytest.raises(WorkerLost, match="engine 0 died during generate"):
            engine.generate(PROMPTS, range(8), Sampling(max_tokens=2))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"enforce_eager": False, "async_scheduling": True, "own_core": True, "together": False}),
        (
            {"device": {"deterministic": True}},
            {"enforce_eager": True, "async_scheduling": False, "own_core": False, "together": True},
        ),
        ({"device": {"deterministic": "trainer"}}, {"enforce_eager": False, "own_core": True, "together": False}),
        (
            {"engine": {"cuda_graphs": False, "async_scheduling": False, "own_process": False}},
            {"enforce_eager": True, "async_scheduling": False, "own_core": False, "together": False},
        ),
        ({"engine": {}}, {"kv_cache_bytes": None, "tensor": 1}),
        ({"engine": {"count": 3, "gpu_memory_utilization": 0.75}}, {"gpu_memory_utilization": 0.25}),
        ({"engine": {"kv_cache_mib": 3, "tensor": 2}}, {"kv_cache_bytes": 3 << 20, "tensor": 2}),
    ],
)
def test_on_a_gpu_the_engine_is_fast_unless_it_must_repeat_itself(settings, expected, tmp_path):
    document = {**config_of(str(tmp_path)).model_dump(mode="json", exclude={"engine"}), **settings}
    config = parse_config(document, "test")
    spec = Fleet("run", config, Cluster(Settings(ray_address=None, gpus=("0",)))).engine_spec(tmp_path)
    assert spec.device == "cuda"
    assert {name: value for name, value in spec.model_dump().items() if name in expected} == expected


LATER_PROCESS = """
import json, sys
from contextlib import suppress
from pathlib import Path
from tasks.workers.cluster import Cluster
from tasks.config.run import RunConfig
from tasks.engine.protocol import Sampling
from tasks.workers.fleet import Fleet
from tasks.config.environment import Settings
from tests.tasks.engine_update import update

config, model, action = RunConfig.model_validate_json(sys.argv[1]), sys.argv[2], sys.argv[3]
class Unfinished(Exception):
    'The run is not complete: what it has started stays.'

with suppress(Unfinished), Fleet("run", config, Cluster(Settings.from_environment())) as fleet:
    (engine,) = fleet.engines(model)
    if action == "update":
        update(engine, Path(sys.argv[4]), model, 7)
    print(engine.identity().model_dump_json())
    if action != "close":
        raise Unfinished
    fleet.close()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_on_a_cluster_a_later_process_finds_the_engine_as_it_was(model, tmp_path):
    def later(config, *arguments):
        command = [sys.executable, "-c", LATER_PROCESS, config.model_dump_json(), model, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])["weight_version"]

    config = config_of(model).model_copy(update={"device": DeviceSection(kind="cpu")})
    with ray_nodes(2) as (address, _):
        environment = {**os.environ, "RAY_ADDRESS": address}
        assert later(config, "update", str(tmp_path / "update")) == 7
        assert later(config, "look") == 7
        smaller = config.model_copy(update={"engine": config.engine.model_copy(update={"max_num_seqs": 8})})
        assert later(smaller, "close") is None  # started with other settings: ended and replaced
        assert not [name for name in ray.util.list_named_actors() if name.startswith("run/")]


class Ended(Cluster):
    """A Ray that has ended."""

    starts = 0

    def check_alive(self):
        raise WorkerLost("raylet of the local Ray ended; a new one is started")

    def start(self):
        self.starts += 1


def test_a_ray_of_our_own_that_has_ended_is_replaced_at_once_and_a_cluster_at_the_next_attempt(tmp_path, caplog):
    config = config_of(str(tmp_path))
    Fleet("run", config, ours := Ended(LOCAL))._connect()
    assert (ours.starts, caplog.messages) == (1, ["raylet of the local Ray ended; a new one is started"])
    with pytest.raises(WorkerLost):
        Fleet("run", config, others := Ended(Settings(ray_address="10.77.0.1:6379", gpus=())))._connect()
    assert others.starts == 0


def test_with_cards_of_a_cluster_no_process_can_stand_by(tmp_path):
    asked = {"workers": {"standby": 1}, "device": {"kind": "cuda"}}
    config = parse_config({**config_of(str(tmp_path)).model_dump(mode="json"), **asked}, "test")
    cluster = Cluster(Settings(ray_address="10.77.0.1:6379", gpus=()))
    with pytest.raises(InputError, match=r"workers.standby: .* set it to 0"):
        Fleet("run", config, cluster)._reserve("trainers")


def test_more_ranks_than_cards_are_refused_before_anything_starts(tmp_path):
    config = config_of(str(tmp_path), pipeline=2)
    one_card = Settings(ray_address=None, gpus=("0",))
    with pytest.raises(InputError, match="needs 2 GPUs, one per rank, but 1 are visible"):
        start_trainers("run", str(tmp_path), config.train, "cuda", one_card, 60)
