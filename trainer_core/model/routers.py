"""Routers of a mixture of experts: counts that leave out padding, and the strength of the auxiliary loss."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter


class Balance:
    """Auxiliary loss that balances the load of experts, over the micro-batches of one pass.

    Megatron divides all gradients by the response tokens of a pass, while the auxiliary loss is one of positions,
    prompts included. So each micro-batch counts with its share of the positions, and their sum is multiplied by that
    divisor: the coefficient acts as configured, wherever prompts end.
    """

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
