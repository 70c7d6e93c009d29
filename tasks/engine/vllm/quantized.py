"""FP8 weights of linear layers, and the proof that they were made from the weights of an update.

vLLM makes them, layer by layer, from what its loaders have just filled: here they are made a second time by the plain
formula, and compared bit for bit with what kernels read. Imports torch and vLLM."""

from collections.abc import Callable
from typing import Any, cast

import torch
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

from storage.errors import SyncMismatch
from tasks.engine.vllm.landing import Layers
from tasks.engine.vllm.survey import named_digests
from trainer_core.weights.digest import tensor_digests

LARGEST = 448.0  # number of FP8 (four bits of exponent, three of mantissa)
SMALLEST = 1 / (LARGEST * 512)  # scale, so that a row of zeros has one


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers, (N, K) float8_e4m3fn, of a matrix (N, K), and the scale of each row, (N, 1) float32 > 0, by which
    they are multiplied: the row's largest magnitude becomes 448, and each quotient is rounded to the nearest, ties to
    even. In float32, as `dynamic_per_token_scaled_fp8_quant` of vLLM computes it."""
    largest = weight.abs().amax(dim=1, keepdim=True).float()
    scales = (largest / largest.new_tensor(LARGEST)).clamp(min=SMALLEST)  # by a plain number a card would multiply
    return (weight.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


class Fp8Layers:
    """The FP8 layers of a worker's model in one update."""

    def __init__(self, layers: Layers) -> None:
        self._paths = {layer: path for path, layer in layers.items() if is_fp8(layer)}
        self._expected: dict[str, str] = {}
        self._storage: dict[str, int] = {}

    def begin(self) -> None:
        """Note where kernels read."""
        self._storage = self._live(torch.Tensor.data_ptr)

    def expect(self, layer: torch.nn.Module) -> None:
        """Note what must be made of the weight that the layer's loaders have just filled."""
        if path := self._paths.get(layer):
            numbers, scales = fp8(cast(torch.Tensor, layer.weight))
            self._expected |= zip(_names(path), tensor_digests([numbers, scales]), strict=True)

    def check(self) -> dict[str, str]:
        """Digest of all that kernels read now, by name. Raises SyncMismatch: it is not what the update's weights make,
        or it was moved, so that CUDA graphs would read something else."""
        now = self._live(torch.Tensor.data_ptr)
        if moved := sorted(name for name in now if now[name] != self._storage[name]):
            raise SyncMismatch(f"loading moved {moved[0]}: CUDA graphs would go on reading the old one")
        found = self.held()
        for name, digest in found.items():
            if (wanted := self._expected.get(name)) != digest:
                raise SyncMismatch(
                    f"{name} is not what the weights of the update make: digest {wanted or 'of nothing'} was expected, "
                    f"and {digest} is in the engine's parameters. Sync the weights again"
                )
        return found

    def held(self) -> dict[str, str]:
        """Digest of all that kernels read now, by name."""
        return named_digests(self._live(torch.Tensor.detach))

    def _live[T](self, of: Callable[[torch.Tensor], T]) -> dict[str, T]:
        return {
            name: of(tensor)
            for layer, path in self._paths.items()
            for name, tensor in zip(_names(path), _read_by_kernels(layer), strict=True)
        }


def is_fp8(layer: torch.nn.Module) -> bool:
    """True if vLLM keeps the weight of a linear layer as FP8 numbers, with a scale of each row."""
    return isinstance(vars(layer).get("quant_method"), Fp8PtpcOnlineLinearMethod)


def _names(path: str) -> tuple[str, str]:
    return f"{path}.weight", f"{path}.weight_scale"


def _read_by_kernels(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers (N, K), each row in one piece, and scales (N, 1), without the kernel's padding of rows and columns."""
    known = cast(Any, layer)
    rows, columns = known.output_size_per_partition, known.input_size_per_partition
    return known.weight.t()[:rows, :columns], known.weight_scale[:rows]
