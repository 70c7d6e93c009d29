"""Cards on which processes compute, and the resulting transport of the weights."""

import math

import pytest

from storage.errors import InputError
from tasks.config.environment import Settings
from tasks.engine.protocol import EngineSpec
from tasks.workers.fleet import engine_digest
from tasks.workers.placement import (
    Placement,
    bundles,
    engine_cards,
    engines_on_a_card,
    placement,
    taken,
    transport,
)
from tests.small.config import small_config

CPU = Placement(device="cpu", engines=((), ()))
COLOCATED = Placement(device="cuda", ranks=("0",), engines=(("0",), ("0",)))
APART = Placement(device="cuda", ranks=("0", "1"), engines=(("2",), ("3",)))
APART_TP2 = Placement(device="cuda", ranks=("0",), engines=(("2", "3"),))
MIXED = Placement(device="cuda", ranks=("0", "1"), engines=(("0",), ("1",)))
SHARED_ENGINES = Placement(device="cuda", ranks=("0",), engines=(("1",), ("1",)))
CLUSTER = {"one_host": False}
OWN = "engine.cards=own"


def that(place: Placement, **facts: bool) -> Placement:
    return place.model_copy(update=facts)


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
        (that(COLOCATED, **CLUSTER), "auto", "cuda"),
        (that(COLOCATED, **CLUSTER), "cuda", "cuda"),
        (APART, "auto", "memory"),
        (APART, "cuda", "cuda"),
        (APART, "collective", "collective"),
        (APART_TP2, "collective", "collective"),
        (APART, "files", "files"),
        *((that(place, reads=True), "auto", "cuda") for place in (APART, APART_TP2, MIXED, SHARED_ENGINES)),
        *((that(place, reads=False), "auto", "memory") for place in (APART, APART_TP2, MIXED, SHARED_ENGINES)),
        (that(MIXED, reads=True), "memory", "memory"),
        (that(MIXED, reads=True), "cuda", "cuda"),
        (that(APART, reads=True, **CLUSTER), "auto", "memory"),
    ],
)
def test_the_fastest_way_that_was_seen_to_work_is_taken(place, wanted, expected):
    assert transport(wanted, place) == expected


@pytest.mark.parametrize(
    ("place", "wanted", "where"),
    [
        (CPU, "cuda", "needs cards; trainer and engines are on CPU"),
        (
            that(MIXED, reads=False),
            "cuda",
            "which the driver denies; .* cards 0,1 \\(trainer\\) and 0; 1 \\(engines\\)",
        ),
        (that(MIXED, reads=True, **CLUSTER), "cuda", 'not certain for a Ray cluster .* 0; 1 .*"memory"'),
        (MIXED, "collective", "NCCL needs a card for each process"),
        (COLOCATED, "collective", 'NCCL needs a card for each process, .*engine.cards = "own"'),
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
        (("4", "6"), ["train.parallel.pipeline=1", OWN], (("4",), (("6",),))),
        (("0", "1", "2", "3"), ["engine.tensor=2", OWN], (("0", "1"), (("2", "3"),))),
        (("0", "1", "2", "3", "4"), ["engine.count=2", OWN], (("0", "1"), (("2",), ("3",)))),
        ((), ["engine.count=2", OWN], CPU),
    ],
)
def test_a_run_is_placed_as_its_processes_are_started(gpus, settings, expected):
    found = placement(small_config(settings), Settings(ray_address=None, gpus=gpus))
    assert found == (expected if gpus == () else Placement(device="cuda", ranks=expected[0], engines=expected[1]))


@pytest.mark.parametrize(
    ("gpus", "settings", "names"),
    [
        (
            ("5",),
            ["train.parallel.pipeline=1"],
            "needs 2 GPUs: 1 for the trainer and 1 for each of 1 engines, but 1 are",
        ),
        (("0", "1"), [], r"needs 3 GPUs: 2 for the trainer .* but 2 are visible \(0,1\)"),
        (
            ("0", "1", "2", "3"),
            ["engine.count=2", "engine.tensor=2"],
            "needs 6 GPUs: .* 2 for each of 2 engines, but 4",
        ),
    ],
)
def test_cards_of_their_own_that_are_not_there_are_refused_with_the_repair(gpus, settings, names):
    config = small_config([*settings, OWN])
    with pytest.raises(InputError, match=f'{names}.*CUDA_VISIBLE_DEVICES.*"shared"'):
        placement(config, Settings(ray_address=None, gpus=gpus))


@pytest.mark.parametrize(
    ("tensor", "count", "cards", "expected"),
    [(1, 1, "shared", 1), (1, 3, "shared", 2), (2, 3, "shared", 3), (2, 1, "shared", 1), (1, 3, "own", 1)],
)
def test_engines_that_share_a_card_are_counted(tensor, count, cards, expected):
    section = small_config([f"engine.tensor={tensor}", f"engine.count={count}", f"engine.cards={cards}"]).engine
    assert engines_on_a_card(section, 2) == expected


ATTACHED = Settings(ray_address="head:6379", gpus=("0", "1"))
WITHOUT_CARD = Settings(ray_address="head:6379", gpus=())


def test_a_cluster_is_not_taken_for_one_host():
    found = placement(small_config(["sync.transport=cuda"]), ATTACHED)
    assert not found.one_host
    with pytest.raises(InputError, match="not certain for a Ray cluster"):
        transport("cuda", found)


@pytest.mark.parametrize("wanted", ["memory", "cuda", "collective"])
def test_weights_go_from_host_to_host_by_storage_alone(wanted):
    found = placement(small_config(), ATTACHED).model_copy(update={"apart": True})
    assert transport("auto", found) == transport("files", found) == "files"
    with pytest.raises(InputError, match=f'sync.transport is "{wanted}".* on several: use "auto" or "files"'):
        transport(wanted, found)


def test_a_head_without_cards_does_not_decide_for_its_cluster():
    with pytest.raises(InputError, match=r'device.kind is "auto".*RAY_ADDRESS.*"cuda" or "cpu"'):
        WITHOUT_CARD.device("auto")
    assert WITHOUT_CARD.device("cuda") == ATTACHED.device("auto") == "cuda"
    assert WITHOUT_CARD.device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("device", "settings", "trainers", "engines"),
    [
        ("cpu", ["engine.count=2"], [{"CPU": 1}] * 2, [{"CPU": 1}] * 2),
        ("cpu", ["train.parallel.tensor=2"], [{"CPU": 2}] * 2, [{"CPU": 1}]),
        ("cuda", ["train.parallel.tensor=2", "engine.tensor=2", OWN], [{"GPU": 2}] * 2, [{"GPU": 2}]),
        ("cuda", ["engine.count=2"], [{"GPU": 1}] * 2, None),
    ],
)
def test_a_tensor_group_and_an_engine_are_on_one_host_each(device, settings, trainers, engines):
    found = bundles(small_config(settings), device)
    assert (found["trainers"], found.get("engines")) == (trainers, engines)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_card_of_a_cluster_has_room_for_its_rank_and_engines_and_not_for_two_ranks(count):
    found = taken(small_config([f"engine.count={count}"]), "cuda")
    rank, engine = found["trainers"]["GPU"], found["engines"]["GPU"]
    assert 2 * rank > 1 >= rank + math.ceil(count / 2) * engine


def test_engines_of_several_cards_do_not_share_those_of_a_cluster():
    with pytest.raises(InputError, match=r'engine.tensor is 2 .* set engine.cards to "own", or engine.tensor to 1'):
        bundles(small_config(["engine.tensor=2"]), "cuda")


def test_an_engine_on_other_cards_is_another_one():
    spec = EngineSpec(model_dir="here", dtype="bfloat16", max_model_len=8, max_num_seqs=1, kv_cache_bytes=None)
    moved = spec.model_copy(update={"model_dir": "there"})
    assert engine_digest(spec, ("0",), "") == engine_digest(moved, ("0",), "") != engine_digest(spec, ("1",), "")
    assert engine_digest(spec, ("0",), "") != engine_digest(spec, ("0",), "of a source")
