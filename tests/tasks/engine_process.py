"""A real vLLM engine in its own process, so that what vLLM changes globally stays out of pytest, and the reference
to compare it with."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np

from tasks.config.environment import engine_environment
from tasks.engine.engine import Engine

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

    def logits(self, directory: str, sequence: list[int]) -> np.ndarray:
        """Logits of the next token after each position but the last, (len(sequence) - 1, VOCABULARY)."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(torch.tensor([sequence])).logits[0, :-1].numpy()


class EngineProcess(BaseManager):
    """Serves `Engine` and `Reference` to the tests over a local socket."""


EngineProcess.register("Engine", Engine)
EngineProcess.register("Reference", Reference)


@contextmanager
def engine_process() -> Iterator[Any]:
    """Start the process; it ends with the block."""
    manager = EngineProcess(ctx=multiprocessing.get_context("spawn"))
    manager.start(_set_environment, (engine_environment("cpu", gpus=(), local=True),))
    try:
        yield manager
    finally:
        manager.shutdown()


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def weights_of(directory: str) -> dict[str, np.ndarray]:
    """All tensors of a model directory."""
    from safetensors.numpy import load_file

    return load_file(Path(directory) / "model.safetensors")
