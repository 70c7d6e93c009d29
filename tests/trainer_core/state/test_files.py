"""Files that are laid out once and filled in place are what torch itself would have written."""

import io
import json
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from storage.errors import RatchetError, StorageError, StorageUnavailable, WorkerLost
from trainer_core.config import OptimizerConfig, ParallelConfig
from trainer_core.platform.pinning import Pinning, pinning_of
from trainer_core.state.boxes import Box, Shard
from trainer_core.state.facts import FACTS_FILE, StateFacts, facts_text
from trainer_core.state.files import MappedFiles, describe
from trainer_core.state.recording import frame
from trainer_core.state.saved import Region, SavedState

SHAPES = [(), (3,), (16, 1), (5, 7), (1, 200, 300)]
OPTIMIZER = OptimizerConfig(learning_rate=1)
FACTS = StateFacts(step=1, optimizer_updates=1, optimizer=OPTIMIZER, parallel=ParallelConfig(data=2), precision="bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_frame_around_the_elements_is_a_file_of_torch(dtype, shape):
    around, values = frame(dtype, shape), (100 * torch.randn(shape)).to(dtype)
    content = around.head + values.reshape(-1).view(torch.uint8).numpy().tobytes() + around.tail
    found = torch.load(io.BytesIO(content), weights_only=True)
    assert (found.dtype, found.shape) == (dtype, values.shape)
    assert found.equal(values)


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    moments = torch.randn((5, 7), generator=generator)
    return {"matrix": moments.to(torch.bfloat16), "optimizer.state.exp_avg.matrix": moments, "scale": moments[0, 0]}


def shards(rank, seed):
    """The ranks divide every tensor in the middle of a row."""
    for name, whole in tensors(seed).items():
        size, count = tuple(whole.shape), whole.numel()
        cut = [0, count // 2 + 1, count]
        if cut[rank] < cut[rank + 1]:
            box = Box(name, size, size, Region((0,) * len(size), size))
            yield Shard(box, cut[rank], whole.reshape(-1)[cut[rank] : cut[rank + 1]])


@pytest.fixture
def files(tmp_path):
    found = [MappedFiles(tmp_path, rank, shards(rank, seed=0), None) for rank in range(2)]
    describe(tmp_path, [entry for one in found for entry in one.entries])
    (tmp_path / FACTS_FILE).write_text(facts_text(FACTS))
    return found


def test_what_was_filled_in_last_is_read_by_torch_and_by_us(files, tmp_path):
    for seed in (1, 2):
        for rank, one in enumerate(files):
            one.fill(list(shards(rank, seed)))
        given, found = tensors(seed), {name: torch.zeros_like(value) for name, value in tensors(seed).items()}
        load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
        state = SavedState(tmp_path)
        for name, value in given.items():
            assert found[name].equal(value)
            assert state.read(name, Region((0,) * value.ndim, tuple(value.shape))).equal(value)
        assert state.read("matrix", Region((1, 2), (3, 4))).equal(given["matrix"][1:4, 2:6])


def test_each_byte_of_a_file_has_room_before_it_is_written(tmp_path):
    box = Box("large", (1 << 20,), (1 << 20,), Region((0,), (1 << 20,)))
    (name,) = MappedFiles(tmp_path, 0, [Shard(box, 0, torch.empty(1 << 20))], None).names
    status = (tmp_path / name).stat()
    assert status.st_blocks * 512 >= status.st_size > 4 << 20
    assert status.st_nlink == 2  # so that the store copies it


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
    describe(tmp_path, files.entries)
    (tmp_path / FACTS_FILE).write_text(facts_text(FACTS))
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
    with pytest.raises(StorageUnavailable, match=r"cannot be reserved in .*nowhere/__0_0.distcp"):
        MappedFiles(tmp_path / "nowhere", 0, shards(0, seed=0), None)


@pytest.mark.parametrize(("name", "region"), [("matrix", Region((4, 0), (2, 7))), ("other", Region((0,), (1,)))])
def test_a_tensor_of_another_model_is_refused(files, tmp_path, name, region):
    with pytest.raises(StorageError, match=f"{tmp_path} has .*{name}.* it is of another model"):
        SavedState(tmp_path).read(name, region)


def test_an_entry_of_a_lost_rank_is_missed(files, tmp_path):
    describe(tmp_path, files[0].entries)
    with pytest.raises(StorageError, match="or not whole"):
        SavedState(tmp_path).read("matrix", Region((0, 0), (5, 7)))


def test_facts_name_the_ranks_alone(tmp_path):
    layout = ParallelConfig(tensor=2, pipeline=2, data=2, virtual_pipeline=2, sequence=True, expert=2, expert_tensor=1)
    written = facts_text(FACTS.model_copy(update={"parallel": layout}))
    assert json.loads(written)["parallel"] == {"tensor": 2, "pipeline": 2, "data": 2}
