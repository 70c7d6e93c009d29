"""FP8 numbers against a search in float64, and the proof that they are those that kernels read: the checks, which need
vLLM, so that a process that has imported it does them."""

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

from storage.errors import SyncMismatch
from tasks.engine.vllm.landing import loadable_parameters
from tasks.engine.vllm.quantized import Fp8Layers, fp8, is_fp8

ROWS, COLUMNS, NAME = 5, 48, "model.layers.0.mlp.down_proj"


def weight(seed, scale=0.02):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).mul(scale).to(torch.bfloat16)


def rounded(quotients):
    """The nearest FP8 numbers, ties to the even one, by a search through all of them."""
    codes = np.arange(0x7F)  # without NaN, ascending
    exponents, fractions = codes >> 3, (codes & 7) / 8
    table = np.where(exponents == 0, fractions * 2.0**-6, (1 + fractions) * 2.0 ** (exponents - 7.0))
    distances = np.abs(np.abs(quotients)[..., None] - table)
    ties = distances == distances.min(-1, keepdims=True)
    even = ties & (codes % 2 == 0)
    return np.copysign(table[np.where(even.any(-1), even.argmax(-1), ties.argmax(-1))], quotients)


def numbers_and_scales_are_those_of_the_formula(scale):
    matrix = weight(3, scale)
    matrix[1], matrix[2, 5] = 0, 1000 * scale
    matrix[3] = torch.arange(COLUMNS) / 2 * scale  # ties
    numbers, scales = fp8(matrix)
    exact = matrix.double().numpy()
    largest = np.abs(exact).max(1, keepdims=True)
    expected = np.maximum((largest / 448).astype(np.float32), np.float32(1 / 229376))
    assert np.array_equal(scales.numpy(), expected)
    quotients = (exact / expected.astype(np.float64)).astype(np.float32).astype(np.float64)
    assert np.array_equal(numbers.double().numpy(), rounded(quotients))


class Kernel(torch.nn.Module):
    """A linear layer as vLLM's kernels for FP8 read it, with rows and columns that only pad it."""

    def __init__(self):
        super().__init__()
        self.quant_method = Fp8PtpcOnlineLinearMethod.__new__(Fp8PtpcOnlineLinearMethod)
        self.output_size_per_partition, self.input_size_per_partition = ROWS, COLUMNS
        numbers, scales = torch.zeros(16, 64).to(torch.float8_e4m3fn), torch.ones(16, 1)
        self.weight = torch.nn.Parameter(numbers.t(), requires_grad=False)  # (K, N), as kernels take it
        self.weight_scale = torch.nn.Parameter(scales, requires_grad=False)

    def fill(self, matrix, *parts):
        numbers, scales = fp8(matrix)
        if "weight" in parts:
            self.weight.t()[:ROWS, :COLUMNS].copy_(numbers)
        if "weight_scale" in parts:
            self.weight_scale[:ROWS].copy_(scales)


def update(layer, seed, *parts):
    """Load a matrix and make what is read of it, in these parts only."""
    layers = Fp8Layers({NAME: layer, "model.norm": torch.nn.LayerNorm(4)})
    layers.begin()
    matrix, read = weight(seed, 0.01 * seed), layer.weight
    layer.weight = torch.nn.Parameter(matrix, requires_grad=False)  # while it is loaded
    layers.expect(layer)
    layer.weight = read
    layer.fill(matrix, *parts)
    return layers


def what_kernels_read_was_made_from_what_arrived():
    layer = Kernel()
    assert is_fp8(layer)
    first = update(layer, 1, "weight", "weight_scale").check()
    assert first.keys() == {f"{NAME}.weight", f"{NAME}.weight_scale"}
    second = update(layer, 2, "weight", "weight_scale")
    assert second.check() == second.held()
    assert all(first[name] != digest for name, digest in second.held().items())


def a_part_of_the_update_before_is_found(stale):
    layer, both = Kernel(), {"weight", "weight_scale"}
    update(layer, 1, *both).check()
    with pytest.raises(SyncMismatch, match=rf"^{NAME}\.{stale} is not what the weights of the update make"):
        update(layer, 2, *(both - {stale})).check()


def a_layer_that_was_not_made_again_is_found():
    layers = Fp8Layers({NAME: Kernel()})
    layers.begin()
    with pytest.raises(SyncMismatch, match=r"digest of nothing was expected"):
        layers.check()


def what_was_moved_is_refused_because_of_cuda_graphs():
    layer = Kernel()
    layers = update(layer, 1, "weight", "weight_scale")
    layer.weight_scale.data = layer.weight_scale.data.clone()
    with pytest.raises(SyncMismatch, match=rf"loading moved {NAME}\.weight_scale"):
        layers.check()


def no_checkpoint_has_the_scales():
    assert loadable_parameters(Kernel()).keys() == {"weight"}
