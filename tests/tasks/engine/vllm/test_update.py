"""A weight update in four steps on a real vLLM: the refusals, the findings, and the weights that serve afterwards."""

import os

import numpy as np
import pytest
import torch

from storage.errors import SyncMismatch
from tasks.engine.protocol import weights_digest
from tests.tasks.engine.vllm.test_engine import PLAIN, PROMPTS, SEEDS, assert_agrees
from tests.tasks.engine_process import VOCABULARY
from tests.tasks.engine_update import (
    assert_unusable,
    deliver,
    plan_of,
    refused,
    serve,
    tensors_of_model,
)
from trainer_core.weights.channel import Channel
from trainer_core.weights.digest import tensor_digest
from trainer_core.weights.plan import text_digest

CACHED = [np.random.default_rng(3).integers(2, VOCABULARY, 70).tolist()] * 4  # fills the prefix cache


@pytest.mark.slow
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
        assert_agrees(served, which, prompts=CACHED)


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
QUERIES = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
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


def without(*names):
    return lambda weights: {name: tensor for name, tensor in weights.items() if name not in names}


def beside(name):
    return lambda weights: weights | {name: torch.ones(3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed_shape, f"tensor {GATE} .*has shape \\[127, 64\\]"),
        (without(LAST), f"1 tensors .*{LAST}.* missing"),
        (without(UP), f"1 tensors .*{UP}.* missing"),
        (without("lm_head.weight"), "1 tensors .*lm_head.weight.* missing"),
        (without(QUERIES[0]), rf"1 tensors \['{QUERIES[0]}.* missing"),
        (without(*QUERIES[1:]), rf"2 tensors \['{QUERIES[1]}.* missing"),
        (without(*QUERIES), rf"3 tensors \['{QUERIES[1]}.* missing"),
        (without("lm_head.weight", "model.embed_tokens.weight"), "2 tensors .*model.embed_tokens.weight.* missing"),
        (beside("model.layers.0.mlp.bias"), "tensor model.layers.0.mlp.bias .*no place"),
        (beside("model.layers.2.input_layernorm.weight"), "no place"),
    ],
    ids=[
        "shape",
        "no-norm",
        "missing",
        "no-output-layer",
        "no-queries",
        "no-keys-and-values",
        "no-attention",
        "no-embedding",
        "unknown",
        "another-layer",
    ],
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
        served.engine.prepare_update(plan.model_dump_json(), "0000", channel, 0)
    twice = plan.model_copy(update={"tensors": (*plan.tensors, plan.tensors[0])})
    with pytest.raises(SyncMismatch, match="in the weight update twice"):
        served.engine.prepare_update(twice.model_dump_json(), text_digest(twice.model_dump_json()), channel, 0)
    nothing = plan.model_copy(update={"tensors": ()})
    with pytest.raises(SyncMismatch, match="exported nothing"):
        served.engine.prepare_update(nothing.model_dump_json(), text_digest(nothing.model_dump_json()), channel, 0)
    over = plan.tensors[1].model_copy(update={"offset": 0})
    twice = plan.model_copy(update={"tensors": (plan.tensors[0], over, *plan.tensors[2:])})
    with pytest.raises(SyncMismatch, match="lies over another"):
        served.engine.prepare_update(twice.model_dump_json(), text_digest(twice.model_dump_json()), channel, 0)


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


def test_a_receiver_that_cannot_be_opened_stops_everybody(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    plan = plan_of(tensors_of_model(served.new))
    channel = Channel(transport="memory", folder=str(tmp_path), receivers=1)
    served.engine.prepare_update(plan.model_dump_json(), text_digest(plan.model_dump_json()), channel, 0)
    os.mkfifo(tmp_path / "counters")  # can hold none
    with pytest.raises(SyncMismatch, match="counters of a weight update do not fit"):
        served.engine.receive_update()
    assert "an engine cannot receive: the counters" in (tmp_path / "failed").read_text()
    assert served.engine.abort_update("no counters")


def test_an_engine_that_sleeps_is_asked_without_being_woken(served, tmp_path):
    serve(served, tmp_path / "before", "old", 4)
    awake = served.engine.held()
    assert served.engine.held_asleep() == (awake, True)
