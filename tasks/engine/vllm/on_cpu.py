"""vLLM's worker on CPU. It draws by the counter of the second model runner, as cards do: a token depends on its logits,
the seed of its sample and its position, not on where sampling began.

Imports vLLM.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from tasks.engine.vllm.counter import gumbel

_ENTRIES = 1 << 20  # of the vocabulary, over rows, whose noise is computed at once


class Worker(CPUWorker):
    """vLLM's worker with that runner."""

    def init_device(self) -> None:
        super().init_device()
        vars(self)["model_runner"] = Runner(self.vllm_config, torch.device("cpu"))


class Draw(TopKTopPSampler):
    """Adds the noise of each row to its logits. The likeliest token is the sampled one."""

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
        noisy = logits if self.seeds is None else logits + self._noise(self.seeds, logits.shape[1])
        return noisy.argmax(dim=-1), logits.log_softmax(dim=-1, dtype=torch.float32)

    def _noise(self, seeds: NDArray[np.int64], vocabulary: int) -> torch.Tensor:
        size = max(1, _ENTRIES // vocabulary)
        parts = [slice(first, first + size) for first in range(0, len(seeds), size)]
        noise = [gumbel(seeds[part], self.positions[part], vocabulary) for part in parts]
        return torch.from_numpy(np.concatenate(noise))


class Runner(CPUModelRunner):
    """Tells the sampler seeds and positions."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._draw = Draw(self.model_config.logprobs_mode)
        self.sampler.topk_topp_sampler = self._draw

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        how = [self.requests[name].sampling_params for name in self.input_batch.req_ids]
        self._draw.seeds = np.array([(one.seed if one else None) or 0 for one in how], dtype=np.int64)
        self._draw.positions = self.optimistic_seq_lens_cpu[: len(how)].numpy().astype(np.int64) - 1
        return super()._sample(logits, spec_decode_metadata)
