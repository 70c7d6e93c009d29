"""Arenas on a card that other processes open by CUDA IPC, also from another card of the host.

They come from cudaMalloc itself: what torch's allocator hands out may be part of a larger block, expandable or under
vLLM's sleep mode, none of which can be exported. They are raw bytes, and are kept from one update to the next, because
the first opening costs tens of milliseconds."""

import ctypes
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import runtime  # pyright: ignore[reportAttributeAccessIssue] - compiled, without stubs

from storage.errors import StorageUnavailable
from trainer_core.frozen import Frozen
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import WeightPlan

_HANDLE_BYTES = 64
_OPEN = runtime.cudaIpcMemLazyEnablePeerAccess
_exported: dict[tuple[int, int, int], list[int]] = {}
"""Addresses of this process's arenas, by device, size and number; of one channel at a time."""
_replaced: list[int] = []
"""Addresses of arenas of a former size, until the next update: receivers may have them open until the end of this one,
and memory that another process has open must not be freed."""
_opened: dict[bytes, int] = {}
"""Addresses of other processes' arenas in this one, by their handles; of one channel at a time."""


class Shown(Frozen):
    card: str  # UUID of the card that they lie on
    handles: tuple[str, ...]  # handles by which other processes open them; hexadecimal


def export_arenas(channel: Channel, plan: WeightPlan, sender: int, device: torch.device) -> list[torch.Tensor]:
    """This process's arenas, (arena_bytes,) uint8 each, whose handles are then in the channel's folder. Raises
    StorageUnavailable if the card has no room for them, or cannot share memory."""
    index = _index(device)
    key = (index, plan.arena_bytes, channel.arenas)
    with _on(index):
        _keep(key)
        made = [_done(runtime.cudaIpcGetMemHandle(one), "shared with other processes") for one in _exported[key]]
    handles = tuple(ctypes.string_at(one.getPtr(), _HANDLE_BYTES).hex() for one in made)
    path = _path(channel, sender)
    path.with_suffix(".part").write_text(Shown(card=_card(index), handles=handles).model_dump_json(), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    return [tensor_at(address, plan.arena_bytes, torch.device("cuda", index)) for address in _exported[key]]


class CardOpener:
    """Finds arenas on cards. They stay open for the next update, unless this one has failed."""

    def __init__(self, channel: Channel, plan: WeightPlan, device: torch.device) -> None:
        self._channel, self._plan, self._device = channel, plan, device
        self._handles: set[bytes] = set()

    def open(self, sender: int) -> tuple[list[torch.Tensor], bool]:
        """As `Opener`: False if the arenas lie on another card, so that each reading crosses the link."""
        index = _index(self._device)
        shown = Shown.model_validate_json(_path(self._channel, sender).read_text(encoding="utf-8"))
        card, handles = _card(index), [bytes.fromhex(handle) for handle in shown.handles]
        with _on(index):
            addresses = [_address(handle, _opening(shown.card, card)) for handle in handles]
        self._handles |= set(handles)
        own = torch.device("cuda", index)  # for torch they are on this card
        return [tensor_at(address, self._plan.arena_bytes, own) for address in addresses], shown.card == card

    def close(self, failed: bool) -> None:
        """Close the arenas of other updates, and of this one if it has failed."""
        for handle in _opened.keys() - (set() if failed else self._handles):
            runtime.cudaIpcCloseMemHandle(_opened.pop(handle))


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Memory that something else owns, (size,) uint8, as a tensor of `device`, wherever it lies. torch.as_tensor and
    the like ask CUDA for the card that it lies on, and copy it if that is another one."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size)  # pyright: ignore[reportPrivateUsage]
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))


def _keep(key: tuple[int, int, int]) -> None:
    """Reserve arenas of that size, and free all others but those that they replace."""
    _free(_replaced)
    _replaced.clear()
    if key not in _exported:
        made = _reserved(*key[1:])
        _replaced.extend(itertools.chain.from_iterable(_exported.values()))
        _exported.clear()
        _exported[key] = made


def _free(addresses: list[int]) -> None:
    for address in addresses:
        runtime.cudaFree(address)


@contextmanager
def _on(index: int) -> Iterator[None]:
    """On that card, for torch and for the library below, which has a current card of its own."""
    with torch.cuda.device(index):
        runtime.cudaSetDevice(index)
        yield


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _card(index: int) -> str:
    """The card's name for every process, whichever cards that sees."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _reserved(size: int, count: int) -> list[int]:
    """Addresses of new arenas. If there is no room for all of them, none stays reserved."""
    addresses: list[int] = []
    try:
        while len(addresses) < count:
            addresses.append(int(_done(runtime.cudaMalloc(size), "reserved", "lower sync.arena_mib")))
    except StorageUnavailable:
        _free(addresses)
        raise
    return addresses


def _opening(theirs: str, own: str) -> str:
    return f"opened on card {theirs}" + ("" if theirs == own else f" from card {own}")


def _address(handle: bytes, opening: str) -> int:
    if handle not in _opened:
        theirs = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(theirs.getPtr(), handle, _HANDLE_BYTES)
        _opened[handle] = int(_done(runtime.cudaIpcOpenMemHandle(theirs, _OPEN), opening))
    return _opened[handle]


def _done(answer: tuple[Any, ...], what: str, or_else: str = "") -> Any:
    code, *values = answer
    if code != runtime.cudaError_t.cudaSuccess:
        repair = " or ".join(filter(None, (or_else, 'set sync.transport to "memory"')))
        fact = f"an arena for a weight update could not be {what}: {code.name} (process {os.getpid()})"
        raise StorageUnavailable(f"{fact}; {repair}")
    return values[0]


def _path(channel: Channel, sender: int) -> Path:
    return Path(channel.folder, f"handles-{sender}")
