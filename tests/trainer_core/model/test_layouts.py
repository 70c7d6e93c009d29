"""One model, several layouts: the same numbers. It shares its embedding with the output layer; others: the families."""

import numpy as np
import pytest

from tests.trainer_core.models import hugging_face_logprobs, random_samples, random_sequences, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import OptimizerConfig, ParallelConfig, PolicyConfig, TrainerConfig

SINGLE = ParallelConfig()
LAYOUTS = {
    "pp2": ParallelConfig(pipeline=2),
    "tp2": ParallelConfig(tensor=2),
    "dp2": ParallelConfig(data=2),
    "tp2-pp2": ParallelConfig(tensor=2, pipeline=2),
    "pp2-vpp2": ParallelConfig(pipeline=2, virtual_pipeline=2),
    "tp2-sp": ParallelConfig(tensor=2, sequence=True),
    "cp2": ParallelConfig(context=2),
    "uneven": ParallelConfig(pipeline=2, layers_last_stage=1),
}
# without moments and with a large eps the weights move by about lr * gradient / eps, so that they show the gradient
PLAIN_GRADIENT = OptimizerConfig(learning_rate=1.0, beta1=0.0, beta2=0.0, eps=1.0, clip_grad=0.0)
TEMPERATURE = 0.7
LATER = {"pp2", "tp2", "uneven", "tp2-pp2"}  # quick rows divide layers and matrices too: `pp2-vpp2`, `tp2-sp`
ROWS = [pytest.param(name, marks=[pytest.mark.slow] if name in LATER else []) for name in LAYOUTS]


def configuration(parallel, micro_batch_size=4, micro_batch_tokens=8192, **policy):
    return TrainerConfig(
        parallel=parallel,
        optimizer=PLAIN_GRADIENT,
        policy=PolicyConfig(**policy),
        micro_batch_size=micro_batch_size,
        micro_batch_tokens=micro_batch_tokens,
        max_length=64,
    )


def import_score_step(trainer, folder):
    """Compute everything that the tests below compare."""
    trainer.import_model()
    logprobs = trainer.logprobs(random_sequences(), TEMPERATURE)
    records = export(trainer, f"{folder}/imported")
    metrics = trainer.train_policy(random_samples(), TEMPERATURE)
    export(trainer, f"{folder}/stepped")
    return {"logprobs": logprobs, "records": records, "metrics": metrics, "before": trainer.policy_logprobs()}


@pytest.fixture(scope="module")
def walks(model_dirs, tmp_path_factory):
    """Results of `import_score_step` by layout and kind of model, each computed once."""
    done = {}

    def walk(parallel, tied=True, **settings):
        key = (str(parallel), tied, *settings.items())
        if key not in done:
            folder = str(tmp_path_factory.mktemp("walk"))
            ranks = run_trainers(model_dirs[tied], configuration(parallel, **settings), import_score_step, folder)
            done[key] = {
                "ranks": ranks,
                "imported": read_export(f"{folder}/imported"),
                "stepped": read_export(f"{folder}/stepped"),
            }
        return done[key]

    return walk


@pytest.fixture(scope="module")
def expected_logprobs(model_dirs):
    return {
        tied: run_ranks(1, hugging_face_logprobs, directory, random_sequences(), TEMPERATURE)[0]
        for tied, directory in model_dirs.items()
    }


def largest_difference(left, right):
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True], ids=["tied"])  # the other kind: `test_families.py`, as exactly
@pytest.mark.parametrize("layout", ["single", *LAYOUTS])
def test_logprobs_equal_those_of_transformers(walks, expected_logprobs, layout, tied):
    for rank in walks(LAYOUTS.get(layout, SINGLE), tied)["ranks"]:
        for found, expected in zip(rank["logprobs"], expected_logprobs[tied], strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True], ids=["tied"])  # the other kind: `test_families.py`, as exactly
@pytest.mark.parametrize("layout", ["single", *ROWS])
def test_export_after_import_is_bitwise_the_model(walks, model_dirs, layout, tied):
    exported, original = walks(LAYOUTS.get(layout, SINGLE), tied)["imported"], read_export(model_dirs[tied])
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert exported[name].dtype == tensor.dtype
        assert np.array_equal(exported[name], tensor), name


@pytest.mark.parametrize("tied", [True], ids=["tied"])  # the other kind: `test_families.py`, as exactly
@pytest.mark.parametrize("layout", ROWS)
def test_the_gradient_does_not_depend_on_the_layout(walks, layout, tied):
    reference, other = walks(SINGLE, tied), walks(LAYOUTS[layout], tied)
    assert largest_difference(reference["stepped"], reference["imported"]) > 1e-2
    assert largest_difference(other["stepped"], reference["stepped"]) < 5e-6
    for rank in other["ranks"]:
        assert rank["metrics"] == pytest.approx(reference["ranks"][0]["metrics"], abs=1e-4, rel=1e-4)
    first, *others = (rank["before"] for rank in other["ranks"])
    np.testing.assert_allclose(first, reference["ranks"][0]["before"], rtol=0, atol=1e-5)
    assert not any(len(one) for one in others)
    apart = np.abs(random_samples().engine_logprobs - first)
    assert np.nanmax(apart) == pytest.approx(other["ranks"][0]["metrics"]["engine_logprob_diff_max"])


ONE, ALL, FEW_TOKENS, ONE_TOKEN = (
    {"micro_batch_size": 1}, {"micro_batch_size": None}, {"micro_batch_tokens": 25}, {"micro_batch_tokens": 1},
)  # fmt: skip
DAILY = [*(("single", limits) for limits in (ONE, ALL, FEW_TOKENS, ONE_TOKEN)), ("dp2", ONE), ("cp2", FEW_TOKENS)]
"""Divisions of a batch in CI; `test_objectives.py` divides it on more layouts."""
BY_HAND = [("dp2", ALL), ("dp2", FEW_TOKENS), ("dp2", ONE_TOKEN), ("cp2", ONE), ("cp2", ALL), ("cp2", ONE_TOKEN)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "limits"), [*DAILY, *(pytest.param(*one, marks=pytest.mark.full) for one in BY_HAND)]
)
def test_the_gradient_does_not_depend_on_the_micro_batches(walks, layout, limits):
    reference, other = walks(SINGLE), walks(LAYOUTS.get(layout, SINGLE), **limits)
    assert largest_difference(other["stepped"], reference["stepped"]) < 5e-6


@pytest.mark.parametrize("aggregation", [pytest.param("sequence", marks=pytest.mark.slow), "group"])
def test_a_normalised_loss_is_the_same_however_it_is_divided(walks, aggregation):
    """15 sequences over two replicas: one of them gets an empty micro-batch."""
    reference = walks(SINGLE, loss_aggregation=aggregation)
    other = walks(LAYOUTS["dp2"], loss_aggregation=aggregation, micro_batch_size=1)
    assert largest_difference(other["stepped"], reference["stepped"]) < 5e-6
    assert largest_difference(walks(SINGLE)["stepped"], reference["stepped"]) > 1e-4


@pytest.mark.parametrize("layout", ["cp2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("pp2", "dp2"))])
def test_sequence_means_do_not_depend_on_the_layout(walks, layout):
    settings = {"loss_aggregation": "sequence", "micro_batch_size": 3, "entropy_coefficient": 0.1}
    reference, other = walks(SINGLE, **settings), walks(LAYOUTS[layout], **settings)
    assert largest_difference(other["stepped"], reference["stepped"]) < 5e-6
    assert largest_difference(reference["stepped"], walks(SINGLE)["stepped"]) > 1e-4


@pytest.mark.parametrize("layout", ["single", "tp2-sp", pytest.param("tp2-pp2", marks=pytest.mark.slow)])
def test_rank_0_records_what_it_wrote(walks, layout):
    walk = walks(LAYOUTS.get(layout, SINGLE))
    first, *others = [rank["records"] for rank in walk["ranks"]]
    assert {record.name: record.shape for record in first} == {
        name: tensor.shape for name, tensor in walk["imported"].items()
    }
    assert all(records == [] for records in others)
