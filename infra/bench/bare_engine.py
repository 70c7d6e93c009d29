"""The bare side of the rollout bench: vLLM's `LLM.generate` alone in this process, as its users call it.

    python -m infra.bench.bare_engine SPEC

reads requests, one JSON object a line, from standard input and answers each with its cost.
"""

import sys
import time
from typing import Any

import psutil
from pydantic import BaseModel

from tasks.engine.protocol import EngineSpec, Sampling
from tasks.engine.vllm import Runner

ANSWER = "bare-engine:"
"""Marks the output lines that are answers; vLLM and its processes may print others."""


class Requests(BaseModel):
    """Requests of one round."""

    prompts: list[list[int]]
    """Token ids."""
    seeds: list[int]
    """One for each prompt."""
    sampling: Sampling
    """Sampling parameters."""
    plain: bool = False
    """Sample without seeds and log-probabilities; bare vLLM alone knows it."""


class Took(BaseModel):
    """Cost of one round."""

    seconds: float
    """Seconds on the wall clock."""
    processor_s: float
    """Processor time of all processes of the side."""
    lengths: list[int]
    """Tokens of each response."""
    runner: Runner
    """The model runner of the side."""

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(self.lengths)


def processor_seconds(process: psutil.Process) -> float:
    """Processor time of a process and its descendants so far."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _parameters(requests: Requests) -> list[Any]:
    from vllm.sampling_params import RequestOutputKind

    from tasks.engine.vllm.core import sampling_parameters

    found = [sampling_parameters(requests.sampling, seed) for seed in requests.seeds]
    for one in found:  # settings of vLLM that make its own client cheap
        one.output_kind = RequestOutputKind.FINAL_ONLY
        one.flat_logprobs = True  # lists of numbers instead of a dict and objects per token
        one.detokenize = False
        if requests.plain:
            one.seed = one.logprobs = None
    return found


def main() -> None:
    """Answer until standard input ends."""
    from vllm import LLM

    from tasks.engine.vllm.core import vllm_arguments

    engine = LLM(**vllm_arguments(EngineSpec.model_validate_json(sys.argv[1])))
    runner: Runner = "second" if engine.llm_engine.vllm_config.use_v2_model_runner else "first"
    this = psutil.Process()
    for line in sys.stdin:
        requests = Requests.model_validate_json(line)
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in requests.prompts]
        clock, used = time.perf_counter(), processor_seconds(this)
        outputs = engine.generate(prompts, _parameters(requests), use_tqdm=False)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        seconds, processor_s = time.perf_counter() - clock, processor_seconds(this) - used
        took = Took(seconds=seconds, processor_s=processor_s, lengths=lengths, runner=runner)
        sys.stdout.write(f"{ANSWER}{took.model_dump_json()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
