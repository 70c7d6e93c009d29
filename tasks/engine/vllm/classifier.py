"""A reward model on vLLM: its pooling runner gives the score of the last token, as transformers' classifiers do. vLLM
and torch are imported when an engine is created."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from storage.errors import InputError
from tasks.engine.protocol import KV_CACHE_BYTES_ON_CPU, EngineSpec, TokenIds, ValuesProtocol
from trainer_core.collector import paused

_MAX_STEP_TOKENS = 4096  # of one forward step


class Classifier(ValuesProtocol):
    """vLLM's engine in this process. With `EngineSpec.together` a value depends on its own sequence alone."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start the engine with the weights in `spec.model_dir`."""
        with paused():
            from vllm import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

        self._spec = spec
        self._engine = LLMEngine.from_engine_args(EngineArgs(**pooling_arguments(spec)))

    def values(self, sequences: Sequence[TokenIds]) -> NDArray[np.float32]:
        from vllm import PoolingParams
        from vllm.outputs import PoolingOutput, PoolingRequestOutput

        for number, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= self._spec.max_model_len:
                fact = f"sequence {number} has {len(sequence)} tokens, and 1 to {self._spec.max_model_len} can be read"
                raise InputError(f"{fact}: raise engines.judge.max_model_len")
        for number, sequence in enumerate(sequences):
            # plain integers: vLLM makes tensors of them
            prompt: Any = {"prompt_token_ids": np.asarray(sequence).tolist()}
            # without the activation, which would be a sigmoid
            self._engine.add_request(f"{number}", prompt, PoolingParams(task="classify", use_activation=False))
        found = np.zeros(len(sequences), np.float32)
        while self._engine.has_unfinished_requests():
            for answer in self._engine.step():
                pooled = cast(PoolingRequestOutput[PoolingOutput], answer).outputs
                found[int(answer.request_id)] = pooled.data.float().item()
        return found


def pooling_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Arguments with which vLLM is started. No part of a sequence is kept for another or computed before the rest."""
    on_cpu = spec.device == "cpu"
    arguments: dict[str, Any] = {
        "model": spec.model_dir,
        "runner": "pooling",
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": 1 if spec.together else spec.max_num_seqs,
        "max_num_batched_tokens": max(_MAX_STEP_TOKENS, spec.max_model_len, spec.max_num_seqs),
        "kv_cache_memory_bytes": spec.kv_cache_bytes or (KV_CACHE_BYTES_ON_CPU if on_cpu else None),
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "enforce_eager": spec.enforce_eager or on_cpu,
        "seed": spec.seed,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
    }
    if on_cpu:  # as `vllm_arguments`
        arguments |= {"block_size": 32, "compilation_config": {"custom_ops": ["none"]}}
    return arguments
