"""The families of models: the numbers of transformers and of one rank, on every layout of the matrix."""

import dataclasses

import numpy as np
import pytest

from tests.trainer_core.model.matrix import (
    DAILY,
    DENSE,
    EXPERTS,
    MATRIX,
    MOST,
    QUICK,
    SINGLE,
    fitting,
    layers,
    pairs,
    settings,
)
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
from trainer_core.batches.flat import flatten
from trainer_core.batches.micro_batching import BatchLimits, share
from trainer_core.config import ExpertsConfig, ParallelConfig


def marks(family, layout):
    if (family, layout) in QUICK:
        return []
    return [pytest.mark.slow if (family, layout) in DAILY else pytest.mark.full]


CASES = [
    pytest.param(family, layout, marks=marks(family, layout))
    for family, layouts in MATRIX.items()
    for layout in layouts
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Hugging Face directories by family and number of layers, each made once."""
    made = {}

    def folder(family, number=4):
        if (family, number) not in made:
            made[family, number] = str(tmp_path_factory.mktemp(f"{family}-{number}"))
            run_ranks(1, make_family, made[family, number], family, number)
        return made[family, number]

    return folder


@pytest.fixture(scope="module")
def walks(folders, tmp_path_factory):
    """Results of `import_score_step` by family, layout and number of layers, each computed once."""
    done = {}

    def walk(family, parallel, number):
        key = family, str(parallel), number
        if key not in done:
            folder = str(tmp_path_factory.mktemp("walk"))
            experts = ExpertsConfig(bias_update_rate=0.01 if "deepseek" in family else 0.0)
            given = configuration(parallel).model_copy(update={"experts": experts})
            found = run_trainers(folders(family, number), given, import_score_step, folder)
            exports = {name: read_export(f"{folder}/{name}") for name in ("imported", "stepped")}
            done[key] = {"ranks": found, **exports}
        return done[key]

    return walk


@pytest.fixture(scope="module")
def expected(folders):
    """Log-probabilities by transformers, by family and number of layers."""
    made = {}

    def logprobs(family, number):
        if (family, number) not in made:
            given = folders(family, number), random_sequences(), TEMPERATURE
            made[family, number] = run_ranks(1, hugging_face_logprobs, *given)[0]
        return made[family, number]

    return logprobs


def test_every_family_is_in_the_matrix():
    assert FAMILIES.keys() == MATRIX.keys()
    assert all(len(layouts) <= MOST for layouts in MATRIX.values())
    assert MATRIX["qwen3"].keys() == DENSE.keys()
    assert MATRIX["qwen3-moe"].keys() == MATRIX["deepseek-v3"].keys() == EXPERTS.keys()
    of_llama, of_dense = (set().union(*map(settings, MATRIX[family].values())) for family in ("llama", "qwen3"))
    assert of_llama == of_dense


@pytest.mark.parametrize(("layouts", "experts"), [(DENSE, False), (EXPERTS, True)], ids=["dense", "experts"])
def test_every_two_settings_that_fit_meet_in_a_layout(layouts, experts):
    wanted = pairs(fitting(experts))
    assert len(wanted) == (36 if experts else 21)  # all of those with experts, and without EP and ETP
    assert pairs(ParallelConfig(**given) for given in layouts.values()) >= wanted
    families = {"qwen3-moe", "deepseek-v3"} if experts else {"qwen3"}
    daily = [MATRIX[family][layout] for family, layout in DAILY if family in families]
    assert pairs(iter(daily)) >= wanted


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_layout_computes_what_transformers_and_one_rank_do(walks, folders, expected, family, layout):
    """Log-probabilities, an import that is exported bit for bit, loss, entropy, gradient norm, and one update."""
    parallel = MATRIX[family][layout]
    number = layers(parallel)
    one, other = walks(family, ParallelConfig(), number), walks(family, parallel, number)
    for rank in other["ranks"]:
        for ours, theirs in zip(rank["logprobs"], expected(family, number), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6)
    assert_equal_tensors(read_export(folders(family, number)), other["imported"])
    for name in ("loss", "entropy", "grad_norm"):
        assert other["ranks"][0]["metrics"][name] == pytest.approx(one["ranks"][0]["metrics"][name], rel=1e-5), name
    assert_same_step(one, other)


def assert_equal_tensors(given, exported):
    assert given.keys() == exported.keys()
    assert all(given[name].dtype == exported[name].dtype for name in given)
    assert all(np.array_equal(given[name], exported[name]) for name in given)


def assert_same_step(one, other):
    for name, before in one["imported"].items():
        moved = np.abs(one["stepped"][name] - before).max()
        assert moved > 0 or "experts" in name, name  # no token chose that expert
        rounding = np.spacing(np.abs(before).max())
        assert np.abs(one["stepped"][name] - other["stepped"][name]).max() <= 1e-5 * moved + rounding, name


def test_experts_on_tensor_ranks_need_the_positions_divided(folders):
    with pytest.raises(AssertionError, match=r"train\.parallel\.sequence"):
        run_trainers(folders("qwen3-moe"), configuration(ParallelConfig(tensor=2)), import_score_step, "unused")


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"sequence": True}, "tensor is 1"),
        ({"data": 2, "expert": 4}, "2 ranks"),
        ({"context": 2, "expert": 4}, "2 ranks"),
        ({"expert_tensor": 2}, "1 ranks"),
        ({"layers_first_stage": 2}, "at least 2 ranks"),
        ({"layers_last_stage": 2}, "at least 2 ranks"),
    ],
)
def test_divisions_that_the_ranks_cannot_have(given, fact):
    with pytest.raises(ValueError, match=fact):
        ParallelConfig(**given)


def train_on_few(trainer, samples):
    trainer.import_model()
    return trainer.train_policy(samples, TEMPERATURE)


def counted_by_routers(trainer, samples):
    """Choices of experts that this rank's routers have counted in a pass, by layer."""
    from megatron.core.transformer.moe.router import TopKRouter

    trainer.import_model()
    model, found = trainer._model, []
    modules = [module for chunk in model.modules for module in chunk.modules()]
    finalize = model.config.finalize_model_grads_func

    def looked_at(*args, **kwargs):  # begins a new count
        found.append([int(one.local_tokens_per_expert.sum()) for one in modules if isinstance(one, TopKRouter)])
        finalize(*args, **kwargs)

    model.config.finalize_model_grads_func = looked_at
    trainer.train_policy(samples, TEMPERATURE)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [SINGLE, "tp2-sp", *(pytest.param(one, marks=pytest.mark.full) for one in ("cp2", "cp4")), "cp2-dp2-ep4"],
)
def test_routers_count_what_belongs_to_samples_and_nothing_else(folders, layout):
    given = configuration(MATRIX["deepseek-v3"][layout], micro_batch_size=1)
    given = given.model_copy(update={"experts": ExpertsConfig(bias_update_rate=0.01)})
    samples, chosen = random_samples(), 2
    counts = np.array(run_trainers(folders("deepseek-v3"), given, counted_by_routers, samples))  # (ranks, layers)
    assert counts.shape[1] == 3
    assert (counts.sum(0) == chosen * samples.positions[samples.usable].sum()).all()


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3-moe", SINGLE),
        pytest.param("qwen3-moe", "cp2-ep2", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "tp2-sp-cp2-ep2-etp1", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "pp2-vpp2-cp2-ep2", marks=pytest.mark.slow),
    ],
)
def test_without_advantages_routers_have_no_gradient(folders, family, layout):
    samples = random_samples()
    equal = dataclasses.replace(samples, rewards=np.ones_like(samples.rewards))
    experts = ExpertsConfig(bias_update_rate=0.01 if "deepseek" in family else 0.0)
    given = configuration(MATRIX[family][layout]).model_copy(update={"experts": experts})
    found = run_trainers(folders(family), given, train_on_few, equal)
    assert all(metrics["grad_norm"] == 0 for metrics in found)


def test_micro_batches_of_the_walks_differ_in_width():
    """Stages of a pipeline tell each other the width of the next one, with virtual stages too."""
    samples, given = random_samples(), configuration(ParallelConfig())
    limits = BatchLimits(given.micro_batch_tokens, given.micro_batch_size)
    (rounds,) = share(samples.positions, np.flatnonzero(samples.usable), 1, limits)
    assert len({len(flatten(samples, rows).tokens) for rows in rounds}) > 1


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("deepseek-v3", ParallelConfig(data=2)),
        pytest.param("qwen3-moe", ParallelConfig(context=2, data=2), marks=pytest.mark.slow),
        pytest.param("qwen3-moe", ParallelConfig(data=2), marks=pytest.mark.slow),
        pytest.param("deepseek-v3", ParallelConfig(context=2, data=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_without_samples_does_not_spoil_the_auxiliary_loss(folders, family, parallel):
    given = configuration(parallel, micro_batch_size=1)
    given = given.model_copy(update={"experts": ExpertsConfig(auxiliary_loss=0.1)})
    found = run_trainers(folders(family), given, train_on_few, random_samples(groups=1, per_group=6))
    assert all(0 < metrics["grad_norm"] < float("inf") for metrics in found)
