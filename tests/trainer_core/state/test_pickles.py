"""A state that names foreign code: it is refused by name before any of it runs, whatever reads it."""

import collections
import dataclasses
import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from storage.errors import ForeignCode, StorageError
from tests.trainer_core.models import random_samples
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, TrainerConfig
from trainer_core.state.comparison import compare_states
from trainer_core.state.pickles import check_pickles, read_metadata

CONFIG = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), max_length=64)
RNG = MetadataIndex("rng/shard_0_1")
MODULE = MetadataIndex("decoder.layers.mlp.linear_fc1._extra_state/shard_0_4")


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


class Indirect(Payload):
    """Looks up what it runs, as a dotted name does."""

    def __reduce__(self):
        return getattr, ("text", "upper")


def save(trainer, folder):
    """As earlier versions did, which stored pickles of what is not a tensor."""
    from tests.trainer_core.state.earlier import save_as_before

    trainer.import_model()
    trainer.train_policy(random_samples(1), 1.0)
    save_as_before(trainer, folder)


@pytest.fixture(scope="module")
def saved(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "state"
    run_trainers(model_dir, CONFIG, save, str(folder))
    return folder


@pytest.fixture
def state(saved, tmp_path):
    """A copy of a state, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "state"))


def put_metadata(state, **changes):
    metadata = read_metadata(state)
    (state / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, **changes)))


def put_place(state, index, **changes):
    places = read_metadata(state).storage_data
    put_metadata(state, storage_data={**places, index: dataclasses.replace(places[index], **changes)})


def put_object(state, index, content):
    """Write `content` in place of an object, at the end of its file."""
    path = state / read_metadata(state).storage_data[index].relative_path
    put_place(state, index, offset=path.stat().st_size, length=len(content))
    path.write_bytes(path.read_bytes() + content)
    return path


def torch_saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def in_metadata(state, payload):
    put_metadata(state, planner_data=payload)
    return state / ".metadata"


def in_object(state, payload):
    return put_object(state, RNG, torch_saved([payload]))


def in_object_of_the_old_format(state, payload):
    return put_object(state, RNG, torch_saved([payload], _use_new_zipfile_serialization=False))


def in_common(state, payload):
    (state / "common.pt").write_bytes(torch_saved({"args": payload}))
    return state / "common.pt"


def in_module_state(state, payload):
    data = torch.frombuffer(bytearray(pickle.dumps(payload)), dtype=torch.uint8)
    return put_object(state, MODULE, torch_saved(data))


PLACES = [in_metadata, in_object, in_object_of_the_old_format, in_common, in_module_state]


def load_all_ways(trainer, folder):
    """The errors of loading the state, or a reference."""
    trainer.import_model()
    refusals, reference = [], lambda path: trainer.load_reference(path, "reference")
    for load in (trainer.load, reference):
        with pytest.raises(ForeignCode) as refusal:
            load(folder)
        refusals.append(str(refusal.value))
    return refusals


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_command_does_not_run_and_is_named(state, tmp_path, place):
    path = place(state, Payload(tmp_path / "ran"))
    with pytest.raises(ForeignCode) as refusal:
        check_pickles(state)
    assert str(path) in str(refusal.value)
    assert place is in_module_state or "posix.system" in str(refusal.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", [in_metadata, in_object, in_common])
def test_the_trainer_runs_no_planted_command(model_dir, state, tmp_path, place):
    path = place(state, Payload(tmp_path / "ran"))
    (refusals,) = run_trainers(model_dir, CONFIG, load_all_ways, str(state))
    assert all(str(path) in refusal and "posix.system" in refusal for refusal in refusals)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", [in_metadata, in_object])
def test_a_comparison_runs_no_planted_command(saved, state, tmp_path, place):
    path = place(state, Payload(tmp_path / "ran"))
    for sides in ((saved, state), (state, saved)):
        with pytest.raises(ForeignCode, match=f"{path} .*posix.system"):
            compare_states(*sides)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", [in_metadata, in_object, in_common])
@pytest.mark.parametrize(
    "payload", [Indirect(""), collections.deque([1]), torch.nn.Linear(1, 1), len], ids=lambda one: type(one).__name__
)
def test_whatever_states_do_not_hold_is_refused(state, place, payload):
    path = place(state, payload)
    with pytest.raises(ForeignCode, match=str(path)):
        check_pickles(state)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"relative_path": "../__0_0.distcp"}, "not a file of its folder"),
        ({"relative_path": "/etc/hostname"}, "not a file of its folder"),
        ({"relative_path": ".."}, "not a file of its folder"),
        ({"offset": -1}, "at offset -1"),
        ({"length": -1}, "with length -1"),
        ({"transform_descriptors": ["zstd"]}, "as transformed by"),
    ],
)
def test_metadata_that_leads_elsewhere_is_refused(state, changes, fact):
    put_place(state, RNG, **changes)
    with pytest.raises(StorageError, match=f"{state}: .metadata (places|describes) 'rng/shard_0_1' .*{fact}"):
        check_pickles(state)


@pytest.mark.parametrize(
    "changes",
    [
        {"storage_data": {"rng/shard_0_1": None}},
        {"storage_data": None},
        {"state_dict_metadata": {"rng/shard_0_1": StorageMeta()}},
        {"state_dict_metadata": []},
    ],
)
def test_metadata_of_another_kind_is_refused(state, changes):
    put_metadata(state, **changes)
    with pytest.raises(StorageError, match=f"no readable train state at {state}"):
        check_pickles(state)


def test_other_pickles_are_no_metadata(state):
    for content in (pickle.dumps({"a": 1}), b"", b"\x80\x04", b"text", pickle.dumps(torch.float32)):
        (state / ".metadata").write_bytes(content)
        with pytest.raises(StorageError, match=f"no readable train state at {state}"):
            check_pickles(state)


def test_an_object_that_is_damaged_is_named(state):
    path = put_object(state, RNG, b"no pickle at all")
    with pytest.raises(StorageError, match=f"rng/shard_0_1 cannot be read from {path}"):
        check_pickles(state)


def go_on(trainer, folder):
    """Loads in every way; returns the result of training."""
    trainer.import_model()
    trainer.load_reference(folder, "reference")
    trainer.load(folder)
    return trainer.train_policy(random_samples(2), 1.0)


def test_states_that_name_their_folder_and_keep_a_common_file_are_read(model_dir, saved, state):
    # as earlier versions of Ratchet and of megatron-core wrote them
    put_metadata(state, storage_meta=StorageMeta(state, save_id="random"))
    metadata = read_metadata(state)
    common = metadata.storage_data[MetadataIndex("common_state/shard_0_1")]
    with (state / common.relative_path).open("rb") as file:
        file.seek(common.offset)
        (content,) = torch.load(io.BytesIO(file.read(common.length)), weights_only=True)
    (state / "common.pt").write_bytes(torch_saved(content))
    check_pickles(state)
    assert compare_states(saved, state).differences == ()
    assert run_trainers(model_dir, CONFIG, go_on, str(state)) == run_trainers(model_dir, CONFIG, go_on, str(saved))


def test_the_weights_alone_are_read_without_the_other_files(state):
    for path in state.glob("optimizer.*"):
        path.unlink()
    check_pickles(state)


def allowed_before_and_after(rank, world_size, store, folder):
    before = set(torch.serialization.get_safe_globals())
    check_pickles(Path(folder))
    return len(before), before == set(torch.serialization.get_safe_globals())


def test_what_megatron_lets_torch_read_stays_allowed(state):
    ((number, same),) = run_ranks(1, allowed_before_and_after, str(state))
    assert number > 1
    assert same
