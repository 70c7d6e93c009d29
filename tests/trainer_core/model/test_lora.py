"""LoRA against adapters written by hand on transformers' model, over layouts, states, syncs and references."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.trainer_core.model.matrix import MATRIX, SINGLE
from tests.trainer_core.models import make_family, random_samples
from tests.trainer_core.phases.plain import responses_of
from tests.trainer_core.ranks import run_ranks, run_trainers
from tests.trainer_core.weights.syncing import sync
from trainer_core.config import MegatronConfig, OptimizerConfig, PolicyConfig, TrainerConfig
from trainer_core.lora import LoraConfig
from trainer_core.state.facts import read_facts

TEMPERATURE, UPDATES, RATE, EPS, RANK, ALPHA = 0.7, 3, 5e-3, 1e-3, 3, 12.0
OPTIMIZER = OptimizerConfig(learning_rate=RATE, eps=EPS, beta1=0.8, beta2=0.9, clip_grad=0.0)
KL = 0.3
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "shared_experts.up_proj")
TARGETS = {
    "qwen3": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3-moe": ("q_proj", "k_proj", "o_proj"),
    "deepseek-v3": LATENT,
}
LAYOUTS = [
    pytest.param("qwen3", "tp2", marks=pytest.mark.slow),
    pytest.param("qwen3", "tp2-sp-uneven", marks=pytest.mark.slow),
    pytest.param("qwen3", "cp2-dp2", marks=pytest.mark.slow),
    pytest.param("qwen3", "tp2-sp-pp2-vpp2", marks=pytest.mark.full),
    pytest.param("qwen3-moe", "dp2-ep2", marks=pytest.mark.slow),
    pytest.param("qwen3-moe", "tp2-sp-pp2", marks=pytest.mark.full),
    pytest.param("deepseek-v3", "tp2-sp", marks=pytest.mark.slow),
    pytest.param("deepseek-v3", "uneven-cp2-ep2", marks=pytest.mark.full),
]


def settings(family, layout=SINGLE, **more):
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=TARGETS[family])
    given = {"parallel": MATRIX[family][layout], "optimizer": OPTIMIZER, "policy": PolicyConfig(kl_coefficient=KL)}
    return TrainerConfig(**given, lora=lora, max_length=64, micro_batch_size=4, **more)


def train(trainer, folder):
    """Three updates with the base as reference."""
    trainer.import_model()
    trainer.save(f"{folder}/first")
    before = sync(trainer, folder, 1)["received"]
    trainer.load_reference(f"{folder}/first", "the base")
    reports = [trainer.train_policy(random_samples(update), TEMPERATURE, True) for update in range(UPDATES)]
    return {"reports": reports, "before": before, **saved(trainer, f"{folder}/last")}


def saved(trainer, folder):
    identity = trainer.save(folder).identity
    apart = {form: sync(trainer, folder, version, form=form) for version, form in ((3, "base"), (4, "adapter"))}
    bases = {one["plan"].base for one in apart.values() if one["plan"] is not None}
    received = {form: one["received"] for form, one in apart.items()}
    synced = sync(trainer, folder, 2)["received"]
    return {"identity": identity, "synced": synced, "apart": received, "bases": bases}


def go_on(trainer, folder, moved):
    """A trainer that holds nothing sends the state, and then goes on from it."""
    stored = sync(trainer, moved, 1, stored=f"{folder}/last")["received"]
    identity = trainer.load(f"{folder}/last").identity
    return {"stored": stored, "loaded": identity, **saved(trainer, moved)}


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """Folder of the model, folder of the walk and its results, by family and layout."""
    done, models = {}, {}

    def walk(family, layout=SINGLE):
        if family not in models:
            models[family] = str(tmp_path_factory.mktemp(family))
            run_ranks(1, make_family, models[family], family)
        if (family, layout) not in done:
            folder = str(tmp_path_factory.mktemp("walk"))
            done[family, layout] = folder, run_trainers(models[family], settings(family, layout), train, folder)[0]
        return models[family], *done[family, layout]

    return walk


def adapters_of(folder):
    """Factors of a saved state, by names of transformers."""
    from trainer_core.state.files import Region, SavedState

    state, found = SavedState(Path(folder)), {}
    for stored, tensor in state.tensors.items():
        name = stored.rpartition(".")[2]
        if not stored.startswith("optimizer."):
            whole = state.read(stored, Region((0,) * len(tensor.size), tensor.size))
            for layer, factor in enumerate(whole):
                below = "self_attn" if "attention" in stored else "mlp"
                found.setdefault(f"model.layers.{layer}.{below}.{name[:-2]}", {})[name[-1]] = factor.numpy().copy()
    return found


def by_hand(rank, world_size, store, directory, first):
    """Reports of each update and the last factors, computed with float64 by activations, not by weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model, reference = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval().requires_grad_(False)
        for _ in range(2)
    )
    factors = {}
    for name, pair in first.items():
        b, a = (torch.from_numpy(pair[key]).double().requires_grad_() for key in "ba")
        factors[name, "b"], factors[name, "a"] = b, a
        model.get_submodule(name).register_forward_hook(
            lambda _, given, out, a=a, b=b: out + ALPHA / RANK * (given[0] @ a.T) @ b.T
        )
    moments = {key: [torch.zeros_like(one), torch.zeros_like(one)] for key, one in factors.items()}
    reports = []
    for update in range(1, UPDATES + 1):
        for factor in factors.values():
            factor.grad = None
        loss = objective(model, reference, random_samples(update - 1))
        loss.backward()
        norm = math.sqrt(sum(float((one.grad**2).sum()) for one in factors.values()))
        reports.append({"loss": loss.item(), "grad_norm": norm})
        with torch.no_grad():
            for key, factor in factors.items():
                step(factor, moments[key], update)
    return reports, {key: one.detach().numpy() for key, one in factors.items()}


def objective(model, reference, drawn):
    import torch

    losses = []
    with torch.no_grad():
        kept = [one["logprobs"] for one in responses_of(reference, drawn, TEMPERATURE)]
    for one, before in zip(responses_of(model, drawn, TEMPERATURE), kept, strict=True):
        group = drawn.rewards[(drawn.groups == one["group"]) & drawn.usable].astype(float)
        advantage = (one["reward"] - group.mean()) / (group.std(ddof=1) + 1e-6)
        own, change = one["logprobs"], before - one["logprobs"]
        losses.append(-advantage * torch.exp(own - own.detach()) + KL * (torch.exp(change) - 1 - change))
    return torch.cat(losses).mean()


def step(factor, moments, update):
    moments[0].mul_(0.8).add_(0.2 * factor.grad)
    moments[1].mul_(0.9).add_(0.1 * factor.grad**2)
    mean, square = moments[0] / (1 - 0.8**update), moments[1] / (1 - 0.9**update)
    factor.sub_(RATE * mean / (square.sqrt() + EPS))


def test_updates_are_those_of_adapters_by_hand(walks):
    model, folder, found = walks("qwen3")
    first, last = adapters_of(f"{folder}/first"), adapters_of(f"{folder}/last")
    assert len(first) == 4 * len(TARGETS["qwen3"])
    assert all(not pair["b"].any() and pair["a"].std() > 0.05 for pair in first.values())
    ((reports, expected),) = run_ranks(1, by_hand, model, first)
    for metrics, report in zip(found["reports"], reports, strict=True):
        assert {name: metrics[name] for name in report} == pytest.approx(report, rel=2e-5, abs=2e-7)
    for (name, key), values in expected.items():
        moved = np.abs(values - first[name][key]).max()
        assert moved > RATE / 10
        assert np.abs(values - last[name][key]).max() < min(1e-6, 1e-4 * moved), (name, key)


def merged_by_hand(rank, world_size, store, directory, factors):
    """Digests of the model's tensors with the factors added."""
    import torch
    from safetensors.torch import load_file

    from trainer_core.weights.digest import tensor_digest

    tensors, found = load_file(f"{directory}/model.safetensors"), {}
    for name, tensor in tensors.items():
        if pair := factors.get(name.removesuffix(".weight")):
            b, a = (torch.from_numpy(pair[key]) for key in "ba")
            total = torch.zeros_like(tensor)
            for place in range(RANK):
                total += torch.outer(b[:, place] * (ALPHA / RANK), a[place])
            tensor = tensor + total
        found[name] = tensor_digest(tensor)
    return found


def test_engines_get_the_base_and_then_the_sums(walks):
    model, folder, found = walks("qwen3")
    for state, synced in (("first", found["before"]), ("last", found["synced"])):
        expected = run_ranks(1, merged_by_hand, model, adapters_of(f"{folder}/{state}"))[0]
        assert {name: digest for name, (digest, *_) in synced.items()} == expected


def apart_by_hand(rank, world_size, store, directory, factors):
    """Digests of the model's tensors, and of the factors under peft's names."""
    import torch
    from safetensors.torch import load_file

    from trainer_core.weights.digest import tensor_digest

    named = {
        f"base_model.model.{name}.lora_{kind.upper()}.weight": torch.from_numpy(pair[kind])
        for name, pair in factors.items()
        for kind in "ab"
    }
    tensors = load_file(f"{directory}/model.safetensors")
    held = {"base": tensors, "adapter": named}
    return {form: {name: tensor_digest(one) for name, one in own.items()} for form, own in held.items()}


def test_live_adapters_are_sent_apart_from_their_base(walks):
    model, folder, found = walks("qwen3")
    expected = run_ranks(1, apart_by_hand, model, adapters_of(f"{folder}/last"))[0]
    received = {form: {name: digest for name, (digest, *_) in one.items()} for form, one in found["apart"].items()}
    assert received == expected
    assert found["bases"] == {read_facts(Path(folder, "last")).lora.base}


def test_a_state_is_the_adapters_and_the_digest_of_the_base(walks):
    _, folder, _ = walks("qwen3")
    held = [path for path in Path(folder, "last").iterdir() if path.suffix == ".safetensors"]
    whole = sum(b.size + a.size for b, a in (pair.values() for pair in adapters_of(f"{folder}/last").values()))
    assert sum(path.stat().st_size for path in held) < 3 * 4 * whole * 1.2 + 40_000  # weights and two moments


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_layouts_train_send_and_continue_the_same(walks, family, layout, tmp_path):
    model, folder, one = walks(family)
    _, _, other = walks(family, layout)
    for left, right in zip(one["reports"], other["reports"], strict=True):
        assert all(left[name] == pytest.approx(right[name], rel=2e-5, abs=2e-7) for name in ("loss", "grad_norm"))
    assert one["before"] == other["before"]
    assert (one["apart"]["base"], one["bases"]) == (other["apart"]["base"], other["bases"])
    parallel = settings(family, layout)
    moved = run_trainers(model, parallel, go_on, folder, str(tmp_path))[0]
    assert moved["synced"] == moved["stored"] == one["synced"]
    assert (moved["apart"], moved["bases"]) == (one["apart"], one["bases"])
    for identity in (moved["loaded"], moved["identity"]):
        assert not identity.differences(one["identity"], generators=False)


@pytest.mark.slow
def test_recomputed_layers_have_the_same_gradients(walks, tmp_path):
    """Their input is not a weight's doing, so that checkpoints would leave out the gradients of the first of them."""
    model, _, one = walks("qwen3")
    other = run_trainers(model, settings("qwen3", megatron=MegatronConfig(recompute="layers")), train, str(tmp_path))[0]
    assert other["synced"] == one["synced"]
    assert [each["grad_norm"] for each in other["reports"]] == [each["grad_norm"] for each in one["reports"]]


@pytest.mark.slow
def test_overlapped_gathers_reach_the_adapters(walks, tmp_path):
    """They are waited for at the modules whose parameters they bring, and a layer computes with its adapter's."""
    model, _, one = walks("qwen3")
    overlap = MegatronConfig(overlap_grad_reduce=True, overlap_param_gather=True)
    other = run_trainers(model, settings("qwen3", "dp2", megatron=overlap), train, str(tmp_path))[0]
    for left, right in zip(one["reports"], other["reports"], strict=True):
        assert all(left[name] == pytest.approx(right[name], rel=2e-5, abs=2e-7) for name in ("loss", "grad_norm"))


def refused(trainer, folder):
    from storage.errors import InputError

    with pytest.raises(InputError) as found:
        trainer.load(f"{folder}/last")
    return str(found.value)


@pytest.mark.slow
def test_adapters_of_another_base_or_form_are_refused(walks, tmp_path):
    model, folder, _ = walks("qwen3")
    run_ranks(1, make_family, str(tmp_path), "qwen3", 4, 1)
    wider = settings("qwen3").model_copy(update={"lora": LoraConfig(rank=RANK + 1, targets=TARGETS["qwen3"])})
    for base, given in ((str(tmp_path), settings("qwen3")), (model, wider)):
        (said,) = run_trainers(base, given, refused, folder)
        assert "give [train.lora] and the model that the state was made with" in said
    whole = settings("qwen3").model_copy(update={"lora": None})
    assert "the trainer has whole weights" in run_trainers(model, whole, refused, folder)[0]
