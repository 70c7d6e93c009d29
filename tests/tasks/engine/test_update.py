"""A weight update in four steps on a real vLLM: what is refused, what is found, and what serves afterwards."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from storage.errors import SyncMismatch
from tasks.engine.protocol import EngineSpec, Sampling, weights_digest
from tests.tasks.engine.test_engine import PLAIN, PROMPTS, SEEDS, assert_agrees, responses
from tests.tasks.engine_process import CONTEXT, log_softmax, weights_of
from tests.tasks.engine_update import Sending, deliver, plan_of
from trainer_core.weights.channel import Channel
from trainer_core.weights.digest import tensor_digest
from trainer_core.weights.plan import plan_digest


def tensors_of_model(directory):
    return {name: torch.from_numpy(array) for name, array in weights_of(directory).items()}


@pytest.mark.parametrize(
    ("model", "transport"),
    [
        (("qwen3", False), "memory"),
        (("qwen3", True), "memory"),
        (("llama", True), "memory"),
        (("qwen3", False), "collective"),
        (("qwen3", True), "files"),
    ],
)
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


def flip(name):
    def damage(bucket, packed):
        if name in packed:
            packed[name].view(torch.int32).view(-1)[3] ^= 1

    return damage


def drop(name):
    def damage(bucket, packed):
        if name in packed:
            packed[name].zero_()

    return damage


def exchange(name, other):
    def damage(bucket, packed):
        if name in packed and other in packed:
            packed[name].copy_(packed.pop(other))

    return damage


LAST = "model.norm.weight"
GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "name"),
    [(flip(GATE), GATE), (drop(LAST), LAST), (exchange(GATE, UP), GATE)],
    ids=["flip", "drop", "swap"],
)
def test_what_is_damaged_on_the_way_has_another_digest_and_is_not_committed(served, tmp_path, damage, name):
    serve(served, tmp_path / "before", "old")
    folder = tmp_path / "damaged"
    folder.mkdir()
    arrived, sent = deliver(served.engine, folder, tensors_of_model(served.new), before=damage, arena_bytes=1 << 20)
    assert [key for key in sent if arrived.digests[key] != sent[key]] == [name]
    with pytest.raises(SyncMismatch, match="were not received"):
        served.engine.commit_update(9, weights_digest(sent))
    assert_unusable(served.engine)
    assert not served.engine.abort_update(f"{name} arrived otherwise than it was sent")
    with pytest.raises(SyncMismatch, match=f"{name} arrived otherwise"):
        served.engine.generate(PROMPTS, SEEDS, PLAIN)
    serve(served, tmp_path / "after")
    assert_agrees(served, "new")


def changed_shape(weights):
    return weights | {GATE: weights[GATE][:-1]}


def without(name):
    return lambda weights: {key: tensor for key, tensor in weights.items() if key != name}


def beside(name):
    return lambda weights: weights | {name: torch.ones(3)}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed_shape, f"tensor {GATE} .*has shape \\[127, 64\\]"),
        (without(UP), f"1 tensors .*{UP}.* missing"),
        (without("lm_head.weight"), "1 tensors .*lm_head.weight.* missing"),
        (beside("model.layers.0.mlp.bias"), "tensor model.layers.0.mlp.bias .*no place"),
        (beside("model.layers.2.input_layernorm.weight"), "no place"),
    ],
    ids=["shape", "missing", "no-output-layer", "unknown", "another-layer"],
)
def test_a_plan_that_does_not_fit_is_refused_and_the_weights_of_before_serve(served, tmp_path, change, match):
    serve(served, tmp_path / "before", "old", 3)
    refused(served.engine, tmp_path / "refused", change(tensors_of_model(served.new)), SyncMismatch, match)
    assert served.engine.abort_update("refused")
    assert served.engine.identity().weight_version == 3
    assert_agrees(served, "old")


def test_tensors_that_the_engine_has_no_use_for_are_let_through(served, tmp_path):
    weights = tensors_of_model(served.new) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    arrived, sent = deliver(served.engine, tmp_path, weights)
    assert arrived.digests == sent
    assert arrived.landed == len(weights) - 1


def test_an_output_layer_that_is_sent_though_it_is_tied_must_equal_the_embedding(engines, tmp_path):
    served = engines["qwen3", True]
    weights = tensors_of_model(served.new)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    (tmp_path / "equal").mkdir()
    assert deliver(served.engine, tmp_path / "equal", weights)[0].landed == len(weights)
    weights["lm_head.weight"][0, 0] += 1
    refused(served.engine, tmp_path / "other", weights, SyncMismatch, r"tensor lm_head\.weight was loaded otherwise")


def test_another_digest_is_refused(served, tmp_path):
    plan = plan_of(tensors_of_model(served.new))
    channel = Channel(transport="memory", folder=str(tmp_path), receivers=1)
    with pytest.raises(SyncMismatch, match="the trainer planned the weight update 0000"):
        served.engine.prepare_update(plan, "0000", channel, 0)
    twice = plan.model_copy(update={"tensors": (*plan.tensors, plan.tensors[0])})
    with pytest.raises(SyncMismatch, match="in the weight update twice"):
        served.engine.prepare_update(twice, plan_digest(twice), channel, 0)
    over = plan.tensors[1].model_copy(update={"offset": 0})
    twice = plan.model_copy(update={"tensors": (plan.tensors[0], over, *plan.tensors[2:])})
    with pytest.raises(SyncMismatch, match="lies over another"):
        served.engine.prepare_update(twice, plan_digest(twice), channel, 0)


def test_what_was_not_prepared_or_received_is_refused(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    assert served.engine.abort_update("nothing is under way")
    with pytest.raises(SyncMismatch, match="no weight update was prepared"):
        served.engine.receive_update()
    with pytest.raises(SyncMismatch, match="were not received"):
        served.engine.commit_update(5, served.engine.identity().weights_digest)
    assert served.engine.identity().weight_version == 4
    assert_agrees(served, "old")


def test_an_update_that_stops_before_its_first_byte_leaves_the_weights_of_before(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)

    def fail(bucket, packed):
        raise ValueError("a rank has other weights")

    match = "a rank has other weights"
    refused(served.engine, tmp_path / "stopped", tensors_of_model(served.new), SyncMismatch, match, before=fail)
    assert served.engine.abort_update("a rank has other weights")
    assert served.engine.identity().weight_version == 4
    assert_agrees(served, "old")


def test_an_update_that_stops_in_the_middle_is_repaired_by_the_next(served, tmp_path):
    def fail(bucket, packed):
        if bucket.number == 2:
            raise ValueError("out of memory")

    serve(served, tmp_path / "before", "old", 4)
    weights = tensors_of_model(served.new)
    refused(served.engine, tmp_path / "stopped", weights, SyncMismatch, "out of memory", before=fail)
    assert_unusable(served.engine)
    assert not served.engine.abort_update("out of memory")
    serve(served, tmp_path / "after")
    assert_agrees(served, "new")


def test_weights_that_are_refused_after_the_commit_serve_no_more(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    assert served.engine.held() == {
        name: tensor_digest(tensor) for name, tensor in tensors_of_model(served.old).items()
    }
    served.engine.refuse("the probe disagrees")
    assert_unusable(served.engine)
    assert served.engine.held() == {}
    with pytest.raises(SyncMismatch, match="the probe disagrees"):
        served.engine.generate(PROMPTS, SEEDS, PLAIN)


def test_weights_of_another_type_land_converted(served, tmp_path):
    weights = {name: tensor.bfloat16() for name, tensor in tensors_of_model(served.new).items()}
    arrived, sent = deliver(served.engine, tmp_path, weights)
    assert (arrived.digests, arrived.landed) == (sent, len(weights))


def test_requests_under_way_are_dropped(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    for number in (0, 1):
        served.engine.enqueue(number, PROMPTS[:6], SEEDS[:6], PLAIN)
    served.engine.collect(0.0)
    serve(served, tmp_path / "after")
    assert served.engine.collect(60.0) == ([], 0)


def test_requests_under_way_are_finished_first(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    alone = served.engine.generate(PROMPTS[:6], SEEDS[:6], PLAIN)
    for number in (0, 1):
        served.engine.enqueue(number, PROMPTS[:6], SEEDS[:6], PLAIN)
    served.engine.collect(0.0)
    (tmp_path / "after").mkdir()
    _, sent = deliver(served.engine, tmp_path / "after", tensors_of_model(served.new), 5, in_flight="wait")
    served.engine.commit_update(5, weights_digest(sent))
    (first,), (second,) = served.engine.collect(60).finished, served.engine.collect(60).finished
    assert (first.number, first.weight_version) == (0, 4)
    assert first.completions.equals(alone)
    assert (second.number, second.weight_version) == (1, 5)
    assert second.completions.equals(served.engine.generate(PROMPTS[:6], SEEDS[:6], PLAIN))


def assert_goes_on(served, tmp_path, receivers=1):
    """What was under way has tokens of the old weights up to the update, and then those of the new ones."""
    how, version = Sampling(max_tokens=40, temperature=0.0), served.engine.identity().weight_version
    old = served.engine.generate(PROMPTS[:6], SEEDS[:6], how)["response_tokens"].to_pylist()
    served.engine.enqueue(0, PROMPTS[:6], SEEDS[:6], how)
    for _ in range(3):
        served.engine.collect(0.0)
    (tmp_path / "after").mkdir()
    weights, more = tensors_of_model(served.new), {"in_flight": "keep", "receivers": receivers}
    _, sent = deliver(served.engine, tmp_path / "after", weights, version + 1, **more)
    served.engine.commit_update(version + 1, weights_digest(sent))
    (batch,) = served.engine.collect(60).finished
    assert batch.weight_version == version
    kept = []
    for prompt, before, (after, logprobs) in zip(PROMPTS[:6], old, responses(batch.completions), strict=True):
        same = next((place for place in range(40) if before[place] != after[place]), 40)
        likely = served.reference.logits(served.new, prompt + after)[len(prompt) - 1 :]
        assert likely.argmax(axis=-1).tolist()[same:] == after[same:]
        expected = log_softmax(likely)[np.arange(40), after]
        np.testing.assert_allclose(logprobs[same:], expected[same:], atol=1e-4)
        kept.append(same)
    return kept


def test_requests_under_way_go_on_under_the_new_weights(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    kept = assert_goes_on(served, tmp_path)
    assert all(3 <= same < 40 for same in kept)


def test_a_hold_ends_with_whoever_began_it(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    plan = plan_of(tensors_of_model(served.new))
    channel = Channel(transport="memory", folder=str(tmp_path), receivers=1)
    served.engine.prepare_update(plan, plan_digest(plan), channel, 0, "keep")  # and its driver dies
    served.engine.drop()
    served.engine.enqueue(0, PROMPTS[:6], SEEDS[:6], PLAIN)
    assert [batch.number for batch in served.engine.collect(60).finished] == [0]


def test_a_receiver_that_cannot_be_opened_stops_everybody(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    plan = plan_of(tensors_of_model(served.new))
    channel = Channel(transport="memory", folder=str(tmp_path), receivers=1)
    served.engine.prepare_update(plan, plan_digest(plan), channel, 0)
    os.mkfifo(tmp_path / "counters")  # can hold none
    with pytest.raises(SyncMismatch, match="counters of a weight update do not fit"):
        served.engine.receive_update()
    assert "an engine cannot receive: the counters" in (tmp_path / "failed").read_text()
    assert served.engine.abort_update("no counters")


def test_an_engine_that_sleeps_is_asked_without_being_woken(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    awake = served.engine.held()
    assert served.engine.held_asleep() == (awake, True)


@pytest.mark.slow
def test_two_workers_hold_their_parts(split, tmp_path):
    for which, version in (("new", 5), ("old", 6)):
        (tmp_path / which).mkdir()
        weights = tensors_of_model(vars(split)[which])
        arrived, sent = deliver(split.engine, tmp_path / which, weights, version, receivers=2)
        assert (arrived.digests, arrived.landed) == (sent, 2 * len(weights))
        split.engine.commit_update(version, weights_digest(sent))
        assert_agrees(split, which, prompts=PROMPTS[:6])
    assert_goes_on(split, tmp_path, receivers=2)
    weights = tensors_of_model(split.new)
    folder = tmp_path / "refused"
    refused(split.engine, folder, without(EXPERT.format(1, "up"))(weights), SyncMismatch, "missing", receivers=2)
    assert split.engine.abort_update("refused")


@pytest.fixture(scope="module")
def in_place(engines):
    """An engine that loads into the parameters that its kernels use."""
    served = engines["qwen3", False]
    spec = EngineSpec(model_dir=served.old, max_model_len=CONTEXT, max_num_seqs=64, kv_cache_bytes=16 << 20)
    return SimpleNamespace(**{**vars(served), "engine": served.process.InPlaceEngine(spec)})


def load_in_place(served, folder, weights, **more):
    folder.mkdir()
    plan = plan_of(weights)
    channel = Channel(transport="memory", folder=str(folder), receivers=1, deadline_s=30)
    sending = Sending(channel, plan, weights, **more)
    try:
        return (*served.engine.load(plan, channel), sending.result())
    finally:
        sending.join(30)


def test_loading_in_place_fills_the_parameters_that_kernels_use(in_place, tmp_path):
    weights = tensors_of_model(in_place.new)
    assert in_place.engine.poison() > 10
    arrived, landed, sent = load_in_place(in_place, tmp_path / "new", weights)
    assert (arrived, landed) == (sent, len(weights))
    assert in_place.engine.poisoned() == []
    assert_agrees(in_place, "new")


@pytest.mark.parametrize(("fault", "names", "said"), LOADING)
def test_a_fault_of_the_loaders_in_place_fails_with_the_name(in_place, tmp_path, fault, names, said):
    load_in_place(in_place, tmp_path / "old", tensors_of_model(in_place.old))
    in_place.engine.break_loading(fault, *names)
    try:
        with pytest.raises(SyncMismatch, match="stopped" if fault == "stop" else "|".join(names)):
            load_in_place(in_place, tmp_path / "broken", tensors_of_model(in_place.new))
    finally:
        in_place.engine.repair()


def test_a_parameter_that_moves_is_refused_because_of_cuda_graphs(in_place, tmp_path):
    in_place.engine.move("model.layers.1.mlp.down_proj")
    try:
        with pytest.raises(SyncMismatch, match=r"moved the parameter model\.layers\.1\.mlp\.down_proj\.weight"):
            load_in_place(in_place, tmp_path / "moved", tensors_of_model(in_place.new))
    finally:
        in_place.engine.repair()


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
