"""Random generators of one rank: seeding, capturing, restoring."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

_STAGE_STRIDE = 100  # Megatron's distance between the seeds of pipeline stages (megatron.training initialize.py)


def seed_rank(seed: int) -> None:
    """Seed every generator of this rank: equal over data-parallel ranks, different over pipeline stages."""
    own = seed + _STAGE_STRIDE * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own, force_reset_rng=True)


def capture() -> dict[str, Any]:
    """State of every generator of this rank, in plain JSON types; bytes are hexadecimal."""
    version, words, normal = random.getstate()
    name, key, *numbers = cast(tuple[Any, ...], np.random.get_state())
    return {
        "random": [version, list(words), normal],
        "numpy": [name, np.asarray(key, "<u4").tobytes().hex(), *numbers],
        "torch": _hex(torch.get_rng_state()),
        "device": _hex(torch.cuda.get_rng_state()),
        "tensor_parallel": {name: _hex(own) for name, own in sorted(_tracker().get_states().items())},
    }


def restore(state: dict[str, Any]) -> None:
    """Restore a state that `capture` returned on this rank."""
    version, words, normal = state["random"]
    name, key, *numbers = state["numpy"]
    random.setstate((version, tuple(words), normal))
    np.random.set_state((name, np.frombuffer(bytes.fromhex(key), "<u4").astype(np.uint32), *numbers))
    torch.set_rng_state(_tensor(state["torch"]))
    torch.cuda.set_rng_state(_tensor(state["device"]))
    _tracker().set_states({name: _tensor(own) for name, own in state["tensor_parallel"].items()})


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore every generator after the block: inspecting a state must not change the training. Attention kernels draw
    from the device's generator even without dropout."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def _tracker() -> CudaRNGStatesTracker:
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())


def _hex(octets: torch.Tensor) -> str:
    return octets.cpu().numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
