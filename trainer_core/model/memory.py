"""Release of a trainer's device memory while something else uses the device: parameters, gradients, optimizer state.

Storages are emptied and filled again, and no tensor is replaced: views, as fp32 main weights and `main_grad` are, stay
valid. docs/trainer.md, "Memory", says why Megatron's own functions are not used."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from megatron.core.distributed import DistributedDataParallel

from storage.errors import AccumulationPending
from trainer_core.config import MemoryConfig
from trainer_core.platform.pinning import Pinning, pinning_of

Kind = Literal["parameters", "gradients", "optimizer"]
Tensors = Callable[[], Iterable[torch.Tensor]]

_OFFLOADED = Path("the trainer's offloaded weights and optimizer")  # in messages


class Residence:
    """Place of the three kinds of memory of one rank: at first all are on the device."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], device: torch.device) -> None:
        self._chunks = chunks
        self._parameters, self._optimizer = (_Compartment(pinning_of(device)) for _ in range(2))
        self._gradients_dropped = False
        self._of_optimizer: Tensors = tuple
        self.accumulating = False  # the gradient buffers hold gradients that no update has used yet

    @property
    def has_parameters(self) -> bool:
        return not self._parameters.released

    def serve(self, tensors: Tensors) -> None:
        """Take the optimizer's state from `tensors` from now on, and forget that of an earlier optimizer."""
        self._optimizer.forget()
        self._of_optimizer = tensors

    def release(self, wanted: MemoryConfig) -> int:
        """Free device memory of these kinds; returns the bytes. Nothing may be computing with it. Raises
        AccumulationPending: gradients are to be dropped that no update has used; nothing was freed."""
        if wanted.drop_gradients and self.accumulating:
            fact = "gradients are to be dropped, but they belong to an update that was not taken yet: take it"
            raise AccumulationPending(f"{fact}, or begin another pass, before train.memory.drop_gradients takes effect")
        torch.cuda.synchronize()  # kernels on any stream may still use them
        freed = 0
        if wanted.drop_gradients and not self._gradients_dropped:
            freed += self._drop_gradients()
        if wanted.offload_optimizer and not self._optimizer.released:
            freed += self._optimizer.release(self._optimizer_storages())
        if wanted.offload_parameters and not self._parameters.released:
            freed += self._parameters.release(_storages(self._of_model()).values())
        torch.cuda.empty_cache()
        return freed

    def resume(self, *kinds: Kind) -> None:
        """Bring these kinds, by default all, back to the device; gradients come back as zeros. On return every byte has
        arrived. If the device has no room, the rest remains on the host."""
        if "parameters" in kinds or not kinds:
            self._parameters.resume()
        if "optimizer" in kinds or not kinds:
            self._optimizer.resume()
        if self._gradients_dropped and ("gradients" in kinds or not kinds):
            for chunk in self._chunks:
                chunk.restore_grad_buffers(synchronize=True)
            self._gradients_dropped = False

    def _drop_gradients(self) -> int:
        kinds = ("buffers", "expert_parallel_buffers")  # the wrapper's, not the module's
        buffers = [buffer for chunk in self._chunks for kind in kinds for buffer in vars(chunk)[kind]]
        size = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
        for chunk in self._chunks:
            chunk.offload_grad_buffers(synchronize=True, empty_cache=False)
        self._gradients_dropped = True
        return size

    def _of_model(self) -> Iterable[torch.Tensor]:
        """All parameters, including frozen ones, which are in no buffer."""
        return (parameter.data for chunk in self._chunks for parameter in chunk.module.parameters())

    def _optimizer_storages(self) -> list[torch.UntypedStorage]:
        """Moments, and main weights where they are not the parameters themselves."""
        model = _storages(self._of_model())
        return [own for place, own in _storages(self._of_optimizer()).items() if place not in model]


class _Compartment:
    """Storages that are emptied and filled together, and reusable host memory for their bytes."""

    def __init__(self, pinning: Pinning | None) -> None:
        self._pinning = pinning
        self._host = torch.empty(0, dtype=torch.uint8)
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @property
    def released(self) -> bool:
        return bool(self._away)

    def forget(self) -> None:
        """Drop the offloaded copy."""
        self._away = []

    def release(self, storages: Iterable[torch.UntypedStorage]) -> int:
        found = list(storages)
        sizes = [storage.nbytes() for storage in found]
        parts = self._memory(sum(sizes)).split(sizes)
        for storage, part in zip(found, parts, strict=True):
            part.copy_(_bytes(storage), non_blocking=True)
        torch.cuda.synchronize()  # the copies must have been made before the storages are freed
        for storage in found:
            storage.resize_(0)
        self._away = list(zip(found, parts, strict=True))
        return sum(sizes)

    def resume(self) -> None:
        for storage, part in self._away:
            if not storage.nbytes():
                storage.resize_(part.nbytes)
            _bytes(storage).copy_(part, non_blocking=True)
        if self._away:
            torch.cuda.synchronize()  # the next reader may be on another stream
        self._away = []

    def _memory(self, size: int) -> torch.Tensor:
        """(size,) bytes on the host."""
        if self._host.nbytes < size:
            self._host = torch.empty(0, dtype=torch.uint8)  # the smaller one first goes back
            self._host = torch.empty(size, dtype=torch.uint8)
            # exactly its size: torch's own allocator of pinned memory takes the next power of two
            if self._pinning is not None and self._pinning.pin(self._host, _OFFLOADED):
                weakref.finalize(self._host, self._pinning.unregister, self._host.data_ptr()).atexit = False
        return self._host[:size]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages of tensors, each once, by address; empty ones have none."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """(n,) uint8, the whole content."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
