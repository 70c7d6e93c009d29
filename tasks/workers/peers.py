"""Cards of this host, as CUDA's driver says. Imports neither torch nor CUDA's libraries before it is asked."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_DRIVER = "libcuda.so.1"
_CAPABILITY = (75, 76)  # attributes of a device: major and minor number of its compute capability
_WITH_FP8 = (8, 9)  # Ada; Hopper is 9.0


@lru_cache
def can_read(pairs: tuple[tuple[int, int], ...], driver: Any = None) -> bool | None:
    """True if in each pair the first card can read the memory of the second; None if there is no driver to ask. A card
    is named by its place among those that this process sees. Asking takes no memory on a card."""
    if (driver := _begun(driver)) is None:
        return None
    return all(_can(driver.cuDeviceCanAccessPeer, *(_device(driver, card) for card in pair)) for pair in pairs)


@lru_cache
def card_bytes(cards: int, driver: Any = None) -> int | None:
    """Memory of the smallest of the first `cards` visible cards; None if there is no driver to ask."""
    if (driver := _begun(driver)) is None:
        return None
    sizes = [ctypes.c_size_t(0) for _ in range(cards)]
    failed = [driver.cuDeviceTotalMem_v2(ctypes.byref(size), _device(driver, card)) for card, size in enumerate(sizes)]
    return None if any(failed) else min(size.value for size in sizes)


@lru_cache
def have_fp8(cards: int, driver: Any = None) -> bool | None:
    """True if each of the first `cards` visible cards has FP8 units; None if there is no driver to ask."""
    if (driver := _begun(driver)) is None:
        return None
    return all(_capability(driver, _device(driver, card)) >= _WITH_FP8 for card in range(cards))


def _begun(driver: Any) -> Any:
    """CUDA's driver as a C library: the given one, or that of this host; None if it does not begin."""
    try:
        driver = driver or ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


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
