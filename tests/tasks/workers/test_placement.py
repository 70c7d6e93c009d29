"""Which cards processes compute on, and the way of the weights that follows from it."""

import pytest

from storage.errors import InputError
from tasks.config.environment import Settings
from tasks.workers.placement import Placement, engine_cards, placement, transport
from tests.small.config import small_config

CPU = Placement(device="cpu", engines=((), ()))
COLOCATED = Placement(device="cuda", ranks=("0",), engines=(("0",), ("0",)))
APART = Placement(device="cuda", ranks=("0", "1"), engines=(("2",), ("3",)))
APART_TP2 = Placement(device="cuda", ranks=("0",), engines=(("2", "3"),))
MIXED = Placement(device="cuda", ranks=("0", "1"), engines=(("0",), ("1",)))
SHARED_ENGINES = Placement(device="cuda", ranks=("0",), engines=(("1",), ("1",)))


@pytest.mark.parametrize(
    ("cards", "tensor", "expected"),
    [
        ("0", 1, ["0", "0", "0"]),
        ("012", 1, ["0", "1", "2"]),
        ("01234", 2, ["01", "23", "01"]),
        ("0123", 4, ["0123"] * 3),
    ],
)
def test_engines_take_the_next_cards_and_share_them_when_there_are_no_more(cards, tensor, expected):
    assert ["".join(engine_cards(tuple(cards), place, tensor)) for place in range(3)] == expected


def test_an_engine_of_more_cards_than_there_are_is_refused():
    with pytest.raises(InputError, match=r"engine.tensor is 4, but 2 GPUs are visible"):
        engine_cards(("0", "1"), 0, 4)


@pytest.mark.parametrize(
    ("place", "wanted", "expected"),
    [
        (CPU, "auto", "memory"),
        (CPU, "memory", "memory"),
        (CPU, "collective", "collective"),
        (CPU, "files", "files"),
        (COLOCATED, "auto", "cuda"),
        (COLOCATED, "cuda", "cuda"),
        (COLOCATED, "memory", "memory"),
        (APART, "auto", "collective"),
        (APART_TP2, "auto", "collective"),
        (APART, "files", "files"),
        (MIXED, "auto", "memory"),
        (SHARED_ENGINES, "auto", "memory"),
    ],
)
def test_the_fastest_way_that_works_is_taken(place, wanted, expected):
    assert transport(wanted, place) == expected


@pytest.mark.parametrize(
    ("place", "wanted", "where"),
    [
        (CPU, "cuda", "they are on CPU"),
        (MIXED, "cuda", "cards 0,1 \\(trainer\\) and 0; 1 \\(engines\\)"),
        (MIXED, "collective", "NCCL needs a card for each process"),
        (COLOCATED, "collective", "NCCL needs a card for each process"),
    ],
)
def test_a_way_that_cannot_work_is_refused(place, wanted, where):
    with pytest.raises(InputError, match=where):
        transport(wanted, place)


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        ((), ["engine.count=2"], CPU),
        (("0", "1", "2", "3"), ["engine.count=2", "train.parallel.pipeline=2"], (("0", "1"), (("0",), ("1",)))),
        (("4",), ["train.parallel.pipeline=1"], (("4",), (("4",),))),
    ],
)
def test_a_run_is_placed_as_its_processes_are_started(gpus, settings, expected):
    found = placement(small_config(settings), Settings(ray_address=None, ray_token=None, gpus=gpus))
    assert found == (expected if gpus == () else Placement(device="cuda", ranks=expected[0], engines=expected[1]))
