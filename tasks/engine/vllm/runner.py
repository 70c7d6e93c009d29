"""vLLM's second model runner, without work for each request in a step that has the same requests as the one before,
and with a sampler that computes nothing but tokens and their log-probabilities. Imports vLLM's code for cards. It takes
the place of the runner of `Worker` on CUDA."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    combine_sampled_and_draft_tokens,
    get_num_sampled_and_rejected,
    prepare_pos_seq_lens,
)
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker as VllmWorker

from tasks.engine.vllm.adapters import ServesOne
from tasks.engine.vllm.draw import draw
from tasks.engine.vllm.routes import Routing
from tasks.engine.vllm.steps import Arrays, Step


class Worker(VllmWorker):
    """vLLM's worker on a card."""

    def init_device(self) -> None:
        super().init_device()
        if self.use_v2_model_runner:
            assert self.device is not None
            vars(self)["model_runner"] = Runner(self.vllm_config, self.device)  # its annotation is the first one

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model from its folder, which has another path at each start. What vLLM compiled for it is found by
        everything that decides it, and that path: so the model has the same one from here on."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.model_config.model = "model"


class Sampled(AsyncModelRunnerOutput):
    """Samples of a step, in transfer from the card."""

    def __init__(self, output: AsyncOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        """Wait for it."""
        output = self._output
        output.copy_event.synchronize()
        found = output.model_runner_output
        return Arrays(
            req_ids=found.req_ids,
            req_id_to_index=found.req_id_to_index,
            logprobs=None if output.logprobs_tensors is None else output.logprobs_tensors.tolists(),
            prompt_logprobs_dict=output.prompt_logprobs_dict,
            tokens=output.sampled_token_ids[:, 0],
            counts=output.num_sampled_tokens_np,
        )


class Chosen(LogprobsTensors):
    """Log-probabilities of the chosen tokens; only these go to the host."""

    def to_cpu_nonblocking(self) -> LogprobsTensors:
        found = self.logprobs.to("cpu", non_blocking=True)
        return LogprobsTensors(found, found, found)  # of no use here, the others


class ChosenSampler(Sampler):
    """Draws by the counter, for requests with the settings of `Sampling` alone, without penalties or banned words."""

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        states, rows, here = self.sampling_states, input_batch.expanded_idx_mapping, input_batch.idx_mapping_np
        states.apply_temperature(logits, rows, here)
        states.apply_min_p(logits, rows, here)
        kept = states.apply_top_k_top_p(logits, rows, here)
        positions = input_batch.positions[input_batch.logits_indices]
        tokens, logprobs = draw(kept, rows, states.seeds.gpu, positions, states.temperature.gpu)
        sampled, rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        wanted = self.returns_logprobs(here)
        return SamplerOutput(
            sampled_token_ids=tokens[:, None],
            logprobs_tensors=Chosen(tokens[:, None], logprobs[:, None], tokens) if wanted else None,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=rejected,
        )


class AllServed(LoraState):
    """Every request has the adapter with the id that `served` returns; 0 is none."""

    def __init__(self, max_num_reqs: int, served: Callable[[], int]) -> None:
        super().__init__(max_num_reqs)
        self._served = served

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: np.ndarray, num_scheduled_tokens: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        served = (self._served(),)
        return served * len(idx_mapping), served * int(num_scheduled_tokens.sum()), set()

    def get_activate_loras(self, req_ids: list[str]) -> set[LoRARequest]:
        return {LoRARequest("served", number, "in the slot")} if (number := self._served()) else set()


class Runner(Routing, ServesOne, GPUModelRunner):
    """Uses the arrays of the step before again, and counts computed tokens itself."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.lora_state = AllServed(self.max_num_reqs, lambda: self.served)
        self._before: tuple[int, BatchExecutionDescriptor, InputBatch] | None = None

    def load_model(self, load_dummy_weights: bool = False, *arguments: Any, **options: Any) -> None:
        super().load_model(load_dummy_weights, *arguments, **options)
        self.sampler = ChosenSampler(
            max_num_reqs=self.max_num_reqs,
            vocab_size=self.vocab_size,
            device=self.device,
            req_states=self.req_states,
            logprobs_mode=self.model_config.logprobs_mode,
        )

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_kv_cache(kv_cache_config)
        self.begin_routes(kv_cache_config)

    def blocks_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tables, known = self.block_tables, self.req_states.req_id_to_index
        places = {name: known[name] for name in names if name in known}
        parts = tables.blocks_per_kv_block[0]  # kernels may divide a block
        return {
            name: tables.block_tables[0].gpu[place, : int(tables.num_blocks.np[0, place]) : parts] // parts
            for name, place in places.items()
        }

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        self.keep_routes(scheduler_output.finished_req_ids)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.scheduled_new_reqs:
            super().add_requests(scheduler_output)

    def prepare_inputs(self, scheduler_output: SchedulerOutput, batch_desc: BatchExecutionDescriptor) -> InputBatch:
        number = _number(scheduler_output)
        if number and self._before is not None and self._before[:2] == (number, batch_desc):
            batch = self._next(self._before[2])
        else:
            batch = super().prepare_inputs(scheduler_output, batch_desc)
        self._before = number, batch_desc, batch
        # the scheduler says so only of requests that are not rows; for these it is the same
        self.req_states.num_computed_tokens_np[batch.idx_mapping_np] += batch.num_scheduled_tokens
        return batch

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput | ModelRunnerOutput | None:
        output = super().sample_tokens(grammar_output)
        return Sampled(output) if isinstance(output, AsyncOutput) else output

    def _next(self, before: InputBatch) -> InputBatch:
        """The batch of the same requests, each with its next token."""
        states, buffers = self.req_states, self.input_buffers
        prepare_pos_seq_lens(
            before.idx_mapping,
            before.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        combine_sampled_and_draft_tokens(
            buffers.input_ids,
            before.idx_mapping,
            states.last_sampled_tokens,
            before.query_start_loc,
            before.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            before.cu_num_logits,
            before.num_reqs,
            self.model_state.num_new_sampled_tokens_per_step,
        )
        computed = states.num_computed_tokens_np[before.idx_mapping_np]
        lengths = np.zeros(before.num_reqs_after_padding, dtype=np.int32)
        lengths[: before.num_reqs] = computed + 1
        return replace(
            before,
            req_ids=[],  # the scheduler knows their order
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
            num_computed_tokens_np=computed,
            num_computed_prefill_tokens_np=before.prefill_len_np,
            is_prefilling_np=np.zeros(before.num_reqs, dtype=bool),
        )


def _number(output: SchedulerOutput) -> int:
    """The same for steps of the same requests; 0 if others than rows are among them."""
    return output.planned.number if isinstance(output, Step) and output.planned and output.alone else 0
