"""Refusals of a save, and its effect on the files of the previous save."""

import resource
import socket
from pathlib import Path

import pytest

from storage.backends.root import open_root
from storage.errors import RatchetError, StorageUnavailable
from storage.parts import PartWriter, is_intact
from tests.trainer_core.models import random_samples
from tests.trainer_core.ranks import run_trainers
from tests.trainer_core.state.test_checkpoint import LAYOUTS, configuration


def save_with_scales(trainer, folder):
    """The error of a save if a module keeps something beside its tensors, as those of Transformer Engine do for fp8."""
    import torch

    trainer.import_model()
    trainer._model.modules[0].decoder.layers[1].mlp.linear_fc1.get_extra_state = lambda: torch.ones(3)
    with pytest.raises(RatchetError) as caught:
        trainer.save(folder)
    return str(caught.value)


def test_what_is_not_in_tensors_is_not_lost_silently(model_dir, tmp_path):
    (message,) = run_trainers(model_dir, configuration(), save_with_scales, str(tmp_path))
    assert "linear_fc1._extra_state" in message
    assert "holds what is not in tensors and would be lost" in message


def save_and_store(trainer, folder):
    """Save twice into one folder; the store's copy of the first is read after the second."""
    trainer.import_model()
    root = open_root(f"{folder}/root")
    writer = PartWriter(root, "run", 1, "train")
    files = trainer.save(f"{folder}/state")
    parts = writer.write_files(Path(folder, "state"), files.names)
    trainer.train_policy(random_samples(1), 1.0)
    assert trainer.load(f"{folder}/state").identity == files.identity  # training has not changed the files
    trainer.train_policy(random_samples(1), 1.0)
    again = trainer.save(f"{folder}/state")
    changed = [name for part, name in zip(parts, files.names, strict=True) if not is_intact(root, part)]
    inodes = {name: Path(folder, "state", name).stat().st_ino for name in files.names if name.endswith(".safetensors")}
    trainer.save(f"{folder}/state")
    same = all(Path(folder, "state", name).stat().st_ino == inode for name, inode in inodes.items())
    return again.names == files.names, changed, same, again.identity != files.identity


def test_the_next_save_changes_no_stored_part(model_dir, tmp_path):
    assert run_trainers(model_dir, configuration(), save_and_store, str(tmp_path)) == [(True, [], True, True)]


def save_without_room(trainer, folder):
    """Errors of each rank if only the last one has no room, and the result of a save elsewhere afterwards."""
    trainer.import_model()
    if trainer._mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    with pytest.raises(StorageUnavailable) as caught:
        trainer.save(f"{folder}/full")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saved = trainer.save(f"{folder}/elsewhere")
    return str(caught.value), saved.identity, trainer.load(f"{folder}/elsewhere").identity


def test_no_room_for_the_files_is_said_by_all_ranks_before_anything_is_written(model_dir, tmp_path):
    ranks = run_trainers(model_dir, configuration(LAYOUTS["dp2"]), save_without_room, str(tmp_path))
    for message, saved, loaded in ranks:
        assert "bytes for a train state cannot be reserved in" in message
        assert f"weights.1.safetensors on host {socket.gethostname()}" in message
        assert "free space there" in message
        assert saved == loaded
