"""The rollout engine: one vLLM in one process, which samples, scores, and loads new weights in place.

vLLM and torch are imported when an engine is created.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.errors import InputError, SyncMismatch, WorkerLost
from tasks.engine.protocol import (
    COMPLETIONS,
    EngineIdentity,
    EngineProtocol,
    EngineSpec,
    Sampling,
    SyncReceipt,
    TokenIds,
    weights_digest,
)
from trainer_core.weights.records import TensorRecord

_MAX_STEP_TOKENS = 4096  # tokens of one forward step; a whole prompt must fit, because prompts are not split


@dataclass(frozen=True)
class Unusable:
    """Why an engine must not generate."""

    reason: str


class Engine(EngineProtocol):
    """vLLM in this process. One call at a time."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start the engine with the weights in `spec.model_dir`.

        Raises:
            InputError: the directory holds no model.
        """
        if not (Path(spec.model_dir) / "config.json").is_file():
            raise InputError(f"{spec.model_dir} holds no config.json: give a Hugging Face model directory")
        import torch.distributed as dist
        from vllm import LLM

        if not dist.is_initialized():
            # a store in memory: vLLM would open one that listens on every interface
            backend = "nccl" if spec.device == "cuda" else "gloo"
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented, not listed in __all__
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self._spec = spec
        self._llm: Any = LLM(**_vllm_arguments(spec))
        self._llm.init_weight_transfer_engine({"init_info": {"model_dir": spec.model_dir}})
        self._held: EngineIdentity | Unusable = EngineIdentity(weight_version=None, weights_digest=None)

    def identity(self) -> EngineIdentity:
        """See `EngineProtocol.identity`."""
        if isinstance(self._held, Unusable):
            return EngineIdentity(weight_version=None, weights_digest=None)
        return self._held

    def generate(self, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> pa.RecordBatch:
        """See `EngineProtocol.generate`."""
        self._check_usable()
        self._check_lengths(prompts, "prompt")
        outputs = self._run(prompts, [_sampling_parameters(sampling, seed) for seed in seeds])
        return _completions([output.outputs[0] for output in outputs])

    def score(self, sequences: Sequence[TokenIds]) -> list[NDArray[np.float32]]:
        """See `EngineProtocol.score`."""
        self._check_usable()
        self._check_lengths(sequences, "sequence")
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        outputs = self._run(sequences, how)
        return [np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32) for output in outputs]

    def receive(self, directory: str, version: int, records: Sequence[TensorRecord]) -> SyncReceipt:
        """See `EngineProtocol.receive`."""
        clock = time.perf_counter()
        self._held = Unusable("a weight update began and did not finish")
        try:
            digests = self._update(directory, records)
        except Exception as error:
            self._held = Unusable(str(error))
            raise
        identity = EngineIdentity(weight_version=version, weights_digest=weights_digest(digests))
        self._held = identity
        return SyncReceipt(
            version=version,
            digests=digests,
            weights_digest=str(identity.weights_digest),
            bytes=sum((Path(directory) / file).stat().st_size for file in {record.file for record in records}),
            seconds=time.perf_counter() - clock,
        )

    def _run(self, sequences: Sequence[TokenIds], how: Any) -> list[Any]:
        # plain integers: from numpy's, vLLM would make tensors of a type that it does not accept
        inputs = [{"prompt_token_ids": np.asarray(ids).tolist()} for ids in sequences]
        return self._llm.generate(inputs, how, use_tqdm=False)

    def _update(self, directory: str, records: Sequence[TensorRecord]) -> dict[str, str]:
        files: dict[str, list[TensorRecord]] = {}
        for record in records:
            files.setdefault(record.file, []).append(record)
        if not files:
            raise SyncMismatch("a weight update without tensors: the trainer exported nothing")
        self._llm.start_weight_update()
        for number, (file, expected) in enumerate(files.items(), start=1):
            update = {
                "path": str(Path(directory) / file),
                "records": [record.model_dump() for record in expected],
                "final": number == len(files),
            }
            self._llm.update_weights({"update_info": update})
        self._llm.finish_weight_update()
        if not self._llm.reset_prefix_cache():
            raise SyncMismatch("the prefix cache could not be reset: requests are running during a weight update")
        (digests,) = self._llm.collective_rpc("received_digests")
        return digests

    def _check_usable(self) -> None:
        if isinstance(self._held, Unusable):
            raise SyncMismatch(
                f"the engine's weights cannot be used because the last weight sync failed ({self._held.reason}); "
                "sync the weights again before generating"
            )

    def _check_lengths(self, sequences: Sequence[TokenIds], what: str) -> None:
        limit = self._spec.max_model_len - 1
        for index, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= limit:
                raise InputError(
                    f"{what} {index} has {len(sequence)} tokens; the engine accepts 1 to {limit} "
                    f"(engine.max_model_len is {self._spec.max_model_len} and one token is sampled)"
                )


def _vllm_arguments(spec: EngineSpec) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": spec.model_dir,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # a model's own sampling defaults must not change ours
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": max(_MAX_STEP_TOKENS, spec.max_model_len, spec.max_num_seqs),
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "enforce_eager": spec.enforce_eager or spec.device == "cpu",
        "seed": spec.seed,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "async_scheduling": False,
        "worker_extension_cls": "tasks.engine.receive.WorkerExtension",
        "weight_transfer_config": {"backend": "ratchet"},
    }
    if spec.device == "cpu":
        arguments |= {
            "block_size": 32,
            "enable_chunked_prefill": False,  # a seeded request whose prompt is split ends the engine on CPU
            "compilation_config": {"custom_ops": ["none"]},  # the CPU kernel of interleaved rotary embedding is wrong
        }
    return arguments


def _sampling_parameters(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,  # lists of numbers instead of a dict and objects per token
        detokenize=False,
        skip_clone=True,  # made for this one request: no deep copy
    )


def _completions(outputs: Sequence[Any]) -> pa.RecordBatch:
    unfinished = [output.finish_reason for output in outputs if output.finish_reason not in ("stop", "length", "abort")]
    if unfinished:
        raise WorkerLost(f"vLLM ended a response with finish_reason {unfinished[0]!r}, which Ratchet does not know")
    columns = [
        _lists([output.token_ids for output in outputs], pa.int32()),
        _lists([output.logprobs.logprobs for output in outputs], pa.float32()),
        pa.array([output.finish_reason for output in outputs], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=COMPLETIONS)


def _lists(rows: Sequence[Sequence[int]] | Sequence[Sequence[float]], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.fromiter(itertools.chain.from_iterable(rows), dtype=kind.to_pandas_dtype(), count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))
