"""Models with experts and multi-latent attention: the numbers of transformers, on every layout."""

import numpy as np
import pytest

from tests.trainer_core.model.test_layouts import TEMPERATURE, configuration, import_score_step
from tests.trainer_core.models import (
    FAMILIES,
    hugging_face_logprobs,
    make_family,
    random_samples,
    random_sequences,
    read_export,
)
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import ExpertsConfig, ParallelConfig

SINGLE = "single"
LAYOUTS = {
    SINGLE: ParallelConfig(),
    "pp2": ParallelConfig(pipeline=2),
    "tp2-sp": ParallelConfig(tensor=2, sequence=True),
    "dp2-ep2": ParallelConfig(data=2, expert=2),
    "tp2-sp-ep2-etp1": ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=1),
    "tp2-sp-dp2-ep2": ParallelConfig(tensor=2, sequence=True, data=2, expert=2),
    "pp2-vpp2-dp2-ep2": ParallelConfig(pipeline=2, virtual_pipeline=2, data=2, expert=2),
    "tp2-sp-pp2": ParallelConfig(tensor=2, sequence=True, pipeline=2),
}
QUICK = {("qwen3-moe", SINGLE), ("qwen3-moe", "dp2-ep2"), ("deepseek-v3", SINGLE), ("deepseek-v3", "tp2-sp")}
CASES = [
    pytest.param(family, layout, marks=[] if (family, layout) in QUICK else [pytest.mark.slow])
    for family in FAMILIES
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Hugging Face directories by family, each made once."""
    made = {}

    def folder(family):
        if family not in made:
            made[family] = str(tmp_path_factory.mktemp(family))
            run_ranks(1, make_family, made[family], family)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def walks(folders, tmp_path_factory):
    """Results of `import_score_step` by family and layout, each computed once."""
    done = {}

    def walk(family, layout):
        if (family, layout) not in done:
            folder = str(tmp_path_factory.mktemp("walk"))
            experts = ExpertsConfig(bias_update_rate=0.01 if "deepseek" in family else 0.0)
            given = configuration(LAYOUTS[layout]).model_copy(update={"experts": experts})
            found = run_trainers(folders(family), given, import_score_step, folder)
            exports = {name: read_export(f"{folder}/{name}") for name in ("imported", "stepped")}
            done[family, layout] = {"ranks": found, **exports}
        return done[family, layout]

    return walk


@pytest.fixture(scope="module")
def expected(folders):
    """Log-probabilities by transformers, by family."""
    made = {}

    def logprobs(family):
        if family not in made:
            made[family] = run_ranks(1, hugging_face_logprobs, folders(family), random_sequences(), TEMPERATURE)[0]
        return made[family]

    return logprobs


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logprobs_equal_those_of_transformers(walks, expected, family, layout):
    for rank in walks(family, layout)["ranks"]:
        for ours, theirs in zip(rank["logprobs"], expected(family), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_an_import_is_exported_bit_for_bit(walks, folders, family, layout):
    given, exported = read_export(folders(family)), walks(family, layout)["imported"]
    assert given.keys() == exported.keys()
    assert all(given[name].dtype == exported[name].dtype for name in given)
    assert all(np.array_equal(given[name], exported[name]) for name in given)


@pytest.mark.parametrize(("family", "layout"), [case for case in CASES if case.values[1] != SINGLE])
def test_a_step_is_that_of_one_rank(walks, family, layout):
    given, one, other = walks(family, SINGLE)["imported"], walks(family, SINGLE), walks(family, layout)
    for name, before in given.items():
        moved = np.abs(one["stepped"][name] - before).max()
        assert moved > 0 or "experts" in name, name  # no token chose that expert
        assert np.abs(one["stepped"][name] - other["stepped"][name]).max() <= 2e-5 * moved + 1e-7, name
    assert other["ranks"][0]["metrics"]["grad_norm"] == pytest.approx(one["ranks"][0]["metrics"]["grad_norm"], rel=1e-5)


def test_experts_on_tensor_ranks_need_the_positions_divided(folders):
    with pytest.raises(AssertionError, match=r"train\.parallel\.sequence"):
        run_trainers(folders("qwen3-moe"), configuration(ParallelConfig(tensor=2)), import_score_step, "unused")


@pytest.mark.parametrize(
    ("given", "fact"),
    [({"sequence": True}, "tensor is 1"), ({"data": 2, "expert": 4}, "2 ranks"), ({"expert_tensor": 2}, "1 ranks")],
)
def test_divisions_that_the_ranks_cannot_have(given, fact):
    with pytest.raises(ValueError, match=fact):
        ParallelConfig(**given)


def train_on_few(trainer, samples):
    trainer.import_model()
    return trainer.train_policy(samples, TEMPERATURE)


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_a_rank_without_samples_does_not_spoil_the_auxiliary_loss(folders, family):
    given = configuration(ParallelConfig(data=2), micro_batch_size=1)
    given = given.model_copy(update={"experts": ExpertsConfig(auxiliary_loss=0.1)})
    found = run_trainers(folders(family), given, train_on_few, random_samples(groups=1, per_group=6))
    assert all(0 < metrics["grad_norm"] < float("inf") for metrics in found)
