"""The end of a critic: a number for each position instead of logits."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.bridge.models.conversion.utils import unwrap_model

_SCORE, _CONSTANT = "score.weight", "score.bias"


class ValueHead(torch.nn.Linear):
    """Output layer of a critic, whole on each rank of the last pipeline stage: a number for each position, in fp32."""

    def forward(self, hidden: torch.Tensor, weight: None = None) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Values (R, 1, 1) of hidden states (R, 1, H), and no bias that is still to be added."""
        assert weight is None, "a critic does not share its output layer"
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()), None

    def begin(self, given: Any) -> None:
        """Take row and constant of a sequence classifier, whose tensors are `given` by name; for one that is not there
        0."""
        there = given.source.get_all_keys()
        with torch.no_grad():
            for name, tensor in ((_SCORE, self.weight), (_CONSTANT, self.bias)):
                tensor.copy_(given[name] if name in there else torch.zeros_like(tensor))


def end_with_values(modules: Sequence[Any], hidden_size: int) -> None:
    """Replace the output layer of a critic, on the rank that has it."""
    for module in unwrap_model(modules):
        if "output_layer" in module._modules:
            like = module.output_layer.weight
            module.output_layer = ValueHead(hidden_size, 1, device=like.device, dtype=like.dtype)


@contextlib.contextmanager
def heads_aside(modules: Sequence[Any], given: Any) -> Iterator[None]:
    """Block in which megatron-bridge, which knows no critic, does not see the output layer of one; it then takes its
    end from the tensors that are `given` by name."""
    ends = [module for module in unwrap_model(modules) if isinstance(module._modules.get("output_layer"), ValueHead)]
    heads = [(module, module._modules.pop("output_layer")) for module in ends]
    try:
        yield
    finally:
        for module, head in heads:
            module.output_layer = head
    for _, head in heads:
        head.begin(given)
