"""vLLM as Ratchet starts it: its settings, its processes, and requests that go in and come out one by one.

This drives vLLM's scheduler and workers (`EngineCore`) through vLLM's client for them, as `AsyncLLM` does, but without
asyncio: so they can also run step by step in this process (vLLM refuses asyncio without a process for the scheduler),
which is what makes results repeatable and starts short on CPU. Token ids go in and come out, so nothing of what vLLM
has above that is needed: text, parts of responses, statistics. Imports torch and vLLM."""

import multiprocessing.connection
import os
import signal
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from vllm import EngineArgs, SamplingParams
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core_client import EngineCoreClient, MPClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.utils import CoreEngineProcManager

from storage.errors import SyncMismatch
from tasks.engine.protocol import EngineSpec, Every, Sampling
from tasks.engine.vllm import ADAPTER, BEGUN, EVERY, ROUTES, STOP_TEXTS, Runner
from tasks.engine.vllm.inside import executor
from tasks.engine.vllm.memory import cache_bytes
from trainer_core.config import Device
from trainer_core.lora import LIVE_RANKS

_WORKERS: dict[Device, str] = {"cuda": "tasks.engine.vllm.runner.Worker", "cpu": "tasks.engine.vllm.on_cpu.Worker"}
_LEAVING_S = 1.0  # that this process gets to end by itself after its scheduler has
_MAX_STEP_TOKENS = 4096  # tokens of one forward step; a whole prompt must fit, because prompts are not split


@dataclass(frozen=True)
class Answer:
    """To a request that has ended or grown."""

    name: str  # of the request
    token_ids: NDArray[np.int32]  # sampled tokens
    logprobs: NDArray[np.float32]  # one for each of them; empty if they were not asked for
    prompt_logprobs: NDArray[np.float32]
    """One for each token of the prompt but the first; empty if they were not asked for."""
    cached: int  # tokens of the prompt that the prefix cache held
    finish_reason: str | None  # as vLLM calls it; None of one that goes on, whose new tokens these are


class Core:
    """vLLM's engine. Requests are added, each `step` says which have ended."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start vLLM with the weights in `spec.model_dir`."""
        arguments = vllm_arguments(spec)
        scheduler = "WholeResponsesAhead" if arguments["async_scheduling"] else "WholeResponses"
        self.config = EngineArgs(
            **arguments, scheduler_cls=f"tasks.engine.vllm.scheduler.{scheduler}", worker_cls=_WORKERS[spec.device]
        ).create_engine_config(UsageContext.LLM_CLASS)
        self._inputs = InputProcessor(self.config, renderer_from_config(self.config))
        self._client = EngineCoreClient.make_client(
            multiprocess_mode=spec.has_processes,
            asyncio_mode=False,
            vllm_config=self.config,
            executor_class=executor(spec.tensor),
            log_stats=False,
        )
        self._tasks = self._client.get_supported_tasks()
        self._together = spec.together
        self.asleep = False  # True if the engine has freed the card's memory
        if isinstance(self._client, MPClient):
            leaving = Event()
            weakref.finalize(self, leaving.set)  # runs before vLLM ends its processes
            _end_with_scheduler(self._client, leaving)

    def add(self, requests: Sequence[tuple[str, list[int], SamplingParams]]) -> None:
        """Begin with requests, each with a name of its own and its prompt."""
        self.wake()
        held = self._together and isinstance(self._client, MPClient)
        if held:  # or the scheduler would begin with the first while the others are on their way to its process
            self.hold()
        for name, prompt, how in requests:
            self._client.add_request(self._inputs.process_inputs(name, tokens_input(prompt), how, self._tasks))
        if held:
            self.go_on()

    def step(self) -> list[Answer]:
        """Answers to what ended, was forgotten or is told in the next step. Some must be under way."""
        return [_answer(output) for output in self._client.get_output().outputs]

    def forget(self, names: Sequence[str]) -> None:
        """End requests: those that have not ended yet are answered with what was sampled, and the reason `abort`."""
        self._client.abort_requests(list(names))

    def workers(self, method: str, **options: Any) -> list[Any]:
        """Call a method of every worker; their results."""
        self.wake()
        return self._client.collective_rpc(method, kwargs=options)

    @property
    def runner(self) -> Runner:
        """Name of the model runner of vLLM that computes."""
        return "second" if self.config.use_v2_model_runner else "first"

    @property
    def block(self) -> int:
        """Tokens of a block of the prefix cache."""
        return self.config.cache_config.block_size

    def sleep(self) -> None:
        """Give the card's memory back: weights go to memory of the host, the key-value cache is emptied."""
        if not self.asleep:
            self._client.sleep(level=1)
            self.asleep = True

    def wake(self) -> None:
        """Take the card's memory again, with the weights of before; no effect on an engine that is awake."""
        if self.asleep:
            self._client.wake_up()
            self.asleep = False

    def forget_prompts(self) -> None:
        """Empty the prefix cache: what is under way computes its part again. Raises SyncMismatch: vLLM refuses."""
        if not self._client.reset_prefix_cache(reset_running_requests=True):
            raise SyncMismatch("vLLM did not empty its prefix cache, which holds values of the old weights; sync again")

    def hold(self) -> None:
        """Stop computing what is under way, until `go_on`."""
        if isinstance(self._client, MPClient):  # in this process nothing is computed but in `step`
            cast(Any, self._client).call_utility("pause_scheduler", "keep", False)

    def go_on(self) -> None:
        """Compute again."""
        if isinstance(self._client, MPClient):
            cast(Any, self._client).call_utility("resume_scheduler")


def _answer(last: EngineCoreOutput) -> Answer:
    """Of the only output of a request (`tasks.engine.vllm.scheduler`)."""
    sampled, prompt, none = last.new_logprobs, last.new_prompt_logprobs_tensors, np.empty(0, dtype=np.float32)
    return Answer(
        name=last.request_id,
        token_ids=np.asarray(last.new_token_ids, dtype=np.int32),
        logprobs=none if sampled is None else sampled.logprobs[:, 0],  # (T, 1) -> (T,)
        prompt_logprobs=none if prompt is None else prompt.logprobs[:, 0].numpy(),  # (T - 1, 1) -> (T - 1,)
        cached=0 if last.prefill_stats is None else last.prefill_stats.num_cached_tokens,
        finish_reason=None if last.finish_reason is None else str(last.finish_reason),
    )


def _end_with_scheduler(client: MPClient, leaving: Event) -> None:
    """Kill this process when the scheduler's has ended, unless it is `leaving`: calls to it would wait for ever. Not at
    once: Ray ends an actor's children before the actor, and would call it a crash if it were gone too early."""
    sentinels = cast(CoreEngineProcManager, client.resources.engine_manager).sentinels()

    def watch() -> None:
        multiprocessing.connection.wait(sentinels)
        if not leaving.wait(_LEAVING_S):
            os.kill(os.getpid(), signal.SIGKILL)

    Thread(target=watch, name="ratchet-scheduler", daemon=True).start()


def vllm_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Arguments with which vLLM is started."""
    arguments: dict[str, Any] = {
        "model": spec.model_dir,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # a model's own sampling defaults must not change ours
        "dtype": spec.dtype,
        "quantization": {"fp8": "fp8_per_channel", None: None}[spec.quantization],
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": max(_MAX_STEP_TOKENS, spec.max_model_len, spec.max_num_seqs),
        "kv_cache_memory_bytes": spec.kv_cache_bytes or cache_bytes(spec, current_platform.get_device_total_memory),
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "tensor_parallel_size": spec.tensor,
        "enforce_eager": spec.enforce_eager or spec.device == "cpu",
        "seed": spec.seed,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enable_sleep_mode": spec.sleeps,
        "async_scheduling": spec.async_scheduling and spec.device == "cuda",
        "worker_extension_cls": "tasks.engine.vllm.receive.WorkerExtension",
        "additional_config": {ROUTES: spec.routes, ADAPTER: spec.adapter and spec.adapter.model_dump(mode="json")},
    }
    if spec.adapter is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": next(rank for rank in LIVE_RANKS if rank >= spec.adapter.rank),
            "lora_target_modules": [target.rpartition(".")[2] for target in spec.adapter.targets],
        }
    if spec.device == "cpu":
        arguments |= {
            "block_size": 32,
            "enable_chunked_prefill": False,  # a seeded request whose prompt is split ends the engine on CPU
            "compilation_config": {"custom_ops": ["none"]},  # the CPU kernel of interleaved rotary embedding is wrong
        }
    return arguments


def sampling_parameters(sampling: Sampling, seed: int, begun: int = 0, every: Every | None = None) -> SamplingParams:
    """vLLM's sampling parameters of a response, of which `begun` tokens are there; others are told `every` so often."""
    told = {STOP_TEXTS: list(sampling.stop), BEGUN: begun, EVERY: every and tuple(every)}
    return SamplingParams(
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens - begun,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=list(sampling.stop_token_ids),
        extra_args=told,
        ignore_eos=True,
        logprobs=0,
        skip_clone=True,  # made for this one request: no deep copy
    )


def scoring_parameters() -> SamplingParams:
    """vLLM's parameters for scoring the tokens of a prompt."""
    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
