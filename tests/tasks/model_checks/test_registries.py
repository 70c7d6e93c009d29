"""Stored data about Megatron and vLLM agree with the installed versions."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from storage.errors import InputError
from tasks.config.section import COLDEST
from tasks.model_checks.architectures import CPU_HEAD_SIZES, KNOWN_TO_BOTH, LLAMA_LIKE, check_numbers
from tests.trainer_core.ranks import run_ranks
from trainer_core.config import ParallelConfig, check_layout


def source_of(module: str) -> ast.Module:
    """The source of a module of vLLM, which is too slow to import for this."""
    package, _, rest = module.partition(".")
    found = importlib.util.find_spec(package)
    folder = Path(found.submodule_search_locations[0])
    return ast.parse(folder.joinpath(*rest.split(".")).with_suffix(".py").read_text())


def known_to_megatron(rank, world_size, store):
    from megatron.bridge import AutoBridge

    return set(AutoBridge.list_supported_models())


def test_the_architectures_are_those_that_both_know():
    registry = source_of("vllm.model_executor.models.registry")
    (served,) = [
        ast.literal_eval(node.value)
        for node in registry.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_TEXT_GENERATION_MODELS"
    ]
    (trained,) = run_ranks(1, known_to_megatron)
    assert trained & served.keys() == KNOWN_TO_BOTH
    assert LLAMA_LIKE < KNOWN_TO_BOTH


def test_the_head_sizes_are_those_of_the_engine_on_cpu():
    source = source_of("vllm.v1.attention.backends.cpu_attn")
    (function,) = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
    ]
    assert tuple(ast.literal_eval(function.body[-1].value)) == CPU_HEAD_SIZES


def test_the_lowest_temperature_is_that_of_the_engine():
    (given,) = [
        node.value
        for node in source_of("vllm.sampling_params").body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_MAX_TEMP"
    ]
    assert ast.literal_eval(given) == COLDEST


FACTS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 192,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip
LAYOUTS = [
    (1, 1, None), (2, 1, None), (3, 1, None), (4, 1, None), (1, 2, None), (2, 4, None), (1, 3, None), (1, 2, 2),
    (1, 2, 3), (1, 4, 2),
]  # fmt: skip
CASES = [
    (ParallelConfig(tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual), changes)
    for tensor, pipeline, virtual in LAYOUTS
    for changes in ({}, {"num_key_value_heads": 6}, {"num_key_value_heads": 4}, {"num_attention_heads": 8})
]


def finalized(rank, world_size, store, folder, cases):
    """Megatron's refusal of each model under each layout: None if it accepts it."""
    import json
    from pathlib import Path

    import torch

    from trainer_core.config import OptimizerConfig, TrainerConfig
    from trainer_core.model.model import _bridge, _configure
    from trainer_core.model.settings import model_settings
    from trainer_core.platform.platform import Platform, quietly

    platform = Platform(torch.device("cpu"), "gloo", transformer_engine=False)
    answers = []
    for parallel, facts in cases:
        Path(folder, "config.json").write_text(json.dumps(facts))
        config = TrainerConfig(parallel=parallel, optimizer=OptimizerConfig(learning_rate=1.0), max_length=8)
        try:
            with quietly():
                provider = _bridge(folder).to_megatron_provider(load_weights=False)
                _configure(provider, model_settings(config, platform, deterministic=False))
            answers.append(None)
        except InputError as error:
            answers.append(str(error))
    return answers


def refused(parallel, facts):
    try:
        check_numbers(facts, "the model")
        check_layout(parallel, facts)
    except InputError as error:
        return str(error)
    return None


def test_what_megatron_refuses_is_refused_before_the_start(tmp_path):
    cases = [(parallel, {**FACTS, **changes}) for parallel, changes in CASES]
    (theirs,) = run_ranks(1, finalized, str(tmp_path), cases)
    ours = [refused(*case) for case in cases]
    assert [case for case, mine, answer in zip(cases, ours, theirs, strict=True) if answer and not mine] == []
    assert any(theirs)
    assert any("Megatron refuses the model" in answer for answer in theirs if answer)
    assert ours[0] is None


@pytest.mark.parametrize("parallel", [ParallelConfig(tensor=2), ParallelConfig(pipeline=4)])
def test_what_fits_is_accepted(parallel):
    assert refused(parallel, FACTS) is None


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelConfig(tensor=2), "set train.parallel.sequence = true"),
        (ParallelConfig(data=4, expert=4), r"experts \(6\) cannot be divided by train.parallel.expert = 4"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_before_the_start(parallel, words, key):
    assert re.search(words, refused(parallel, {**FACTS, key: 6}) or "")
    assert refused(ParallelConfig(tensor=2, sequence=True), {**FACTS, key: 6}) is None
