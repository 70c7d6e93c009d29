"""A weight update in four steps on a real vLLM: what is refused, what is found, and what serves afterwards."""

import pytest
import torch

from storage.errors import SyncMismatch
from tasks.engine.protocol import weights_digest
from tests.tasks.engine.test_engine import PLAIN, PROMPTS, SEEDS, assert_agrees
from tests.tasks.engine_process import weights_of
from tests.tasks.engine_update import deliver


def tensors_of_model(directory):
    return {name: torch.from_numpy(array) for name, array in weights_of(directory).items()}


@pytest.mark.parametrize("transport", ["memory"])
@pytest.mark.parametrize("model", [("qwen3", False), ("qwen3", True), ("llama", True)])
def test_what_was_committed_is_served(engines, tmp_path, model, transport):
    served = engines[model]
    for which, version in (("new", 5), ("old", 6)):
        folder = tmp_path / which
        folder.mkdir()
        weights = tensors_of_model(vars(served)[which])
        arrived, sent = deliver(served.engine, folder, weights, version, transport)
        assert arrived.digests == sent
        assert arrived.landed == len(weights)
        assert arrived.bytes == sum(tensor.nbytes for tensor in weights.values())
        digest = weights_digest(sent)
        with pytest.raises(SyncMismatch, match="sync the weights again"):
            served.engine.generate(PROMPTS, SEEDS, PLAIN)
        served.engine.commit_update(version, digest)
        held = served.engine.identity()
        assert (held.weight_version, held.weights_digest) == (version, digest)
        assert_agrees(served, which)


LOADING = [
    ("skip", ["model.layers.1.self_attn.q_proj.weight"], "otherwise"),
    ("skip", [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"], "not loaded"),
    ("skip", ["model.norm.weight"], "otherwise"),
    ("swap", ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"], "otherwise"),
    ("swap", ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"], "otherwise"),
    ("ulp", ["model.layers.1.mlp.down_proj.weight"], "otherwise"),
    ("twice", ["model.layers.0.self_attn.q_proj.weight"], "failed at"),
    ("twice", ["model.layers.0.mlp.gate_proj.weight"], "failed at"),
    ("raise", ["model.layers.1.mlp.up_proj.weight"], "failed at"),
    ("stop", ["model.layers.1.mlp.up_proj.weight"], "stopped before"),
]


def refused(engine, folder, weights, error, match, **more):
    folder.mkdir()
    with pytest.raises(error, match=match):
        deliver(engine, folder, weights, 9, **more)


def assert_unusable(engine):
    assert engine.identity().weight_version is None
    with pytest.raises(SyncMismatch, match="sync the weights again"):
        engine.generate(PROMPTS, SEEDS, PLAIN)
    with pytest.raises(SyncMismatch, match="sync the weights again"):
        engine.score(PROMPTS)


def serve(served, folder, which="new", version=10):
    folder.mkdir()
    _, sent = deliver(served.engine, folder, tensors_of_model(vars(served)[which]), version)
    served.engine.commit_update(version, weights_digest(sent))


@pytest.mark.parametrize(("fault", "names", "said"), LOADING)
def test_a_fault_of_the_loaders_fails_with_the_name_and_the_next_update_repairs_it(
    served, tmp_path, fault, names, said
):
    serve(served, tmp_path / "before", "old")
    served.engine.break_loading(fault, *names)
    try:
        match = f"tensor .*({'|'.join(names)}) was .*{said}" if said in ("otherwise", "not loaded") else said
        refused(served.engine, tmp_path / "broken", tensors_of_model(served.new), SyncMismatch, match)
    finally:
        served.engine.repair()
    assert_unusable(served.engine)
    assert not served.engine.abort_update("the sync failed")
    serve(served, tmp_path / "after")
    assert_agrees(served, "new")


EXPERT = "model.layers.2.mlp.experts.{}.{}_proj.weight"
EXPERTS = [
    ("swap", [EXPERT.format(0, "up"), EXPERT.format(1, "up")]),
    ("swap", [EXPERT.format(0, "down"), EXPERT.format(3, "down")]),
    ("swap", [EXPERT.format(2, "gate"), EXPERT.format(2, "up")]),
    ("skip", [EXPERT.format(1, "gate")]),
    ("ulp", [EXPERT.format(3, "down")]),
    ("ulp", ["model.layers.2.mlp.gate.weight"]),
]
LATENT = [
    ("ulp", ["model.layers.2.mlp.gate.e_score_correction_bias"]),
    ("swap", ["model.layers.0.self_attn.kv_b_proj.weight", "model.layers.1.self_attn.kv_b_proj.weight"]),
    ("ulp", ["model.layers.1.mlp.shared_experts.down_proj.weight"]),
    ("skip", ["model.layers.3.self_attn.kv_a_layernorm.weight"]),
]


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_experts_and_latent_attention_land_and_are_served(experts, tmp_path, family):
    served = experts[family]
    for which, version in (("new", 5), ("old", 6)):
        serve(served, tmp_path / which, which, version)
        assert_agrees(served, which, prompts=PROMPTS[:6])
    assert served.engine.poison() > 10
    serve(served, tmp_path / "again", "new", 7)
    assert served.engine.poisoned() == []
    assert_agrees(served, "new", prompts=PROMPTS[:6])


@pytest.mark.parametrize(
    ("family", "fault", "names"),
    [*(("qwen3-moe", *one) for one in EXPERTS), *(("deepseek-v3", *one) for one in [*EXPERTS, *LATENT])],
)
def test_a_fault_at_an_expert_or_in_latent_attention_fails_with_the_name(experts, tmp_path, family, fault, names):
    served = experts[family]
    serve(served, tmp_path / "before", "old")
    served.engine.break_loading(fault, *names)
    try:
        weights = tensors_of_model(served.new)
        refused(served.engine, tmp_path / "broken", weights, SyncMismatch, f"tensor ({'|'.join(names)}) was ")
    finally:
        served.engine.repair()
    assert served.engine.identity().weight_version is None
