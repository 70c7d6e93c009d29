from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from tasks.config.environment import Settings
from tasks.engine.protocol import EngineSpec
from tasks.workers.cluster import Cluster
from tests.forked_python import start_forked
from tests.tasks.engine_process import CONTEXT, engine_process


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Engines by family and `tied`, each started when it is first asked for from the model `old`, and a model `new` of
    the same shape."""
    folder = tmp_path_factory.mktemp("models")
    with engine_process(tmp_path_factory) as process:
        reference = process.Reference()

        class Started(dict):
            def __missing__(self, kind):
                family, tied = kind
                models = {name: str(folder / f"{name}-{family}-{tied}") for name in ("old", "new")}
                for seed, directory in enumerate(models.values()):
                    reference.make(directory, seed, tied, family)
                limits = {"max_model_len": CONTEXT, "max_num_seqs": 64, "kv_cache_bytes": 16 << 20}
                engine = process.FaultyEngine(EngineSpec(model_dir=models["old"], **limits))
                shared = {"reference": reference, "process": process, "pid": process._process.pid}
                self[kind] = SimpleNamespace(engine=engine, **shared, **models)
                return self[kind]

        yield Started()


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """Engines with experts by family: each started from the model `old`, and a model `new` of the same shape."""
    folder = tmp_path_factory.mktemp("experts")
    with engine_process(tmp_path_factory) as process:
        reference, served = process.Reference(), {}
        for family in ("qwen3-moe", "deepseek-v3"):
            models = {name: str(folder / f"{name}-{family}") for name in ("old", "new")}
            for seed, directory in enumerate(models.values()):
                reference.make_family(directory, seed, family)
            limits = {"max_model_len": 64, "max_num_seqs": 64, "kv_cache_bytes": 16 << 20}
            spec = EngineSpec(model_dir=models["old"], routes=True, **limits)
            served[family] = SimpleNamespace(engine=process.FaultyEngine(spec), reference=reference, **models)
        yield served


@pytest.fixture(scope="session")
def split(tmp_path_factory):
    """An engine over two workers, each with half of every layer of the model `old`."""
    folder = tmp_path_factory.mktemp("split")
    meeting_place = folder / "meeting"
    meeting_place.mkdir()
    with engine_process(tmp_path_factory) as process:
        reference, models = process.Reference(), {name: str(folder / name) for name in ("old", "new")}
        for seed, directory in enumerate(models.values()):
            reference.make_family(directory, seed, "qwen3-moe", moe_intermediate_size=64, num_key_value_heads=1)
        limits = {"max_model_len": 64, "max_num_seqs": 64, "kv_cache_bytes": 16 << 20}
        spec = EngineSpec(model_dir=models["old"], routes=True, tensor=2, **limits)
        engine = process.Engine(spec, str(meeting_place))
        yield SimpleNamespace(engine=engine, reference=reference, **models)


@pytest.fixture
def served(engines):
    """The engine of the model whose output layer has its own weights."""
    return engines["qwen3", False]


@pytest.fixture(scope="module")
def cluster():
    """A local Ray."""
    with _started() as started:
        yield started


@pytest.fixture(scope="session")
def cluster_of_group(group_end):
    """A local Ray for the files of one group."""
    with ExitStack() as ends:
        group_end.callback(ends.close)
        yield ends.enter_context(_started())


@contextmanager
def _started():
    with Cluster(Settings(ray_address=None, gpus=())) as started:
        started.start()
        yield started


@pytest.fixture
def forked(tmp_path_factory, monkeypatch):
    """Let this process start Ray and its workers, and other processes, as forked ones."""
    start_forked(monkeypatch, tmp_path_factory)
