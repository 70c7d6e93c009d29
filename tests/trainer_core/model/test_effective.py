"""The trainer reads Megatron's settings back from the live parts; one that did not take effect stops it."""

import json
import types

import numpy as np
import pytest

from storage.errors import InputError
from tests.trainer_core.ranks import run_ranks, run_trainers
from trainer_core.config import (
    ExpertsConfig,
    MegatronConfig,
    OptimizerConfig,
    ParallelConfig,
    RankSpec,
    TrainerConfig,
    check_context,
)
from trainer_core.start import start_trainer

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, beta1=0.8, clip_grad=0.5)
EVERYTHING = TrainerConfig(
    parallel=ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2),
    megatron=MegatronConfig(overlap_grad_reduce=True, overlap_param_gather=True, recompute="attention"),
    optimizer=OPTIMIZER,
    max_length=64,
)


def plain(**changes):
    return TrainerConfig(optimizer=OPTIMIZER, max_length=64, **changes)


def spoiled(trainer):
    """Messages by name of the setting, if a live part is changed and no requested value."""
    import torch
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from trainer_core.model.effective import MODEL, OPTIMIZER, Built, check_effective, read_back, read_layers

    trainer.import_model()
    model, optimizer = trainer._model, trainer._optimizer
    modules = list(model.modules[0].modules())
    linear = model.modules[0].decoder.layers[0].mlp.linear_fc1
    (chunk,), (part,) = model.chunks, optimizer.parts
    first = lambda kind: next(module for module in modules if isinstance(module, kind))  # noqa: E731
    several = types.SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    group, block = part.optimizer.param_groups[0], first(TransformerBlock)
    parts = {
        "parallel.tensor": (vars(linear), "tp_group", several),
        "parallel.pipeline": (vars(block), "pg_collection", types.SimpleNamespace(pp=several)),
        "layers of this rank": (block._modules, "layers", torch.nn.ModuleList(list(block.layers)[:2])),
        "parallel.context": (vars(first(Attention)), "pg_collection", types.SimpleNamespace(cp=several)),
        "parallel.data times context": (vars(chunk.buffers[0]), "data_parallel_world_size", 2),
        "precision of gradients": (vars(next(chunk.parameters())), "main_grad", torch.zeros(1).bfloat16()),
        "parallel.sequence": (vars(linear), "sequence_parallel", True),
        "hidden_dropout": (vars(first(TransformerLayer)), "hidden_dropout", 0.1),
        "fp8": (vars(block.config), "fp8", "hybrid"),
        "distributed optimizer": (vars(chunk.bucket_groups[0].ddp_config), "use_distributed_optimizer", False),
        "division of gradients by replicas": (vars(chunk.buffers[0]), "gradient_scaling_factor", 0.5),
        "megatron.overlap_grad_reduce": (vars(chunk.bucket_groups[0].ddp_config), "overlap_grad_reduce", True),
        "megatron.overlap_param_gather": (
            vars(chunk), "remove_forward_pre_hook_handles", dict.fromkeys(chunk.module.modules())
        ),
        "megatron.recompute": (vars(first(Attention)), "checkpoint_core_attention", True),
        "megatron.gradient_accumulation_fusion": (vars(linear), "gradient_accumulation_fusion", True),
        "megatron.output_gradient_accumulation_fusion": (
            vars(model.modules[0].output_layer), "gradient_accumulation_fusion", True
        ),
        "optimizer.learning_rate": (group, "max_lr", 0.5),
        "optimizer.min_learning_rate": (group, "min_lr", 0.5),
        "optimizer.beta1": (group, "betas", (0.5, 0.95)),
        "optimizer.beta2": (group, "betas", (0.8, 0.5)),
        "optimizer.eps": (group, "eps", 0.5),
        "optimizer.weight_decay": (group, "weight_decay", 0.5),
        "optimizer.clip_grad": (vars(part.config), "clip_grad", 3.0),
    }  # fmt: skip

    def complaint():
        try:
            live = Built(model.chunks, model.config.num_layers)
            read_back(MODEL, trainer._config, live)
            read_layers(trainer._config.parallel, live)
            read_back(OPTIMIZER, optimizer.config, optimizer.parts)
            check_effective(model.config, {"sequence_parallel": False})
        except InputError as error:
            return str(error)
        return None

    vars(model.modules[0].decoder.final_layernorm)["sequence_parallel"] = False  # Transformer Engine's norms have it
    found = {"": complaint()}
    for name, (owner, key, value) in parts.items():
        before, owner[key] = owner[key], value
        found[name] = complaint()
        owner[key] = before
    model.config.sequence_parallel = True
    found["what was asked"] = complaint()
    return found, sorted({row.name for row in (*MODEL, *OPTIMIZER)} - parts.keys())


def test_every_setting_is_read_from_the_live_parts(model_dir):
    decided = MegatronConfig(gradient_accumulation_fusion=False)
    ((messages, others),) = run_trainers(model_dir, plain(megatron=decided), spoiled)
    assert messages.pop("") is None
    assert messages.pop("what was asked").startswith("sequence_parallel is to be False, but Megatron runs with True")
    for name, message in messages.items():
        assert message is not None, name
        assert message.startswith(f"{name} is to be ")
        assert "but Megatron runs with" in message
    # parts that are built otherwise below, and those that only a model with experts has
    assert others == [
        "experts.auxiliary_loss", "experts.bias_update_rate", "experts.replay", "experts: dispatcher",
        "megatron.attention", "parallel.expert", "parallel.expert_tensor", "parallel.virtual_pipeline", "precision",
    ]  # fmt: skip


class Float8CurrentScaling:
    """Transformer Engine's recipe of that name, as its layers hold it after a pass."""

    def __init__(self, **changes):
        vars(self).update(
            fp8_format=types.SimpleNamespace(name="HYBRID"), use_power_2_scales=False, backward_override=None
        )
        vars(self).update(changes)


class MXFP8BlockScaling(Float8CurrentScaling):
    pass


def told_by_layers(trainer):
    """Refusals of a pass with FP8 over layers that say they multiplied by a recipe; one of them says something else."""
    trainer.import_model()
    model = trainer._model
    layers = [module for module in model.modules[0].modules() if "gradient_accumulation_fusion" in vars(module)]
    layers.remove(model.modules[0].output_layer)
    odd = {
        "none": {"fp8": True},
        "excluded": {"fp8": False},
        "override": {"fp8_meta": {"recipe": Float8CurrentScaling(backward_override="dequantized")}},
        "powers of two": {"fp8_meta": {"recipe": Float8CurrentScaling(use_power_2_scales=True)}},
        "another recipe": {"fp8_meta": {"recipe": MXFP8BlockScaling()}},
    }
    found = {}
    for name, changes in odd.items():
        for layer in layers:
            vars(layer).update(fp8=True, fp8_meta={"recipe": Float8CurrentScaling()})
        vars(model.modules[0].decoder.layers[1].mlp.linear_fc1).update(changes)
        model.config.fp8 = "hybrid"
        try:
            trainer.logprobs([np.array([1, 2, 3], np.int32)])
            found[name] = None
        except InputError as error:
            found[name] = str(error)
        model.config.fp8 = None
        trainer.logprobs([np.array([1, 2, 3], np.int32)])  # without FP8 no layer is asked
    return found


def test_a_layer_that_does_not_multiply_by_the_recipe_is_named_after_the_first_pass(model_dir):
    (found,) = run_trainers(model_dir, plain(), told_by_layers)
    assert found.pop("none") is None
    said = {
        "excluded": "recipe 'none: higher precision' in place of 'Float8CurrentScaling': use the pinned",
        "override": "backward_override 'dequantized' in place of None: unset NVTE_BACKWARD_OVERRIDE, or",
        "powers of two": "use_power_2_scales True in place of False: unset NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES, or",
        "another recipe": "recipe 'MXFP8BlockScaling' in place of 'Float8CurrentScaling': use the pinned",
    }  # fmt: skip
    for name, words in said.items():
        assert f"but decoder.layers.1.mlp.linear_fc1 computed with {words}" in found[name]


def stored(trainer, folder):
    trainer.import_model()
    trainer.save(folder)
    return trainer._model.effective | trainer._optimizer.effective


def test_what_took_effect_is_stored_with_the_state(model_dir, tmp_path):
    ranks = run_trainers(model_dir, EVERYTHING, stored, str(tmp_path))
    found = json.loads((tmp_path / "effective.json").read_text())
    assert found == ranks[0]
    assert found.items() >= {
        "parallel.tensor": 2, "parallel.pipeline": 2, "parallel.virtual_pipeline": 2, "precision": "fp32",
        "megatron.overlap_grad_reduce": True, "megatron.overlap_param_gather": True,
        "megatron.recompute": "attention", "megatron.attention": "auto", "optimizer.beta1": 0.8,
        "optimizer.weight_decay": 0.1, "optimizer.clip_grad": 0.5,
    }.items()  # fmt: skip


def refusal(rank, world_size, store, model_dir, config):
    with pytest.raises(InputError) as caught:
        start_trainer(model_dir, config, RankSpec(rank=rank, world_size=world_size, store=store))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"megatron": MegatronConfig(attention="flash")},
            ["megatron.attention is to be 'flash'", "runs with 'auto'"],
        ),
        (
            {"megatron": MegatronConfig(gradient_accumulation_fusion=True)},
            ["megatron.gradient_accumulation_fusion is to be True", "Apex"],
        ),
        (
            {"megatron": MegatronConfig(output_gradient_accumulation_fusion=True)},
            ["megatron.output_gradient_accumulation_fusion is to be True", "Apex"],
        ),
        ({"experts": ExpertsConfig(auxiliary_loss=1e-3)}, ["the model has no experts", "auxiliary_loss=0.001"]),
    ],
    ids=["attention", "fusion", "output fusion", "experts"],
)
def test_what_this_model_cannot_do_is_refused_at_the_start(model_dir, changes, words):
    (message,) = run_ranks(1, refusal, model_dir, plain(**changes))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("changes", "deterministic", "words"),
    [
        ({"precision": "fp32"}, False, ["context is 2 and train.precision 'fp32'", 'train.precision = "bf16"']),
        (
            {"precision": "bf16", "megatron": MegatronConfig(attention="unfused")},
            False,
            ["context is 2", "unfused attention", "train.megatron.attention asks"],
        ),
        (
            {"precision": "bf16"},
            True,
            ["context is 2", "unfused attention", "device.deterministic asks", "device.deterministic = false"],
        ),
    ],
)
def test_sequences_are_divided_where_transformer_engine_has_kernels_for_it(changes, deterministic, words):
    config = plain(parallel=ParallelConfig(context=2), **changes)
    with pytest.raises(InputError) as caught:
        check_context(config, True, deterministic)
    assert all(word in str(caught.value) for word in words), caught.value
    check_context(config, False, deterministic)
    check_context(plain(parallel=ParallelConfig(context=2), precision="bf16"), True, False)


def wanted_of_experts(rank, world_size, store):
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    from trainer_core.model.settings import provider_settings

    provider = GPTModelProvider(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_moe_experts=4, moe_aux_loss_coeff=1e-3,
        moe_router_bias_update_rate=1e-3,
    )  # fmt: skip
    return [provider_settings(provider, {}, one) for one in (ExpertsConfig(), ExpertsConfig(auxiliary_loss=0.5))]


def test_what_the_bridge_switches_on_for_experts_is_off_unless_it_is_asked_for():
    ((silent, asked),) = run_ranks(1, wanted_of_experts)
    assert silent == {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}
    assert asked == {"moe_aux_loss_coeff": 0.5, "moe_router_bias_update_rate": 0.0}
