"""The random generators of one rank as plain text, beside the tensors of a state."""

from typing import Any

import numpy as np
import torch

from trainer_core.model import rng


def captured() -> dict[str, Any]:
    """The generators of this rank, in plain JSON types; bytes are hexadecimal."""
    state = rng.capture()
    version, words, normal = state["random"]
    name, key, *numbers = state["numpy"]
    return {
        "random": [version, list(words), normal],
        "numpy": [name, np.asarray(key, "<u4").tobytes().hex(), *numbers],
        "torch": _hex(state["torch"]),
        "device": _hex(state["device"]),
        "tensor_parallel": {name: _hex(own) for name, own in sorted(state["tensor_parallel"].items())},
    }


def restore(state: dict[str, Any]) -> None:
    """Restore what `captured` returned, on this rank."""
    version, words, normal = state["random"]
    name, key, *numbers = state["numpy"]
    rng.restore(
        {
            "random": (version, tuple(words), normal),
            "numpy": (name, np.frombuffer(bytes.fromhex(key), "<u4").astype(np.uint32), *numbers),
            "torch": _tensor(state["torch"]),
            "device": _tensor(state["device"]),
            "tensor_parallel": {name: _tensor(own) for name, own in state["tensor_parallel"].items()},
        }
    )


def _hex(octets: torch.Tensor) -> str:
    return octets.cpu().numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
