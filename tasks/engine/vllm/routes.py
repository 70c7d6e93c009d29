"""The experts that a worker's model gave each token, in a table beside the key-value cache: a position has its row by
its slot. So a prompt from the prefix cache has routes too, and what is computed again is noted again.

vLLM returns such routes with its first model runner on cards alone. Here routers write into the table themselves, also
as part of a CUDA graph; the host reads the rows of a request when it ends. Imports vLLM."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import cpu_fused_moe
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from storage.errors import InputError
from tasks.engine.vllm import ROUTES

_Blocks = Mapping[str, torch.Tensor]


class Routes:
    """Routes by slot of the key-value cache, and those of requests that have ended and were not taken yet."""

    def __init__(self, model: torch.nn.Module, config: VllmConfig, cache: KVCacheConfig, device: torch.device) -> None:
        """Let the routers of the model note what they choose. Raises InputError: they choose where nobody sees it."""
        runners = sorted(
            (module for module in model.modules() if isinstance(module, MoERunner)), key=lambda one: one.layer_id
        )
        if not runners or len(cache.kv_cache_groups) != 1:
            raise _refusal("layers with experts", f"{len(runners)} of them and {len(cache.kv_cache_groups)} caches")
        (group,) = cache.kv_cache_groups
        self._layer, self._size = group.layer_names[0], config.cache_config.block_size
        experts, chosen = runners[0].routed_experts.global_num_experts, cast(BaseRouter, runners[0].router).top_k
        shape = cache.num_blocks * self._size + 1, len(runners), chosen  # the last row takes what fills a step up
        self._by_slot = torch.zeros(shape, dtype=torch.uint8 if experts <= 256 else torch.int16, device=device)
        self._kept: dict[str, torch.Tensor] = {}
        self._taken: set[str] = set()
        for place, runner in enumerate(runners):
            _watch(runner, partial(self._note, place))

    def _note(self, place: int, chosen: torch.Tensor) -> None:
        """Write the (T, k) experts of the tokens of a step."""
        slots = cast(dict[str, torch.Tensor], get_forward_context().slot_mapping)
        if self._layer in slots:
            at = slots[self._layer][: len(chosen)]
            self._by_slot[:, place].index_put_((at,), chosen.to(self._by_slot.dtype))

    def keep(self, blocks: _Blocks) -> None:
        """Read the rows of requests that have ended, before others get their blocks."""
        due = {name: ids for name, ids in blocks.items() if name not in self._taken}
        self._taken -= blocks.keys()
        self._kept |= self._rows(due)

    def take(self, counts: Mapping[str, int], blocks: Callable[[Iterable[str]], _Blocks]) -> list[bytes]:
        """The routes of the first positions of requests that have ended, so many of each, once."""
        live = blocks([name for name in counts if name not in self._kept])
        self._taken |= live.keys()
        found = self._kept | self._rows(live)
        for name in counts:
            self._kept.pop(name, None)
        return [found[name][:count].numpy().tobytes() if count else b"" for name, count in counts.items()]

    def _rows(self, blocks: _Blocks) -> dict[str, torch.Tensor]:
        if not blocks:
            return {}
        by_block = self._by_slot[:-1].unflatten(0, (-1, self._size))
        found = by_block[torch.cat(list(blocks.values())).to(by_block.device, torch.long)].flatten(0, 1).cpu()
        return dict(zip(blocks, found.split([len(ids) * self._size for ids in blocks.values()]), strict=True))


class Routing:
    """Part of a model runner that keeps routes, if the engine is to tell them."""

    routes: Routes | None = None

    def blocks_of(self, names: Iterable[str]) -> _Blocks:
        """Blocks of the cache that the requests have, of those that the runner still knows."""
        raise NotImplementedError

    def begin_routes(self, cache: KVCacheConfig) -> None:
        """Called with the new cache; raises as `Routes`."""
        runner = cast(Any, self)
        if runner.vllm_config.additional_config.get(ROUTES):
            self.routes = Routes(runner.model, runner.vllm_config, cache, runner.device)

    def keep_routes(self, ended: Iterable[str]) -> None:
        """Called before the runner forgets the requests."""
        if self.routes is not None:
            self.routes.keep(self.blocks_of(ended))

    def take_routes(self, counts: Mapping[str, int]) -> list[bytes]:
        """See `Routes.take`."""
        assert self.routes is not None, "the engine was started without routes"
        return self.routes.take(counts, self.blocks_of)


def _watch(runner: MoERunner, note: Callable[[torch.Tensor], None]) -> None:
    """Let a layer tell its choices. Kernels that choose themselves do not, but on CPU they call a function for it."""
    experts, router = runner.routed_experts, runner.router
    if not experts.quant_method.is_monolithic and isinstance(router, BaseRouter):
        router.set_capture_fn(note)
        return
    if not current_platform.is_cpu():
        raise _refusal("routers that tell what they choose", f"{type(experts.quant_method).__name__} of a kernel")
    forward = experts.forward_monolithic

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        choose = cpu_fused_moe.select_experts

        def noted(*given: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
            weights, chosen = choose(*given, **more)
            note(chosen)
            return weights, chosen

        cpu_fused_moe.select_experts = noted
        try:
            return forward(*arguments, **options)
        finally:
            cpu_fused_moe.select_experts = choose

    vars(experts)["forward_monolithic"] = watched


def _refusal(needed: str, found: str) -> InputError:
    return InputError(
        f"train.experts.replay = true needs {needed} in the engine, and this model has {found}: set it to false"
    )
