"""Routing replay: random experts are given to every position, and every layout computes with them and nothing else."""

import dataclasses
import functools

import numpy as np
import pytest

from storage.errors import InputError
from tests.trainer_core.model.matrix import MATRIX, SINGLE
from tests.trainer_core.model.test_layouts import TEMPERATURE, configuration, largest_difference
from tests.trainer_core.models import FAMILIES, make_family, random_samples, read_export
from tests.trainer_core.oracle import export
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.batches.routes import Routing
from trainer_core.config import ExpertsConfig, MegatronConfig

EXPERTS, CHOSEN = 4, 2
WITH_EXPERTS = {"qwen3-moe": 4, "deepseek-v3": 3}  # layers
ROUTINGS = {family: Routing(EXPERTS, layers, CHOSEN) for family, layers in WITH_EXPERTS.items()}


def routed_samples(family):
    """Samples whose positions have experts that no router would choose, because they are drawn."""
    samples, layers = random_samples(turns=True), WITH_EXPERTS[family]
    drawn = np.random.default_rng(7).random((samples.positions.sum(), layers, EXPERTS)).argsort(-1)[..., :CHOSEN]
    return dataclasses.replace(samples, routes=drawn.reshape(len(drawn), -1).astype(np.uint8))


def score_and_step(trainer, samples, folder):
    trainer.import_model()
    scores = trainer._passes.score(samples, np.flatnonzero(samples.usable), TEMPERATURE)
    metrics = trainer.train_policy(samples, TEMPERATURE)
    export(trainer, folder)
    return scores.logprobs, metrics


def forced(rank, world_size, store, directory, samples, layers):
    """Log-probabilities by transformers, whose routers are made to choose what is given."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()
    gates = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    starts, given = np.cumsum(samples.lengths) - samples.lengths, {}

    def choose(gate, _, output):
        logits, chosen = output[0].float(), given[gate]
        scores = (logits.sigmoid() if hasattr(gate, "e_score_correction_bias") else logits.softmax(-1)).gather(
            1, chosen
        )
        return output[0], scores / scores.sum(-1, keepdim=True) * getattr(gate, "routed_scaling_factor", 1.0), chosen

    for gate in gates:
        gate.register_forward_hook(choose)
    found, first = [], 0
    for row, start in enumerate(starts):
        tokens = torch.from_numpy(samples.tokens[start : start + samples.lengths[row]].astype(np.int64))
        routes = samples.routes[first : first + len(tokens) - 1].reshape(len(tokens) - 1, layers, CHOSEN)
        given |= {gate: torch.from_numpy(routes[:, place].astype(np.int64)) for place, gate in enumerate(gates)}
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0] / TEMPERATURE
        own = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()
        count, before = samples.response_lengths[row], int(samples.response_lengths[:row].sum())
        gaps = samples.gaps[before : before + count]
        found.append(own[samples.prompt_lengths[row] + np.cumsum(gaps + 1) - 2] * samples.usable[row])
        first += len(tokens) - 1
    return np.concatenate(found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    @functools.cache
    def folder(family):
        made = str(tmp_path_factory.mktemp(family))
        run_ranks(1, make_family, made, family)
        return made

    return folder


@pytest.fixture(scope="module")
def steps(folders, tmp_path_factory):
    """Log-probabilities, metrics and stepped weights by family, layout and recomputation, each computed once."""
    done = {}

    def step(family, layout, recompute="none"):
        if (family, layout, recompute) not in done:
            folder = str(tmp_path_factory.mktemp("stepped"))
            given = configuration(MATRIX[family][layout], micro_batch_size=2).model_copy(
                update={
                    "experts": ExpertsConfig(replay=True, bias_update_rate=0.01 if "deepseek" in family else 0.0),
                    "megatron": MegatronConfig(recompute=recompute),
                }
            )
            ranks = run_trainers(folders(family), given, score_and_step, routed_samples(family), folder)
            done[family, layout, recompute] = ranks, read_export(folder)
        return done[family, layout, recompute]

    return step


@pytest.mark.parametrize("family", [pytest.param("qwen3-moe", marks=pytest.mark.slow), "deepseek-v3"])
def test_the_model_computes_with_the_given_experts(folders, steps, family):
    assert FAMILIES[family][1]["num_experts_per_tok"] == CHOSEN
    ((logprobs, _),), _ = steps(family, SINGLE)
    samples = routed_samples(family)
    (expected,) = run_ranks(1, forced, folders(family), samples, WITH_EXPERTS[family])
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)


FOUR_RANKS = pytest.mark.full
CASES = [
    pytest.param("qwen3-moe", SINGLE, "layers", marks=pytest.mark.slow),
    pytest.param("qwen3-moe", "pp2", "layers", marks=pytest.mark.slow),
    ("deepseek-v3", "pp2", "layers"),
    ("deepseek-v3", "tp2-sp", "none"),
    pytest.param("deepseek-v3", "cp2-ep2", "none", marks=pytest.mark.slow),
    *(
        pytest.param(family, layout, recompute, marks=FOUR_RANKS)
        for family in WITH_EXPERTS
        for layout, recompute in (
            ("pp2-vpp2-dp2-ep2", "layers"),
            ("dp2-ep2", "attention"),
            ("tp2-sp-cp2-ep2-etp1", "layers"),
            ("pp2-vpp2-cp2-ep2", "layers"),
            ("tp2-sp-uneven-ep2-etp1", "none"),
            ("cp2-dp2-ep4", "none"),
        )
    ),
]


@pytest.mark.parametrize(("family", "layout", "recompute"), CASES)
def test_no_layout_changes_the_result(steps, family, layout, recompute):
    (reference, *_), expected = steps(family, SINGLE)
    ranks, stepped = steps(family, layout, recompute)
    assert largest_difference(stepped, expected) < 5e-6
    for logprobs, metrics in ranks:
        np.testing.assert_allclose(logprobs, reference[0], rtol=0, atol=1e-5)
        assert metrics == pytest.approx(reference[1], abs=1e-4, rel=1e-4)


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        (lambda routes: None, "the samples have no routes"),
        (lambda routes: routes[:, :-2], "have 6 bytes, and those of the model 8: 4 layers with 2 of 4 experts"),
        (lambda routes: routes + 1, "name expert 4, and the model has 4"),
    ],
)
def test_routes_of_another_model_are_refused(changed, fact):
    with pytest.raises(InputError, match=fact):
        ROUTINGS["qwen3-moe"].check(changed(routed_samples("qwen3-moe").routes))
    ROUTINGS["qwen3-moe"].check(routed_samples("qwen3-moe").routes)


def test_from_257_experts_on_they_have_two_bytes():
    routing = Routing(300, 2, 1)
    routes = np.array([[299, 256]], "<u2").view(np.uint8)
    routing.check(routes)
    with pytest.raises(InputError, match="have 2 bytes"):
        routing.check(routes[:, :2])
