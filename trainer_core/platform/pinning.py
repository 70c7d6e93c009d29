"""Host memory that the device reads and writes directly, of exactly the size that is asked for.

torch's own allocator of pinned memory takes the next power of two.
"""

from typing import Any

import torch


def pin(memory: torch.Tensor) -> None:
    """Lock the pages of contiguous host memory; raises what CUDA says."""
    torch.cuda.check_error(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(address: int) -> None:
    """Undo `pin` of the memory that begins there, before it is given back."""
    torch.cuda.check_error(_runtime().cudaHostUnregister(address))


def _runtime() -> Any:
    return torch.cuda.cudart()
