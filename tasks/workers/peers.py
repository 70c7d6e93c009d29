"""True if cards of this host can read each other's memory, as the driver says. Imports neither torch nor CUDA's
libraries before it is asked."""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

_DRIVER = "libcuda.so.1"
_CAPABILITY = (75, 76)  # attributes of a device: major and minor number of its compute capability
_WITH_FP8 = (8, 9)  # Ada; Hopper is 9.0


@lru_cache
def can_read(pairs: tuple[tuple[int, int], ...]) -> bool | None:
    """True if in each pair the first card can read the memory of the second; None if there is no driver to ask. A card
    is named by its place among those that this process sees."""
    return _of_driver(asked, pairs)


def asked(driver: Any, pairs: Sequence[tuple[int, int]]) -> bool | None:
    """Answer of `driver`, CUDA's driver as a C library, to `can_read`. It takes no memory on a card."""
    if driver.cuInit(0):
        return None
    return all(_can(driver.cuDeviceCanAccessPeer, *(_device(driver, card) for card in pair)) for pair in pairs)


@lru_cache
def card_bytes(cards: int) -> int | None:
    """Memory of the smallest of the first `cards` visible cards; None if there is no driver to ask."""
    return _of_driver(least, cards)


def least(driver: Any, cards: int) -> int | None:
    """Answer of `driver` to `card_bytes`."""
    if driver.cuInit(0):
        return None
    sizes = [ctypes.c_size_t(0) for _ in range(cards)]
    failed = [driver.cuDeviceTotalMem_v2(ctypes.byref(size), _device(driver, card)) for card, size in enumerate(sizes)]
    return None if any(failed) else min(size.value for size in sizes)


@lru_cache
def have_fp8(cards: int) -> bool | None:
    """True if each of the first `cards` visible cards has FP8 units; None if there is no driver to ask."""
    return _of_driver(all_have_fp8, cards)


def all_have_fp8(driver: Any, cards: int) -> bool | None:
    """Answer of `driver` to `have_fp8`."""
    if driver.cuInit(0):
        return None
    return all(_capability(driver, _device(driver, card)) >= _WITH_FP8 for card in range(cards))


def _of_driver[Cards, Answer](ask: Callable[[Any, Cards], Answer | None], cards: Cards) -> Answer | None:
    try:
        return ask(ctypes.CDLL(_DRIVER), cards)
    except OSError:
        return None


def _capability(driver: Any, device: ctypes.c_int) -> tuple[int, ...]:
    found = [ctypes.c_int(0) for _ in _CAPABILITY]
    for number, attribute in zip(found, _CAPABILITY, strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return tuple(number.value for number in found)


def _device(driver: Any, place: int) -> ctypes.c_int:
    device = ctypes.c_int(-1)
    driver.cuDeviceGet(ctypes.byref(device), place)
    return device


def _can(ask: Callable[..., int], reader: ctypes.c_int, owner: ctypes.c_int) -> bool:
    answer = ctypes.c_int(0)
    return not ask(ctypes.byref(answer), reader, owner) and bool(answer.value)
