"""Survey of a worker's live model, which every update needs. Imports torch and vLLM."""

from collections.abc import Collection
from functools import cached_property

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from storage.errors import SyncMismatch
from tasks.engine.vllm.landing import (
    Landing,
    Layers,
    Place,
    landed_part,
    landing_of,
    loadable_parameters,
    loaded_parameters,
    named_layers,
    own_parameters,
)
from trainer_core.weights.digest import PreparedDigests, tensor_digests

_WORD = 8  # bytes


class Survey:
    """A worker's live model as it is now. It holds live tensors, and lives for one update. To look takes about as long
    as the trainer needs to plan, and depends on nothing of the plan: it is done meanwhile."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def look(self) -> None:
        """Look now at what an update will need."""
        if self.in_place:
            _ = self.storage, self.digests, self.layout, self.latent, self.words
        if self.landing is None:
            _ = self.parameters

    @cached_property
    def layers(self) -> Layers:
        """All modules by all of their names."""
        return named_layers(self.model)

    @cached_property
    def latent(self) -> dict[str, MLAAttention]:
        """The layers that compute with matrices which they derive from others."""
        return {name: layer for name, layer in self.layers.items() if isinstance(layer, MLAAttention)}

    @cached_property
    def landing(self) -> Landing | None:
        """Places of a checkpoint's tensors; None if they are not known."""
        return landing_of(self.layers)

    @cached_property
    def places(self) -> dict[str, Place]:
        """The table by name of the tensor; empty if it is not known."""
        return {} if self.landing is None else self.landing.places

    @cached_property
    def in_place(self) -> bool:
        """True if all parameters are used on a card where loaders fill them, and the place of each tensor is known."""
        on_card = model_device(self.model).type == "cuda"
        return on_card and self.landing is not None and all(map(_used_as_loaded, self.layers.values()))

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Names of all parameters that come from a checkpoint."""
        return frozenset(loaded_parameters(self.layers))

    @cached_property
    def parts(self) -> dict[str, torch.Tensor]:
        """Views of the parts of a checkpoint's tensors in this worker's live parameters, by name."""
        return {} if self.landing is None else held_parts(self.layers, self.landing, self.landing.places)

    @cached_property
    def digests(self) -> PreparedDigests:
        """Of what `parts` will hold, in their order."""
        return PreparedDigests(list(self.parts.values()))

    @cached_property
    def words(self) -> dict[str, torch.Tensor]:
        """`parts` as words of 8 bytes, (words,) int64 each, where they are whole words in one piece."""
        return {name: part.view(-1).view(torch.int64) for name, part in self.parts.items() if _is_words(part)}

    @cached_property
    def storage(self) -> dict[tuple[int, str], int]:
        """Address of each parameter, by the identity of its layer and its name there."""
        return addresses(self.model)

    @cached_property
    def layout(self) -> int:
        """Identity, within this process, of what lies where."""
        landing = self.landing or Landing()
        return hash(tuple(frozenset(table.items()) for table in (landing.places, landing.shapes, landing.types)))


def model_device(model: torch.nn.Module) -> torch.device:
    """Device of a model's parameters."""
    return next(model.parameters()).device


def _used_as_loaded(layer: torch.nn.Module) -> bool:
    """True if kernels on a card use a layer's parameters in the form and place in which loaders fill them."""
    live = own_parameters(layer)
    recorded = loadable_parameters(layer) if live else {}
    if live.keys() != recorded.keys() or any(recorded[name].shape != tensor.shape for name, tensor in live.items()):
        return False
    method = processing(layer)
    if method is None:
        return True
    if isinstance(method, UnquantizedFusedMoEMethod):
        kept = method.unquantized_backend == UnquantizedMoeBackend.TRITON
    else:
        kept = type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    # the loaders that split a tensor over workers are still there
    loaders = [getattr(tensor, "weight_loader", None) for name, tensor in live.items() if "weight" in name]
    return kept and all(map(callable, loaders))


def processing(layer: torch.nn.Module) -> QuantizeMethodBase | None:
    """Object that derives the tensors of a layer's kernels from its parameters; None if there is none."""
    method = getattr(layer, "quant_method", None)  # an attribute, or a module of the layer
    return method if isinstance(method, QuantizeMethodBase) else None


def found(layers: Layers, landing: Landing, names: Collection[str]) -> dict[str, str]:
    """Digests of the parts of tensors that this worker's live parameters hold now."""
    return named_digests(held_parts(layers, landing, names))


def held_parts(layers: Layers, landing: Landing, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The parts of tensors that this worker's live parameters hold, as views."""
    return parts_in({name: layers[landing.places[name].layer] for name in names if name in landing.places}, landing)


def named_digests(parts: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digest of each."""
    return dict(zip(parts, tensor_digests(list(parts.values())), strict=True))


def parts_in(layers: dict[str, torch.nn.Module], landing: Landing) -> dict[str, torch.Tensor]:
    """Views of the parts of tensors that layers' parameters hold, given the layer of each tensor."""
    parts: dict[str, torch.Tensor] = {}
    parameters: dict[tuple[str, str], torch.Tensor] = {}
    for name, layer in layers.items():
        place = landing.places[name]
        key = place.layer, place.parameter
        if place.held:
            if key not in parameters:
                parameters[key] = _as_entered(layer, place, landing)
            parts[name] = landed_part(parameters[key], place)
    return parts


def _as_entered(layer: torch.nn.Module, place: Place, landing: Landing) -> torch.Tensor:
    parameter = layer.get_parameter(place.parameter).detach()
    shape = landing.shapes.get((place.layer, place.parameter), tuple(parameter.shape))
    if parameter.shape != shape:
        fact = f"loading changed the shape of {place.layer}.{place.parameter} from {list(shape)} to"
        raise SyncMismatch(f"{fact} {list(parameter.shape)}: it cannot be found what landed there")
    return parameter


def addresses(model: torch.nn.Module) -> dict[tuple[int, str], int]:
    """Address of each parameter, by the identity of its layer and its name there."""
    return {
        (id(layer), name): tensor.data_ptr()
        for layer in model.modules()
        for name, tensor in layer._parameters.items()
        if tensor is not None
    }


def _is_words(part: torch.Tensor) -> bool:
    size = part.element_size()
    return part.is_contiguous() and not (part.storage_offset() * size % _WORD or part.numel() * size % _WORD)
