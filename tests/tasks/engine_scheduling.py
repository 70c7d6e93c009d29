"""Ratchet's schedulers over a model runner that samples by arithmetic, so that the expected responses are known."""

import itertools
import json
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from tasks.data.backends import GENERATED
from tasks.engine.ends import complete_after
from tasks.engine.protocol import EngineSpec, Sampling

VOCABULARY = 32
BLOCK = 4
TEXTS = ["".join(signs) for size in (1, 2, 3) for signs in itertools.product("abc", repeat=size)][:VOCABULARY]
BYTES = [text.encode() for text in TEXTS]
"""Texts of the tokens: a stop text may begin and end within one."""


def write_tokenizer(directory: str) -> None:
    """Write a tokenizer with these tokens."""
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(TEXTS)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(Path(directory, "tokenizer.json")))
    Path(directory, "tokenizer_config.json").write_text(json.dumps(GENERATED))


def token_at(seed: int, position: int) -> int:
    """The token that a request samples at a position of its sequence."""
    return (seed * 2654435761 + position * 40503 + (position * seed >> 3)) % 1000003 % VOCABULARY


def response(prompt: list[int], seed: int, sampling: Sampling) -> list[int]:
    """All tokens that a request samples."""
    sampled: list[int] = []
    while len(sampled) < sampling.max_tokens and not (sampled and sampled[-1] in sampling.stop_token_ids):
        sampled.append(token_at(seed, len(prompt) + len(sampled)))
    return sampled[: complete_after(sampled, sampling.stop, BYTES)]


class CountingRunner:
    """State of requests in vLLM's second model runner, with checks of its inputs."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.seeds: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.steady = 0  # steps with the same requests as the previous one
        self._before: tuple[int, list[str]] = 0, []

    def step(self, output: Any) -> Any:
        """Execute a step; its samples, as that runner returns them."""
        self._update(output)
        order = sorted(output.num_scheduled_tokens, key=lambda name: output.num_scheduled_tokens[name] != 1)
        names = self._names(output, order)
        sampled = [self._sample(name, output.num_scheduled_tokens[name]) for name in order]
        return _arrays(names, sampled)

    def _update(self, output: Any) -> None:
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            for kept in (self.tokens, self.computed, self.blocks, self.seeds):
                kept.pop(name, None)
        for new in output.scheduled_new_reqs:
            name, self.seeds[new.req_id] = new.req_id, new.sampling_params.seed
            self.tokens[name], self.computed[name] = list(new.prefill_token_ids), new.num_computed_tokens
            (self.blocks[name],) = map(list, new.block_ids)
        cached = output.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            assert self.computed[name] == computed
            self.blocks[name] += blocks[0] if blocks else []
        held = [block for blocks in self.blocks.values() for block in blocks[1:]]  # the first may be a shared prefix
        assert len(held) == len(set(held))

    def _names(self, output: Any, order: list[str]) -> list[str]:
        number = output.planned.number if getattr(output, "alone", False) else 0
        again, self._before = number and number == self._before[0], (number, order)
        if not again:
            return order
        self.steady += 1
        assert not output.scheduled_new_reqs
        return []

    def _sample(self, name: str, count: int) -> int | None:
        tokens = self.tokens[name]
        self.computed[name] += count
        assert self.computed[name] <= len(self.blocks[name]) * BLOCK
        assert self.computed[name] <= len(tokens)
        if self.computed[name] < len(tokens):
            return None
        tokens.append(token_at(self.seeds[name], len(tokens)))
        return tokens[-1]


def _arrays(names: list[str], sampled: list[int | None]) -> Any:
    from vllm.v1.outputs import LogprobsLists

    from tasks.engine.vllm.steps import Arrays

    tokens = np.array([token or 0 for token in sampled], dtype=np.int64)
    return Arrays(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        logprobs=LogprobsLists(tokens[:, None], -tokens[:, None].astype(np.float32), np.empty(0, np.int32)),
        tokens=tokens,
        counts=np.array([token is not None for token in sampled], dtype=np.int32),
    )


class Schedulers:
    """Runs them, in the process of the engines."""

    def __init__(self) -> None:
        self.silent = False

    def run(self, directory: str, seed: int, ahead: bool, blocks: int, together: int) -> dict[str, Any]:
        """Requests that arrive, end, are dropped and lose their blocks while others run.

        Args:
            ahead: plan a step while the previous one is computed.
            blocks: of the key-value cache.
            together: most requests of a step.

        Returns:
            `found` and `expected` responses by name, the names of `dropped` requests, which are found up to there, the
            number of `steady` steps, and
            the number `left` of rows, responses, requests and used blocks.
        """
        scheduler, add = self._scheduler(directory, ahead, blocks, together)
        generator, runner = random.Random(seed), CountingRunner()
        expected, found, dropped = {}, {}, set()
        flying: deque[Any] = deque()
        for number in range(10_000):
            if number < 300 and generator.random() < 0.15:
                for _ in range(generator.randrange(1, 6)):
                    name = f"{len(expected)}"
                    expected[name] = add(name, generator)
            if expected and generator.random() < 0.02:
                name = generator.choice(list(expected))
                self._drop(scheduler, name)
                dropped |= {name} - set(found)
            if generator.random() < 0.01:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            if number == 100:
                time.sleep(0.06)
                self.silent = True
            if scheduler.has_requests():
                output = scheduler.schedule()
                flying.append((output, runner.step(output) if output.num_scheduled_tokens else runner._update(output)))
            while len(flying) > (1 if ahead and scheduler.has_requests() else 0):
                self._update(scheduler, *flying.popleft(), found)
            if number > 300 and not scheduler.has_requests() and not flying:
                break
        left = len(scheduler._rows), len(scheduler._responses), len(scheduler.requests), len(scheduler.running)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return {
            "found": found,
            "expected": expected,
            "dropped": dropped,
            "steady": runner.steady,
            "left": (*left, blocks - 1 - free),
        }

    def _update(self, scheduler: Any, output: Any, sampled: Any, found: dict[str, list[int]]) -> None:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        messages = scheduler.update_from_output(output, sampled or EMPTY_MODEL_RUNNER_OUTPUT)
        assert messages or not self.silent, "the scheduler shows no life"
        self.silent = False
        for message in messages.values():
            for last in message.outputs:
                assert last.request_id not in found
                found[last.request_id] = last.new_token_ids
                logprobs = [] if last.new_logprobs is None else last.new_logprobs.logprobs[:, 0].tolist()
                assert logprobs == [-float(token) for token in last.new_token_ids]

    def _drop(self, scheduler: Any, name: str) -> None:
        from vllm.v1.request import RequestStatus

        scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def _scheduler(self, directory: str, ahead: bool, blocks: int, together: int) -> tuple[Any, Any]:
        import torch
        from vllm import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        from tasks.engine.vllm.core import sampling_parameters, vllm_arguments
        from tasks.engine.vllm.scheduler import WholeResponses, WholeResponsesAhead

        spec = EngineSpec(model_dir=directory, max_model_len=96, max_num_seqs=together)
        arguments = vllm_arguments(spec) | {"block_size": BLOCK, "max_num_batched_tokens": 96, "max_num_seqs": together}
        config = EngineArgs(**arguments, enable_prefix_caching=True).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.enable_chunked_prefill = True
        cache = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        group = KVCacheGroupSpec(["layer"], cache)
        kind = WholeResponsesAhead if ahead else WholeResponses
        manager = StructuredOutputManager(config)
        scheduler = kind(config, KVCacheConfig(blocks, [], [group]), manager, block_size=BLOCK, hash_block_size=BLOCK)
        scheduler.use_v2_model_runner = True
        digest = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(digest)
        hasher = get_request_block_hasher(BLOCK, digest)

        def add(name: str, generator: random.Random) -> list[int]:
            prompt = [generator.randrange(VOCABULARY) for _ in range(generator.randrange(1, 30))]
            stops = tuple(generator.sample(range(VOCABULARY), generator.choice((0, 1, 3))))
            texts = ["".join(generator.choices("abc", k=generator.randrange(3, 9))) for _ in range(2)]
            stop = tuple(texts[: generator.choice((0, 0, 1, 2))])
            sampling = Sampling(max_tokens=generator.randrange(1, 60), stop_token_ids=stops, stop=stop)
            seed = generator.randrange(1 << 62)
            scheduler.add_request(Request(name, prompt, sampling_parameters(sampling, seed), None, block_hasher=hasher))
            return response(prompt, seed, sampling)

        return scheduler, add
