"""Files that are laid out once and filled in place are safetensors, which any tool reads and nothing executes."""

import json
import os
import pickle
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from storage.errors import RatchetError, StorageError, StorageUnavailable, WorkerLost
from trainer_core.config import OptimizerConfig, ParallelConfig
from trainer_core.platform.pinning import Pinning, pinning_of
from trainer_core.state.facts import FACTS_FILE, FILES, SHAPES, StateFacts
from trainer_core.state.files import Box, MappedFiles, Region, SavedState, Shard

OPTIMIZER = OptimizerConfig(learning_rate=1)
FACTS = StateFacts(
    step=1, optimizer_updates=1, optimizer=OPTIMIZER, parallel=ParallelConfig(data=2), precision="bf16",
    transformer_engine=False,
)  # fmt: skip


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    moments = torch.randn((5, 7), generator=generator)
    return {
        "matrix": moments.to(torch.bfloat16),
        "optimizer.state.exp_avg.matrix": moments,
        "scale": moments[0, 0],
        "odd": moments[0].to(torch.bfloat16),
    }


def shards(rank, seed):
    """The ranks divide every tensor in the middle of a row."""
    for name, whole in tensors(seed).items():
        size, count = tuple(whole.shape), whole.numel()
        cut = [0, count // 2 + 1, count]
        if cut[rank] < cut[rank + 1]:
            box = Box(name, size, size, Region((0,) * len(size), size))
            yield Shard(box, cut[rank], whole.reshape(-1)[cut[rank] : cut[rank + 1]])


def laid_out(folder, **sizes):
    (folder / FACTS_FILE).write_text(FACTS.model_dump_json())
    return [MappedFiles(folder, rank, shards(rank, seed=0), None, **sizes) for rank in range(2)]


@pytest.fixture
def files(tmp_path):
    return laid_out(tmp_path)


def read_plainly(folder):
    """All tensors of a state by a few lines of safetensors, as docs/storage.md has them."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes = json.loads(file.metadata()["shapes"])
            for key in file.keys():  # noqa: SIM118 - no dictionary
                name, _, start = key.rpartition("@")
                values = file.get_tensor(key)
                whole = found.setdefault(name, torch.empty(shapes[name], dtype=values.dtype))
                begins = map(int, filter(None, start.split(",")))
                whole[tuple(slice(b, b + n) for b, n in zip(begins, values.shape, strict=True))] = values
    return found


@pytest.mark.parametrize("sizes", [{}, {"file_bytes": 16}])
def test_what_was_filled_in_last_is_read_plainly_and_by_us(tmp_path, sizes):
    files = laid_out(tmp_path, **sizes)
    for seed in (1, 2):
        for rank, one in enumerate(files):
            one.fill(list(shards(rank, seed)))
        given, found = tensors(seed), read_plainly(tmp_path)
        assert found.keys() == given.keys()
        state = SavedState(tmp_path)
        for name, value in given.items():
            assert found[name].dtype == value.dtype
            assert found[name].equal(value)
            assert state.read(name, Region((0,) * value.ndim, tuple(value.shape))).equal(value)
        assert state.read("matrix", Region((1, 2), (3, 4))).equal(given["matrix"][1:4, 2:6])


def test_each_byte_of_a_file_has_room_before_it_is_written(tmp_path):
    box = Box("large", (1 << 20,), (1 << 20,), Region((0,), (1 << 20,)))
    name, _ = MappedFiles(tmp_path, 0, [Shard(box, 0, torch.empty(1 << 20))], None).names
    status = (tmp_path / name).stat()
    assert status.st_blocks * 512 >= status.st_size > 4 << 20
    assert status.st_nlink == 2  # therefore the store copies it


class Runtime:
    """CUDA's functions, on a machine without a GPU: each file gets the next of the given error codes."""

    def __init__(self, *codes):
        self._codes, self.pinned, self.events = list(codes), set(), []
        self.pinning = Pinning(
            self.register, self.unregister, *(partial(self.events.append, e) for e in ("forget", "wait"))
        )

    def register(self, address, count):
        assert count > 0
        code = self._codes.pop(0)
        if not code:
            self.pinned.add(address)
        return code

    def unregister(self, address):
        self.pinned.remove(address)
        return 0


@pytest.mark.parametrize(("codes", "forgotten"), [((0, 0), 0), ((1, 1), 2), ((0, 2), 1), ((801, 0), 1)])
def test_memory_that_cannot_be_pinned_is_used_as_it_is(tmp_path, caplog, codes, forgotten):
    runtime = Runtime(*codes)
    whole = [
        Shard(Box(n, (3,), (3,), Region((0,), (3,))), 0, torch.ones(3)) for n in ("a", "optimizer.state.exp_avg.a")
    ]
    files = MappedFiles(tmp_path, 0, whole, runtime.pinning)
    assert runtime.events == ["forget"] * forgotten  # else the next kernel would report it
    assert len(runtime.pinned) == codes.count(0)
    assert [str(tmp_path) in line for line in caplog.messages] == [True] * bool(forgotten)
    files.fill(whole)
    assert runtime.events[forgotten:] == ["wait"]
    facts = FACTS.model_copy(update={"parallel": ParallelConfig()})
    (tmp_path / FACTS_FILE).write_text(facts.model_dump_json())
    assert all(SavedState(tmp_path).read(one.box.name, one.box.region).equal(one.values) for one in whole)
    files.close()
    files.close()
    assert not runtime.pinned


def test_a_runtime_that_does_not_work_ends_the_process(tmp_path):
    runtime = Runtime(0, 712)
    with pytest.raises(WorkerLost, match=rf"{tmp_path}/.*cannot be pinned .* CUDA error 712"):
        MappedFiles(tmp_path, 0, shards(0, seed=0), runtime.pinning)
    assert not runtime.pinned


def test_a_cpu_needs_no_pinned_memory():
    assert pinning_of(torch.device("cpu")) is None


def test_other_tensors_do_not_fit(files):
    for other in (list(shards(1, seed=0)), list(shards(0, seed=0))[1:]):
        with pytest.raises(RatchetError, match="has other tensors than the files"):
            files[0].fill(other)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StorageUnavailable, match=r"cannot be reserved in .*nowhere/weights.0.safetensors"):
        MappedFiles(tmp_path / "nowhere", 0, shards(0, seed=0), None)


@pytest.mark.parametrize(("name", "region"), [("matrix", Region((4, 0), (2, 7))), ("other", Region((0,), (1,)))])
def test_a_tensor_of_another_model_is_refused(files, tmp_path, name, region):
    with pytest.raises(StorageError, match=f"{tmp_path} has .*{name}.* it is of another model"):
        SavedState(tmp_path).read(name, region)


def test_an_entry_that_no_file_has_is_missed(files, tmp_path):
    rest = {key: value for key, value in load_file(tmp_path / "weights.1.safetensors").items() if "matrix" not in key}
    save_file(rest, tmp_path / "weights.1.safetensors", {SHAPES: json.dumps({"scale": [], "odd": [7]}), FILES: "1"})
    with pytest.raises(StorageError, match="or not whole"):
        SavedState(tmp_path).read("matrix", Region((0, 0), (5, 7)))


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self._mark),)


def as_pickle(path, mark):
    path.write_bytes(pickle.dumps(Harmful(mark)))


def as_file_of_torch(path, mark):
    torch.save(Harmful(mark), path)


def cut(path, _):
    path.write_bytes(path.read_bytes()[:-1])


def saved_as(tensors, shapes):
    def write(path, _):
        save_file(tensors, path, None if shapes is None else {SHAPES: shapes, FILES: "1"})

    return write


ONE = torch.ones(1)


@pytest.mark.parametrize(
    "replace",
    [
        as_pickle,
        as_file_of_torch,
        cut,
        saved_as({"odd@0": ONE}, None),
        saved_as({"odd@0": ONE}, "no JSON"),
        saved_as({"odd@0": ONE}, "[]"),
        saved_as({"other@0": ONE}, '{"odd": [7]}'),
        saved_as({"odd": ONE}, '{"odd": [7]}'),
        saved_as({"odd@x": ONE}, '{"odd": [7]}'),
        saved_as({"odd@-1": ONE.bfloat16()}, '{"odd": [7]}'),
        saved_as({"odd@7": ONE.bfloat16()}, '{"odd": [7]}'),
        saved_as({"odd@0": ONE.bfloat16()}, '{"odd": [8]}'),
        saved_as({"odd@0": ONE}, '{"odd": [7]}'),
        saved_as({"odd@0,0": ONE.bfloat16()}, '{"odd": [7]}'),
    ],
)
def test_a_file_that_is_none_of_a_state_is_refused_and_nothing_in_it_runs(files, tmp_path, replace):
    replace(tmp_path / "weights.1.safetensors", tmp_path / "mark")
    with pytest.raises(StorageError, match=f"no readable train state at {tmp_path}: weights.1.safetensors: "):
        SavedState(tmp_path)
    assert not (tmp_path / "mark").exists()


def test_large_states_are_in_several_files_each_of_which_is_missed(tmp_path):
    names = laid_out(tmp_path, file_bytes=16)[0].names
    assert {"weights.0.safetensors", "weights.0-1.safetensors", "optimizer.0-1.safetensors"} < set(names)
    for name in names:
        kept = (tmp_path / name).rename(tmp_path / "kept")
        with pytest.raises(StorageError, match=rf"no readable train state at .*: {name}: "):
            SavedState(tmp_path)
        kept.rename(tmp_path / name)
    assert SavedState(tmp_path).tensors.keys() == tensors(0).keys()


def test_weights_are_read_without_the_files_of_the_optimizer(files, tmp_path):
    (tmp_path / "optimizer.1.safetensors").unlink()
    assert not [name for name in SavedState(tmp_path, weights_alone=True).tensors if name.startswith("optimizer.")]
    with pytest.raises(StorageError, match=r"optimizer.1.safetensors: .*load it again from the store"):
        SavedState(tmp_path)
