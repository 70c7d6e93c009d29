"""vLLM's worker on CPU. It draws by the counter of the second model runner, as cards do: a token depends on its logits,
the seed of its sample and its position, not on where sampling began. Imports vLLM."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from tasks.engine.vllm.adapters import ServesOne
from tasks.engine.vllm.counter import choose
from tasks.engine.vllm.routes import Routing

_ENTRIES = 1 << 16  # of the vocabulary, over rows, whose log-probabilities are computed at once


class Worker(CPUWorker):
    """vLLM's worker with that runner."""

    def init_device(self) -> None:
        super().init_device()
        vars(self)["model_runner"] = Runner(self.vllm_config, torch.device("cpu"))


class Draw(TopKTopPSampler):
    """Chooses the token with the largest sum of logit and noise."""

    seeds: NDArray[np.int64] | None = None
    """One for each row of this step; None while vLLM warms up."""
    positions: NDArray[np.int64]
    """Of the last token before each, as on cards."""

    def forward_cpu(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = apply_top_k_top_p(logits, k, p)
        if self.seeds is None:
            return logits.argmax(dim=-1), logits
        return torch.from_numpy(choose(logits.numpy(), self.seeds, self.positions)), logits


class ChosenSampler(Sampler):
    """Computes log-probabilities of chosen tokens only, where vLLM gathers them, and no ranks."""

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return logits

    @staticmethod
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        assert not num_logprobs
        tokens, size = token_ids.unsqueeze(-1), max(1, _ENTRIES // logprobs.shape[1])
        parts = zip(logprobs.split(size), tokens.split(size), strict=True)
        found = [part.log_softmax(dim=-1, dtype=torch.float32).gather(-1, chosen) for part, chosen in parts]
        return LogprobsTensors(tokens.to(torch.int32), torch.cat(found), tokens.new_zeros(len(tokens)))


class Runner(Routing, ServesOne, CPUModelRunner):
    """Tells the sampler seeds and positions."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._draw = Draw(self.model_config.logprobs_mode)
        self.sampler = ChosenSampler(self.model_config.logprobs_mode)
        self.sampler.topk_topp_sampler = self._draw
        self._names: list[str] = []

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling)
        self.begin_routes(kv_cache_config)

    def blocks_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(self.requests[name].block_ids[0]) for name in names if name in self.requests}

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable | None:
        self.keep_routes(scheduler_output.finished_req_ids)
        return super()._update_states(scheduler_output)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        names = self.input_batch.req_ids
        if names != self._names:
            how = [self.requests[name].sampling_params for name in names]
            self._draw.seeds = np.array([(one.seed if one else None) or 0 for one in how], dtype=np.int64)
            self._names = list(names)
        self._draw.positions = self.optimistic_seq_lens_cpu[: len(names)].numpy().astype(np.int64) - 1
        return super()._sample(logits, spec_decode_metadata)
