"""Arenas on a card that other processes open by CUDA IPC.

They come from cudaMalloc itself: what torch's allocator hands out may be part of a larger block, expandable or under
vLLM's sleep mode, none of which can be exported. They are raw bytes, and are kept from one update to the next, because
the first opening costs tens of milliseconds.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import runtime  # pyright: ignore[reportAttributeAccessIssue] - compiled, without stubs

from storage.errors import StorageUnavailable
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import WeightPlan

_HANDLE_BYTES = 64
_OPEN = runtime.cudaIpcMemLazyEnablePeerAccess

_exported: dict[tuple[int, int, int], list[int]] = {}
"""Addresses of this process's arenas, by device, size and number; of one channel at a time."""
_opened: dict[bytes, int] = {}
"""Addresses of other processes' arenas in this one, by their handles; of one channel at a time."""


class _Bytes:
    """Raw device memory, as numpy-like libraries describe it to each other."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def export_arenas(channel: Channel, plan: WeightPlan, sender: int, device: torch.device) -> list[torch.Tensor]:
    """This process's arenas, (arena_bytes,) uint8 each, whose handles are then in the channel's folder.

    Raises:
        StorageUnavailable: the card has no room for them, or cannot share memory.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, plan.arena_bytes, channel.arenas)
    with _on(index):
        if key not in _exported:
            _free_exported()
            _exported[key] = [_reserved(plan.arena_bytes) for _ in range(channel.arenas)]
        handles = b"".join(_handle(address) for address in _exported[key])
    path = _path(channel, sender)
    path.with_suffix(".part").write_bytes(handles)
    path.with_suffix(".part").rename(path)
    return [_tensor(address, plan.arena_bytes, index) for address in _exported[key]]


def open_arenas(channel: Channel, plan: WeightPlan, sender: int, device: torch.device) -> list[torch.Tensor]:
    """The arenas of a sender, (arena_bytes,) uint8 each, in this process.

    Raises:
        StorageUnavailable: they cannot be opened from this card.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _on(index):
        addresses = [_address(handle) for handle in _handles(channel, sender)]
    return [_tensor(address, plan.arena_bytes, index) for address in addresses]


def forget_others(channel: Channel, senders: Iterable[int]) -> None:
    """Close every arena that was opened and is not one of these senders'."""
    wanted = {handle for sender in senders for handle in _handles(channel, sender)}
    close_opened(set(_opened) - wanted)


def close_opened(handles: set[bytes] | None = None) -> None:
    """Close arenas of other processes; all if no handles are given."""
    for handle in set(_opened) if handles is None else handles:
        runtime.cudaIpcCloseMemHandle(_opened.pop(handle))


def _free_exported() -> None:
    for addresses in _exported.values():
        for address in addresses:
            runtime.cudaFree(address)
    _exported.clear()


@contextmanager
def _on(index: int) -> Iterator[None]:
    """On that card, for torch and for the library below, which has a current card of its own."""
    with torch.cuda.device(index):
        runtime.cudaSetDevice(index)
        yield


def _reserved(size: int) -> int:
    return int(_done(runtime.cudaMalloc(size), "reserved"))


def _handle(address: int) -> bytes:
    handle = _done(runtime.cudaIpcGetMemHandle(address), "shared with other processes")
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def _address(handle: bytes) -> int:
    if handle not in _opened:
        theirs = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(theirs.getPtr(), handle, _HANDLE_BYTES)
        _opened[handle] = int(_done(runtime.cudaIpcOpenMemHandle(theirs, _OPEN), "opened from another process"))
    return _opened[handle]


def _handles(channel: Channel, sender: int) -> list[bytes]:
    handles = _path(channel, sender).read_bytes()
    return [handles[start : start + _HANDLE_BYTES] for start in range(0, len(handles), _HANDLE_BYTES)]


def _tensor(address: int, size: int, index: int) -> torch.Tensor:
    return torch.as_tensor(_Bytes(address, size), device=f"cuda:{index}")


def _done(answer: tuple[Any, ...], what: str) -> Any:
    code, *values = answer
    if code != runtime.cudaError_t.cudaSuccess:
        raise StorageUnavailable(
            f"an arena for a weight update could not be {what}: {code.name} (process {os.getpid()}); lower "
            'sync.arena_mib, or set sync.transport to "memory"'
        )
    return values[0]


def _path(channel: Channel, sender: int) -> Path:
    return Path(channel.folder, f"handles-{sender}")
