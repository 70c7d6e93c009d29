"""What the driver says of cards that read each other's memory; here the driver is a few lines."""

import ctypes

import pytest

from tasks.workers.peers import asked, can_read


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
    assert asked(driver, pairs) is expected


def test_without_a_driver_nothing_is_known(monkeypatch):
    monkeypatch.setattr("tasks.workers.peers._DRIVER", "libno-such-driver.so")
    assert can_read(((7, 8),)) is None
