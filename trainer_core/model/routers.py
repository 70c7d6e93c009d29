"""Routers of a mixture of experts: counts that leave out padding, the strength of the auxiliary loss, and experts that
are given instead of chosen."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from trainer_core.batches.routes import Routing
from trainer_core.platform.local_layers import has_experts


class Balance:
    """Auxiliary loss that balances the load of experts, over the micro-batches of one pass.

    Megatron divides all gradients by the response tokens of a pass, while the auxiliary loss is one of positions,
    prompts included. So each micro-batch counts with its share of the positions, and their sum is multiplied by that
    divisor: the coefficient acts as configured, wherever prompts end."""

    def __init__(self, routers: Iterable[Any]) -> None:
        self._divisor, self._positions = 0, 0
        self._held = torch.zeros(())
        self._terms: list[torch.Tensor] = []
        for router in routers:
            router._apply_aux_loss = self._counted(router, router._apply_aux_loss)
            router._apply_seq_aux_loss = self._counted(router, router._apply_seq_aux_loss)
            router.attach_and_log_load_balancing_loss = self._attach

    def begin(self, response_tokens: int, positions: int) -> None:
        """Begin a pass; response tokens and positions are those of all ranks."""
        self._divisor, self._positions = response_tokens, positions
        self._terms.clear()

    def own_sum(self) -> float:
        """This rank's part of the auxiliary loss of the pass, coefficient included; the parts of all ranks add up."""
        return float(torch.stack(self._terms).double().sum()) if self._terms else 0.0

    def _counted(self, router: Any, apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Auxiliary loss of a router that counts a micro-batch's positions over all ranks that hold some. A micro-batch
        of padding alone has a loss of 0: upstream divides by its counted tokens."""

        def applied(
            probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *sizes: int, with_padding_mask: bool
        ) -> torch.Tensor:
            choices = reduce_from_tensor_model_parallel_region(routing_map.sum(), router.tp_cp_group)
            self._held = choices / router.topk
            if with_padding_mask:  # a sequence-parallel rank may hold no tokens
                scores, routing_map = scores * (choices != 0), routing_map | (choices == 0)  # (T, E) each
            return apply(probs, scores, routing_map, *sizes, with_padding_mask=with_padding_mask)

        return applied

    def _attach(
        self, activation: torch.Tensor, _coefficient: float, loss: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Replace the router's own method; `loss` is that of this rank's positions."""
        share = loss * self._held / self._positions
        self._terms.append(share.detach())
        return MoEAuxLossAutoScaler.apply(activation, share * self._divisor)  # pyright: ignore[reportReturnType]


class Replay:
    """Gives the routers of a model the experts by which the engine sampled."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: GPTModelProvider) -> None:
        layers = [layer + 1 for layer in range(config.num_layers) if has_experts(config, layer)]  # numbers from 1
        self.routing = Routing(cast(int, config.num_moe_experts), len(layers), cast(int, config.moe_router_topk))
        self._divided = config.sequence_parallel
        self._routers = {chunk: dict(_given(chunk, layers)) for chunk in chunks}

    def begin(self, chunk: torch.nn.Module, routes: torch.Tensor | None) -> None:
        """Begin a pass of a micro-batch through a chunk, with its (T, layers * k) routes."""
        if routes is not None and self._divided:
            group = cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())
            routes = routes.chunk(group.size())[group.rank()]  # (T, layers * k) -> (T / tp, layers * k)
        for place, given in self._routers[chunk].items():
            given.begin(None if routes is None else routes.unflatten(1, (self.routing.layers, -1))[:, place].long())

    def forget(self) -> None:
        """Forget what a pass that failed has left."""
        for routers in self._routers.values():
            for given in routers.values():
                given.again.clear()


class _Given:
    """Experts of the positions of a router, in place of megatron-core's `RouterReplay`. That has a list of the
    process, which a critic's and a reference's routers would enter, and must be told which pass it is in.

    A layer whose activations are computed again runs twice: without gradients, and with them in the backward pass.
    Meanwhile others may begin, but they are computed again in the order in which they began."""

    def __init__(self) -> None:
        self._now: torch.Tensor | None = None
        self._learns = False
        self.again: deque[torch.Tensor | None] = deque()

    def begin(self, experts: torch.Tensor | None) -> None:
        """Begin a pass with these (T, k) experts."""
        self._now, self._learns = experts, torch.is_grad_enabled()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and experts of each position, (T, k) both; called by the router, with its (T, E) scores."""
        own, given = default_compute_topk(scores, topk, num_groups, group_topk), self._experts()
        if given is None:
            return own
        chosen = torch.where(given < 0, own[1], given)
        return scores.gather(1, chosen), chosen

    def _experts(self) -> torch.Tensor | None:
        if not self._learns:
            return self._now
        if not torch.is_grad_enabled():
            self.again.append(self._now)
            return self._now
        return self.again.popleft() if self.again else self._now


def _given(chunk: torch.nn.Module, layers: Sequence[int]) -> Iterable[tuple[int, _Given]]:
    """Attach to each router of a chunk; by its place among all layers with experts."""
    for router in chunk.modules():
        if isinstance(router, TopKRouter):
            given = _Given()
            vars(router)["router_replay"] = given
            yield layers.index(cast(int, router.layer_number)), given


def prepare_routers(modules: Iterable[torch.nn.Module], balanced: bool) -> Balance | None:
    """Correct the counts of the routers among the modules, and if `balanced` give them an auxiliary loss."""
    routers = [module for module in modules if isinstance(module, TopKRouter)]
    for router in routers:
        if router.enable_expert_bias:
            _count_without_filling(router)
    return Balance(routers) if balanced else None


def _count_without_filling(router: Any) -> None:
    """Let a router with a bias leave out padding: upstream's mask lacks the axis of experts."""
    count = router._apply_expert_bias

    def counted(routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        count(routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))  # (T,) -> (T, 1)

    router._apply_expert_bias = counted
