"""Tensors in an arena: reading it gives what was written."""

import pytest
import torch

from storage.errors import SyncMismatch
from tests.tasks.engine_update import plan_of
from trainer_core.weights.packing import Packing, tensors_of, views

TENSORS = {
    "whole": torch.randn(4, 6),
    "three bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "half words": torch.randn(5).bfloat16(),
    "columns": torch.randn(8, 12)[:, 2:6],
    "off a word": torch.randn(9)[1:],
    "words": torch.arange(7),
    "nothing": torch.empty(0, 3),
}


def packing_of(tensors):
    plan = plan_of(tensors, arena_bytes=1 << 20)
    (planned,) = tensors_of(plan).values()
    return Packing(planned), planned, torch.full((plan.arena_bytes,), 0xFF, dtype=torch.uint8)


def test_what_is_written_is_seen():
    packing, planned, arena = packing_of(TENSORS)
    packing.add({name: TENSORS[name] for name in list(TENSORS)[::-1]})
    packing.add({"not planned": torch.zeros(3)})
    packing.write(arena)
    found = dict(views(planned, arena))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_views_of_a_weight_are_read_when_they_are_written():
    weight = torch.zeros(4, 4)
    packing, planned, arena = packing_of({"one": weight[:2], "two": weight[2:]})
    packing.add({"one": weight[:2], "two": weight[2:]})
    weight.fill_(3)
    packing.write(arena)
    assert all(tensor.eq(3).all() for _, tensor in views(planned, arena))


def test_a_tensor_that_is_not_there_is_missed():
    packing, _, arena = packing_of(TENSORS)
    packing.add({name: tensor for name, tensor in TENSORS.items() if name != "columns"})
    with pytest.raises(SyncMismatch, match="columns was planned, but this rank has nothing"):
        packing.write(arena)


@pytest.mark.parametrize("other", [torch.zeros(4, 6).bfloat16(), torch.zeros(6, 4)])
def test_a_tensor_that_is_not_as_it_was_planned_is_refused(other):
    packing, _, _ = packing_of(TENSORS)
    with pytest.raises(SyncMismatch, match=r"whole is \w+ \[\d, \d\] now, but was planned as float32 \[4, 6\]"):
        packing.add({"whole": other})
