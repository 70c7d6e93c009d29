"""Answers of the driver about cards that read each other's memory; here the driver is a few lines."""

import ctypes

import pytest

from tasks.config.environment import Settings
from tasks.workers.peers import can_read, have_fp8
from tasks.workers.placement import placement
from tests.small.config import small_config


class Driver:
    """Cards by place; `links` holds (reader, owner). A card that it does not have is an error, as in CUDA."""

    def __init__(self, cards, links, starts=True):
        self.cards, self.links, self.starts = cards, links, starts

    def cuInit(self, flags):  # noqa: N802
        return 0 if self.starts else 100

    def cuDeviceGet(self, found, place):  # noqa: N802
        if place >= self.cards:
            return 101
        found._obj.value = place + 10
        return 0

    def cuDeviceCanAccessPeer(self, answer, reader, owner):  # noqa: N802
        assert isinstance(reader, ctypes.c_int)
        if reader.value < 10 or owner.value < 10:
            return 101
        answer._obj.value = (reader.value - 10, owner.value - 10) in self.links
        return 0


@pytest.mark.parametrize(
    ("driver", "pairs", "expected"),
    [
        (Driver(2, {(0, 1)}), ((0, 1),), True),
        (Driver(2, {(0, 1)}), ((1, 0),), False),
        (Driver(3, {(0, 1), (2, 1)}), ((0, 1), (2, 1)), True),
        (Driver(3, {(0, 1)}), ((0, 1), (2, 1)), False),
        (Driver(1, {(0, 1)}), ((0, 1),), False),
        (Driver(2, set(), starts=False), ((0, 1),), None),
    ],
)
def test_every_pair_must_be_able_to(driver, pairs, expected):
    assert can_read(pairs, driver) is expected


class Capable(Driver):
    """Cards of these compute capabilities."""

    def __init__(self, *capabilities, **more):
        super().__init__(len(capabilities), set(), **more)
        self.capabilities = capabilities

    def cuDeviceGetAttribute(self, found, attribute, device):  # noqa: N802
        found._obj.value = self.capabilities[device.value - 10][attribute - 75]
        return 0


@pytest.mark.parametrize(
    ("driver", "cards", "expected"),
    [
        (Capable((8, 0)), 1, False),
        (Capable((8, 9)), 1, True),
        (Capable((9, 0), (8, 6)), 1, True),
        (Capable((9, 0), (8, 6)), 2, False),
        (Capable((10, 0), (9, 0)), 2, True),
        (Capable((9, 0), starts=False), 1, None),
    ],
)
def test_every_card_must_have_fp8_units(driver, cards, expected):
    assert have_fp8(cards, driver) is expected


def test_without_a_driver_nothing_is_known(monkeypatch):
    monkeypatch.setattr("tasks.workers.peers._DRIVER", "libno-such-driver.so")
    assert can_read(((7, 8),)) is None


@pytest.mark.parametrize(
    ("cards", "links", "expected"),
    [
        ("own", {(2, 0), (2, 1)}, True),  # an engine on the third card reads those of both ranks
        ("own", {(0, 2), (1, 2), (0, 1), (1, 0)}, False),  # they could read its card
        ("own", {(2, 0)}, False),
        ("shared", {(0, 1)}, True),  # an engine on the first card reads the second, too
        ("shared", {(1, 0)}, False),
    ],
)
def test_the_engines_cards_are_asked_for_the_trainers(monkeypatch, cards, links, expected):
    """Cards are named by their places among the visible cards, as the driver counts them."""
    can_read.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(3, links))
    config = small_config(["train.parallel.pipeline=2", f"engine.cards={cards}"])
    try:
        found = placement(config, Settings(ray_address=None, gpus=("5", "3", "7")))
    finally:
        can_read.cache_clear()
    assert found.reads is expected
