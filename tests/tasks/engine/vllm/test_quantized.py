"""FP8 numbers against a search in float64, and the proof that they are those that kernels read."""

import pytest

from tests.tasks.engine_process import engine_process

CHECKS = [
    *(("numbers_and_scales_are_those_of_the_formula", scale) for scale in (1e-30, 1e-6, 0.02, 1.0, 1e30)),
    ("what_kernels_read_was_made_from_what_arrived",),
    *(("a_part_of_the_update_before_is_found", stale) for stale in ("weight", "weight_scale")),
    ("a_layer_that_was_not_made_again_is_found",),
    ("what_was_moved_is_refused_because_of_cuda_graphs",),
    ("no_checkpoint_has_the_scales",),
]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    with engine_process(tmp_path_factory) as process:
        yield process.Quantized()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: "-".join(map(str, check)))
def test_of_quantized_layers(quantized, check):
    quantized.do(*check)
