"""A real vLLM engine in its own process, and the reference for comparisons: vLLM's global changes stay out of
pytest."""

import functools
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import spawn
from multiprocessing.managers import BaseManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tasks.config.environment import engine_environment
from tasks.engine.protocol import EngineSpec, Sampling
from tasks.engine.vllm.engine import Engine
from tests.forked_python import forked_python
from tests.tasks.engine_scheduling import Schedulers, write_tokenizer

VOCABULARY = 32
EOS = 1
CONTEXT = 128


class Reference:
    """Makes tiny models, and computes with transformers."""

    def make(self, directory: str, seed: int, tied: bool, family: str = "qwen3") -> None:
        """Write a random model of two layers."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(seed)
        config = AutoConfig.for_model(
            family,
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=tied,
            eos_token_id=EOS, bos_token_id=None, pad_token_id=0, dtype="float32",
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)  # away from ones and zeros, where mix-ups hide
        model.save_pretrained(directory)
        write_tokenizer(directory)

    def make_family(self, directory: str, seed: int, family: str, **sizes: int) -> None:
        """Write a random model with experts, of four layers."""
        import json

        from tests.trainer_core.models import make_family

        # vLLM's attention on CPU has kernels for heads of 32
        heads = {"head_dim": 32} if family == "qwen3-moe" else {"qk_nope_head_dim": 24, "v_head_dim": 32}
        make_family(0, 1, "", directory, family, seed=seed, **heads, **sizes)
        if family.startswith("deepseek"):  # transformers leaves out keys with their default values, and vLLM needs it
            path = Path(directory, "config.json")
            config = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(
                json.dumps(config | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}), encoding="utf-8"
            )

    def logits(self, directory: str, sequence: list[int]) -> np.ndarray:
        """Logits of the next token after each position but the last, (len(sequence) - 1, VOCABULARY)."""
        import torch

        with torch.no_grad():
            return _plain(directory)(torch.tensor([sequence])).logits[0, :-1].numpy()

    def routes(self, directory: str, sequence: list[int]) -> np.ndarray:
        """Experts of each token but the last, by layer that has some, ascending: (len(sequence) - 1, layers, k)."""
        import torch

        model, found = _plain(directory), []
        routers = [one for one in model.modules() if type(one).__name__.lower().endswith("topkrouter")]
        with torch.no_grad(), ExitStack() as hooks:
            for one in routers:
                hooks.enter_context(one.register_forward_hook(lambda _, __, output: found.append(output[-1])))
            model(torch.tensor([sequence[:-1]]))
        return torch.stack(found, 1).sort(-1).values.numpy()


@functools.lru_cache(8)
def _plain(directory: str) -> Any:
    """The model of transformers in a directory, which nobody writes again."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


class FaultyEngine(Engine):
    """An engine in one process whose parameters can be spoiled, and whose loaders can be broken."""

    def model(self) -> Any:
        """vLLM's model."""
        return self._core._client.engine_core.model_executor.driver_worker.worker.get_model()

    def sampled_so_far(self) -> dict[str, tuple[int, int]]:
        """Tokens and log-probabilities that the scheduler keeps, by request that it knows."""
        scheduler = self._core._client.engine_core.scheduler
        rows = scheduler._rows
        places = {name: rows.places_of([name])[0] for name in scheduler._responses if name in rows}
        as_row = {name: len(rows.sampled(place)[0]) for name, place in places.items()}
        return {
            name: (len(response.tokens) + as_row.get(name, 0), len(response.logprobs) + as_row.get(name, 0))
            for name, response in scheduler._responses.items()
        }

    def kept_routes(self) -> int:
        """Requests whose routes the worker keeps until they are taken, and those that it expects to be told of."""
        routes = self._core._client.engine_core.model_executor.driver_worker.worker.model_runner.routes
        return len(routes._kept) + len(routes._taken)

    def preempt(self) -> None:
        """Take the key-value cache from all requests in flight, as when there is too little of it."""
        self._core.forget_prompts()

    def break_loading(self, fault: str, *names: str) -> None:
        """Let vLLM's loaders see other tensors than those that arrived, until `repair`: see `_faulty`."""
        model = self.model()
        load = type(model).load_weights
        vars(model)["load_weights"] = lambda weights: load(model, _faulty(weights, fault, names))

    def repair(self) -> None:
        """Undo `break_loading`."""
        vars(self.model()).pop("load_weights", None)

    def adapters(self) -> list[int]:
        """Ids of the adapters that the engine holds."""
        return [number for number in self.model().lora_manager.lora_index_to_id if number is not None]

    def spoil_adapter(self) -> None:
        """Change a number of the adapter that is served."""
        layer = self.model().get_submodule("model.layers.1.self_attn.o_proj")
        layer.lora_b_stacked[0][0, 0, 3, 1] += 1

    def inputs_of_all_served(self, number: int, requests: list[int], tokens: list[int]) -> tuple[Any, int]:
        """Inputs of a step on a card whose slot has that adapter, and the number of active adapters."""
        from tasks.engine.vllm.runner import AllServed

        state = AllServed(4, lambda: number)
        state.add_request("first", 0, None)
        mappings = state.make_lora_inputs([], np.array(requests), np.array(tokens))
        return mappings, len(state.get_activate_loras([]))

    def poison(self) -> int:
        """Fill all parameters with NaN; returns the number of those that are not empty."""
        import torch

        with torch.no_grad():
            return sum(bool(parameter.fill_(float("nan")).numel()) for parameter in self.model().parameters())

    def poisoned(self) -> list[str]:
        """Parameters with a NaN in them."""
        return [name for name, parameter in self.model().named_parameters() if bool(parameter.isnan().any())]

    def held_asleep(self) -> tuple[dict[str, str], bool]:
        """Result of `held` as if it slept, which vLLM does on cards only; and its flag afterwards."""
        self._core.asleep = True
        try:
            return self.held(), self._core.asleep
        finally:
            self._core.asleep = False


class InPlaceEngine(FaultyEngine):
    """An engine on CPU whose kernels use parameters as they were loaded, as those on a card do."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import _custom_ops

        supported, _custom_ops._supports_onednn = _custom_ops._supports_onednn, False
        try:
            super().__init__(spec)
        finally:
            _custom_ops._supports_onednn = supported

    def survey_model(self) -> str | None:
        """Survey as on a card."""
        with _kernels_that_read_parameters():
            return super().survey_model()

    def prepare_update(self, *arguments: Any) -> str:
        """Prepare as on a card."""
        with _kernels_that_read_parameters():
            return super().prepare_update(*arguments)

    def forget_table(self) -> None:
        """Load by vLLM's loaders next, as in an engine's first update."""
        self._core._client.engine_core.model_executor.driver_worker.worker.weight_updates._followed = None

    def break_table(self, fault: str, *names: str) -> None:
        """Let the table write other values, until `mend_table`: see `_faulty`."""
        from tasks.engine.vllm import loading

        self._copies = loading.PlannedCopies
        vars(loading)["PlannedCopies"] = _faulty_copies(self._copies, fault, names)

    def mend_table(self) -> None:
        """Undo `break_table`."""
        from tasks.engine.vllm import loading

        vars(loading)["PlannedCopies"] = self._copies

    def replace(self, name: str) -> None:
        """Give a parameter other storage, between two updates."""
        weight = self.model().get_parameter(name)
        weight.data = weight.data.clone()

    def move(self, name: str) -> None:
        """Let the loader of a layer replace its parameter's storage."""
        model = self.model()
        load, layer = type(model).load_weights, model.get_submodule(name)

        def load_and_move(weights: Iterator[tuple[str, Any]]) -> set[str]:
            loaded = load(model, weights)
            layer.weight.data = layer.weight.data.clone()
            return loaded

        vars(model)["load_weights"] = load_and_move


@contextmanager
def _kernels_that_read_parameters() -> Iterator[None]:
    """Take the model, in updates that begin now, for one whose kernels use parameters as they were loaded."""
    from tasks.engine.vllm import receive, survey

    class InPlaceSurvey(survey.Survey):
        in_place = True

    vars(receive)["Survey"] = InPlaceSurvey
    try:
        yield
    finally:
        vars(receive)["Survey"] = survey.Survey


def _faulty(weights: Iterator[tuple[str, Any]], fault: str, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    other = dict(zip(names, names[::-1], strict=True))
    for name, tensor in weights:
        if name not in names:
            yield name, tensor
        elif fault == "swap":
            yield other[name], tensor
        elif fault == "ulp":  # the change of a step with a small learning rate
            yield name, tensor.nextafter(tensor + 1)
        elif fault == "twice":
            yield name, tensor
            yield name, tensor + 1
        elif fault == "raise":
            raise OSError("a loader failed")
        elif fault == "stop":
            return


def _faulty_copies(copies: Any, fault: str, names: tuple[str, ...]) -> Any:
    """Copies to other places than planned, or of other values."""

    class Faulty(copies):
        def __init__(self, planned: Any, survey: Any) -> None:
            other = dict(zip(names, names[::-1], strict=True)) if fault == "swap" else {}
            kept = [name for name in survey.parts if fault != "skip" or name not in names]
            parts, words = ({name: own[other.get(name, name)] for name in kept} for own in (survey.parts, survey.words))
            super().__init__(planned, SimpleNamespace(places=survey.places, parts=parts, words=words))
            self._late = [survey.parts[tensor.name] for tensor in planned if fault == "ulp" and tensor.name in names]

        def write(self, buffer: Any) -> None:
            super().write(buffer)
            for part in self._late:
                part.copy_(part.nextafter(part + 1))

    return Faulty


class PlainEngine:
    """vLLM's own engine in one process: its client, its scheduler, a token at a time."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm import LLM

        from tasks.engine.vllm.core import vllm_arguments

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._vllm = LLM(**vllm_arguments(spec), worker_cls="tasks.engine.vllm.on_cpu.Worker")  # of the same noise

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[tuple[Any, Any, Any]]:
        """Tokens, their log-probabilities, and the reason for each response's end."""
        from tasks.engine.vllm.core import sampling_parameters

        how = [sampling_parameters(sampling, seed) for seed in seeds]
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [output.outputs[0] for output in self._vllm.generate(asked, how, use_tqdm=False)]
        return [
            (
                list(output.token_ids),
                [found[token].logprob for found, token in zip(output.logprobs, output.token_ids, strict=True)],
                output.finish_reason,
            )
            for output in outputs
        ]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of the tokens but the first."""
        from tasks.engine.vllm.core import scoring_parameters

        asked: list[Any] = [{"prompt_token_ids": sequence} for sequence in sequences]
        outputs = self._vllm.generate(asked, [scoring_parameters() for _ in sequences], use_tqdm=False)
        found = [output.prompt_logprobs for output in outputs]
        return [
            [at[token].logprob for at, token in zip(one[1:], sequence[1:], strict=True)]
            for one, sequence in zip(found, sequences, strict=True)
        ]


class Copies:
    """Copies a bucket's tensors into parameters."""

    def right(self, sent: str, held: str, of: Any) -> bool:
        """True if `PlannedCopies` writes a part of a matrix as torch would, and leaves the others beside it alone.

        Args:
            of: the part, as in `Place`; None if this worker has no use for the matrix.
        """
        import torch

        from tasks.engine.vllm.landing import Place, part_of
        from tasks.engine.vllm.loading import PlannedCopies
        from tasks.engine.vllm.survey import Survey
        from tests.tasks.engine_update import plan_of
        from trainer_core.weights.packing import tensors_of, views

        kind = vars(torch)[sent]
        matrices = {name: torch.randn(8, 12).to(kind) for name in ("before", "matrix", "after")}
        plan = plan_of(matrices)
        (planned,) = tensors_of(plan).values()
        buffer = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
        for name, tensor in views(planned, buffer):
            tensor.copy_(matrices[name])
        box = of or ((0, 8), (0, 12))
        expected = part_of(matrices["matrix"], box).to(vars(torch)[held])
        parameter = torch.zeros_like(expected, memory_format=torch.contiguous_format)
        survey = Survey(torch.nn.Module())
        place = Place((8, 12), box, "layer", "weight", tuple((0, size) for size in parameter.shape))
        vars(survey).update(places={"matrix": place}, parts={"matrix": parameter} if of else {})
        PlannedCopies(planned, survey).write(buffer)
        return torch.equal(parameter, expected if of else torch.zeros_like(expected))


class Quantized:
    """Does the checks of `tests.tasks.engine.quantized_layers`."""

    def do(self, name: str, *arguments: Any) -> None:
        """Do one; raises as it does."""
        from tests.tasks.engine import quantized_layers

        vars(quantized_layers)[name](*arguments)


class EngineProcess(BaseManager):
    """Serves engines and `Reference` to the tests over a local socket."""


for kind in (Engine, FaultyEngine, InPlaceEngine, PlainEngine, Reference, Copies, Quantized, Schedulers):
    EngineProcess.register(kind.__name__, kind)


@contextmanager
def engine_process(factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start the process, forked as those of its workers are; it ends with the block."""
    manager, own = EngineProcess(ctx=multiprocessing.get_context("spawn")), spawn.get_executable()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environment("cpu", gpus=(), local=True).items():
            patch.setenv(name, value)
        multiprocessing.set_executable(forked_python(factory, "engine"))
        try:
            manager.start()
        finally:
            multiprocessing.set_executable(own)
    try:
        yield manager
    finally:
        manager.shutdown()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def weights_of(directory: str) -> dict[str, np.ndarray]:
    """All tensors of a model directory."""
    from safetensors.numpy import load_file

    return load_file(Path(directory) / "model.safetensors")
