"""The bare side of the rollout bench: vLLM alone in this process, as its users drive it.

    python -m infra.bench.bare_engine KIND SPEC

reads requests, one JSON object a line, from standard input and answers each with what it took. KIND is `async`
(`AsyncLLM`, final outputs only, all requests queued at once) or `generate` (`LLM.generate`).
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
from pydantic import BaseModel

from tasks.engine.protocol import EngineSpec, Sampling

ANSWER = "bare-engine:"
"""Begins the lines that are answers; vLLM and what it starts may print others."""


class Requests(BaseModel):
    """Requests of one round."""

    prompts: list[list[int]]
    """Token ids."""
    seeds: list[int]
    """One for each prompt."""
    sampling: Sampling
    """Sampling parameters."""


class Took(BaseModel):
    """Cost of one round."""

    seconds: float
    """On the wall clock."""
    processor_s: float
    """Processor time of all processes of the side."""
    tokens: int
    """Response tokens."""


def processor_seconds(process: psutil.Process) -> float:
    """Processor time of a process and its descendants so far."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _parameters(requests: Requests) -> list[Any]:
    from vllm.sampling_params import RequestOutputKind

    from tasks.engine.core import sampling_parameters

    found = [sampling_parameters(requests.sampling, seed) for seed in requests.seeds]
    for one in found:  # what vLLM has that makes its own client cheap
        one.output_kind = RequestOutputKind.FINAL_ONLY
        one.flat_logprobs = True  # lists of numbers instead of a dict and objects per token
        one.detokenize = False
    return found


def _async(spec: EngineSpec) -> Callable[[Requests], int]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM

    from tasks.engine.core import vllm_arguments

    loop = asyncio.new_event_loop()

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**vllm_arguments(spec)))

    engine = loop.run_until_complete(start())
    rounds = iter(range(1 << 30))

    async def one(name: str, prompt: list[int], how: Any) -> int:
        tokens = 0
        async for output in engine.generate(tokens_input(prompt), how, name):
            tokens = len(output.outputs[0].token_ids)
        return tokens

    async def all_of(requests: Requests) -> int:
        turn = next(rounds)
        given = zip(requests.prompts, _parameters(requests), strict=True)
        calls: list[Coroutine[Any, Any, int]] = [
            one(f"{turn}-{number}", prompt, how) for number, (prompt, how) in enumerate(given)
        ]
        return sum(await asyncio.gather(*calls))

    return lambda requests: loop.run_until_complete(all_of(requests))


def _generate(spec: EngineSpec) -> Callable[[Requests], int]:
    from vllm import LLM

    from tasks.engine.core import vllm_arguments

    engine = LLM(**vllm_arguments(spec))

    def run(requests: Requests) -> int:
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in requests.prompts]
        outputs = engine.generate(prompts, _parameters(requests), use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def main() -> None:
    """Answer until standard input ends."""
    kind, spec = sys.argv[1], EngineSpec.model_validate_json(sys.argv[2])
    run = _async(spec) if kind == "async" else _generate(spec)
    this = psutil.Process()
    for line in sys.stdin:
        requests = Requests.model_validate_json(line)
        clock, used = time.perf_counter(), processor_seconds(this)
        tokens = run(requests)
        took = Took(
            seconds=time.perf_counter() - clock, processor_s=processor_seconds(this) - used, tokens=tokens
        )  # fmt: skip
        sys.stdout.write(f"{ANSWER}{took.model_dump_json()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
