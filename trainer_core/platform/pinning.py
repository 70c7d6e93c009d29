"""Pinned host memory, which a GPU copies into directly and behind the host's back."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from storage.errors import WorkerLost

_NOT_HERE = (1, 2, 801)
"""cudaErrorInvalidValue, cudaErrorMemoryAllocation, cudaErrorNotSupported: this memory cannot be pinned, or no more."""


@dataclass(frozen=True)
class Pinning:
    """Functions of a device's runtime that pin host memory."""

    register: Callable[[int, int], int]
    """Pins that many bytes from an address on. Returns CUDA's error code, 0 if they are pinned."""
    unregister: Callable[[int], int]  # releases what was pinned from an address on; returns the same
    forget: Callable[[], None]
    """Lets the runtime forget an error, which it would report again as that of the next kernel."""
    wait: Callable[[], None]  # waits until what was copied is there

    def pin(self, memory: torch.Tensor, file: Path) -> bool:
        """Pin host memory; `file` is what it is mapped to, for messages. False if it cannot be pinned: the kernel does
        not let a device write to a file on a disk. Raises WorkerLost if the device does not work, or the memory is
        pinned already."""
        code = self.register(memory.data_ptr(), memory.nbytes)
        if code in _NOT_HERE:
            self.forget()
        elif code:
            raise WorkerLost(
                f"the memory of {file} cannot be pinned for the GPU: CUDA error {code}. The next attempt starts a new "
                "process; if it ends in the same way, the GPU or its driver is at fault"
            )
        return not code

    def release(self, memory: torch.Tensor) -> None:
        code = self.unregister(memory.data_ptr())
        if code:
            fact = f"pinned memory cannot be released: CUDA error {code}"
            raise WorkerLost(f"{fact}. The next attempt starts a new process")


def pinning_of(device: torch.device) -> Pinning | None:
    """Functions that pin memory for a device; None for a CPU, which needs none."""
    if device.type != "cuda":
        return None
    runtime: Any = torch.cuda.cudart()

    def forget() -> None:  # torch has no call for it, but asks for the runtime's last error at the launch of a kernel
        with contextlib.suppress(torch.AcceleratorError):
            torch.ones(1, device=device)

    return Pinning(
        register=lambda address, count: int(runtime.cudaHostRegister(address, count, 0)),
        unregister=lambda address: int(runtime.cudaHostUnregister(address)),
        forget=forget,
        wait=torch.cuda.synchronize,
    )
