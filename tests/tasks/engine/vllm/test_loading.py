"""Parameters after vLLM's loaders: faults are found, with the name of the tensor."""

from types import SimpleNamespace

import pytest

from storage.errors import SyncMismatch
from tasks.engine.protocol import EngineSpec, weights_digest
from tests.tasks.engine.vllm.test_engine import PROMPTS, assert_agrees
from tests.tasks.engine_process import CONTEXT
from tests.tasks.engine_update import (
    assert_unusable,
    deliver,
    refused,
    serve,
    tensors_of_model,
)

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fault", "names"),
    [
        *(("qwen3-moe", *one) for one in EXPERTS),
        *(pytest.param("deepseek-v3", *one, marks=pytest.mark.full) for one in EXPERTS),  # vLLM loads both alike
        *(("deepseek-v3", *one) for one in LATENT),
    ],
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


@pytest.fixture(scope="module")
def in_place(engines):
    """An engine that loads into the parameters that its kernels use."""
    served = engines["qwen3", False]
    spec = EngineSpec(model_dir=served.old, max_model_len=CONTEXT, max_num_seqs=64, kv_cache_bytes=16 << 20)
    return SimpleNamespace(**{**vars(served), "engine": served.process.InPlaceEngine(spec)})


def load_in_place(served, folder, which):
    folder.mkdir()
    weights = tensors_of_model(vars(served)[which])
    arrived, sent = deliver(served.engine, folder, weights)
    assert (arrived.digests, arrived.landed) == (sent, len(weights))
    served.engine.commit_update(1, weights_digest(sent))


def test_loading_in_place_fills_the_parameters_that_kernels_use(in_place, tmp_path):
    in_place.engine.forget_table()
    assert in_place.engine.poison() > 10
    load_in_place(in_place, tmp_path / "new", "new")
    assert in_place.engine.poisoned() == []
    assert_agrees(in_place, "new")


@pytest.mark.parametrize(("fault", "names", "said"), LOADING)
def test_a_fault_of_the_loaders_in_place_fails_with_the_name(in_place, tmp_path, fault, names, said):
    load_in_place(in_place, tmp_path / "old", "old")
    in_place.engine.forget_table()
    in_place.engine.break_loading(fault, *names)
    try:
        match = "stopped" if fault == "stop" else "|".join(names)
        refused(in_place.engine, tmp_path / "broken", tensors_of_model(in_place.new), SyncMismatch, match)
        # and no update is written by a table that the loaders contradict
        refused(in_place.engine, tmp_path / "again", tensors_of_model(in_place.new), SyncMismatch, match)
    finally:
        in_place.engine.repair()


def test_a_parameter_that_moves_is_refused_because_of_cuda_graphs(in_place, tmp_path):
    in_place.engine.forget_table()
    in_place.engine.move("model.layers.1.mlp.down_proj")
    try:
        match = r"moved the parameter model\.layers\.1\.mlp\.down_proj\.weight"
        refused(in_place.engine, tmp_path / "moved", tensors_of_model(in_place.new), SyncMismatch, match)
    finally:
        in_place.engine.repair()


def test_where_loaders_have_followed_the_table_the_next_update_is_written_by_it(in_place, tmp_path):
    in_place.engine.forget_table()
    load_in_place(in_place, tmp_path / "old", "old")
    in_place.engine.break_loading("raise", "model.layers.1.mlp.up_proj.weight")  # no caller asks them
    try:
        for which in ("new", "old", "new"):
            load_in_place(in_place, tmp_path / f"{which}-{len(list(tmp_path.iterdir()))}", which)
            assert_agrees(in_place, which)
    finally:
        in_place.engine.repair()


def test_what_is_written_by_the_table_was_looked_up_for_this_update(in_place, tmp_path):
    load_in_place(in_place, tmp_path / "first", "old")
    in_place.engine.replace("model.layers.1.mlp.down_proj.weight")
    load_in_place(in_place, tmp_path / "second", "new")
    assert_agrees(in_place, "new")
    in_place.engine.survey_model()
    in_place.engine.replace("model.layers.1.mlp.down_proj.weight")
    match = r"moved the parameter model\.layers\.1\.mlp\.down_proj\.weight"
    refused(in_place.engine, tmp_path / "third", tensors_of_model(in_place.old), SyncMismatch, match)
    load_in_place(in_place, tmp_path / "fourth", "old")
    assert_agrees(in_place, "old")


@pytest.mark.parametrize(("fault", "names", "said"), [one for one in LOADING if one[0] in ("skip", "swap", "ulp")])
def test_a_tensor_that_is_written_elsewhere_than_in_the_table_fails_with_the_name(
    in_place, tmp_path, fault, names, said
):
    load_in_place(in_place, tmp_path / "old", "old")
    in_place.engine.break_table(fault, *names)
    try:
        match = f"tensor .*({'|'.join(names)}) was "
        refused(in_place.engine, tmp_path / "broken", tensors_of_model(in_place.new), SyncMismatch, match)
    finally:
        in_place.engine.mend_table()
    load_in_place(in_place, tmp_path / "after", "new")
    assert_agrees(in_place, "new")


@pytest.mark.slow
def test_of_an_architecture_without_a_table_the_names_are_checked(engines, tmp_path):
    process, reference = engines["qwen3", False].process, engines["qwen3", False].reference
    models = {name: str(tmp_path / name) for name in ("old", "new")}
    for seed, directory in enumerate(models.values()):
        reference.make(directory, seed, True, "gemma")
    spec = EngineSpec(model_dir=models["old"], max_model_len=CONTEXT, max_num_seqs=64, kv_cache_bytes=16 << 20)
    served = SimpleNamespace(engine=process.FaultyEngine(spec), reference=reference, **models)
    served.engine.break_loading("skip", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight")
    match = r"parameters that vLLM loaded: 1 \['model\.layers\.1\.mlp\.gate_up_proj\.weight'\] missing"
    refused(served.engine, tmp_path / "broken", tensors_of_model(served.new), SyncMismatch, match)
    served.engine.repair()
    (tmp_path / "whole").mkdir()
    arrived, sent = deliver(served.engine, tmp_path / "whole", tensors_of_model(served.new))
    assert (arrived.digests, arrived.landed) == (sent, 0)
    served.engine.commit_update(1, weights_digest(sent))
    assert_agrees(served, "new", prompts=PROMPTS[:4])
