"""Two ways of loading arrived tensors into vLLM's live model, and what is found in its parameters afterwards.

Imports torch and vLLM.
"""

from collections.abc import Collection, Iterator
from typing import Any, Protocol, cast

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from storage.errors import SyncMismatch
from tasks.engine.landing import Landing, Place, landed_part, loadable_parameters, named_layers
from trainer_core.weights.digest import BegunDigests, prepare_digests, tensor_digests


class Lane(Protocol):
    """A way of loading."""

    keeps_views: bool
    """Whether loaders may look at a tensor later than at once, so that it must not lie in an arena."""

    def begin(self) -> None:
        """Prepare the model; from now on it must not compute."""
        ...

    def finish(self) -> None:
        """Derive from the parameters what kernels use."""
        ...

    def look(self) -> None:
        """Begin to see what the parameters hold, after `finish`; a card is not waited for."""
        ...

    def landed(self) -> dict[str, str]:
        """Digest of the part of each tensor that was found in a parameter, by name of the checkpoint's tensor; after
        `look`.
        """
        ...

    def abandon(self) -> None:
        """Leave the model in a state in which the next update can begin."""
        ...


class InPlace:
    """vLLM's loaders write into the live parameters, which kernels use as they are. CUDA graphs stay valid: storage is
    never replaced."""

    keeps_views = False

    def __init__(self, model: torch.nn.Module, config: VllmConfig, landing: Landing, names: Collection[str]) -> None:
        self._model, self._config = model, config
        self._storage = _addresses(model)
        parts = held_parts(model, landing, names)
        self._names, self._digests = list(parts), prepare_digests(list(parts.values()))
        self._begun: BegunDigests | None = None

    def begin(self) -> None:
        """See `Lane.begin`: all is prepared."""

    def finish(self) -> None:
        """See `Lane.finish`.

        Raises:
            SyncMismatch: a parameter was moved, so that CUDA graphs would read the old one.
        """
        with set_current_vllm_config(self._config):
            latent = {name: layer for name, layer in self._model.named_modules() if isinstance(layer, MLAAttention)}
            for layer in latent.values():  # it multiplies by matrices that it derives from kv_b_proj
                layer.process_weights_after_loading(self._config.model_config.dtype)
        _check_derived(latent)
        moved = sorted(name for name, address in _addresses(self._model).items() if address != self._storage[name])
        if moved:
            raise SyncMismatch(f"loading moved the parameter {moved[0]}: CUDA graphs would go on reading the old one")

    def look(self) -> None:
        """See `Lane.look`."""
        self._begun = self._digests.begin()

    def landed(self) -> dict[str, str]:
        """See `Lane.landed`."""
        return {} if self._begun is None else dict(zip(self._names, self._begun.read(), strict=True))

    def abandon(self) -> None:
        """See `Lane.abandon`: the next update writes over everything."""


class LayerWise:
    """vLLM's layer-wise reload: for kernels that use another form of the parameters than the checkpoint's.

    A layer's parameters are looked at after its loaders and before its post-processing, which may repack or empty them.
    """

    keeps_views = True

    def __init__(
        self, model: torch.nn.Module, config: VllmConfig, landing: Landing | None, names: Collection[str]
    ) -> None:
        self._model, self._config, self._landing = model, config, landing or Landing()
        self._landed: dict[str, str] = {}
        self._tied = list(tied_layers(model))  # while an update is open it no longer shows
        layers = named_layers(model)
        self._names: dict[torch.nn.Module, list[str]] = {}
        for name in names:
            if name in self._landing.places:
                self._names.setdefault(layers[self._landing.places[name].layer], []).append(name)
        self._observed: list[QuantizeMethodBase] = []

    def begin(self) -> None:
        """See `Lane.begin`."""
        for layer in self._names:
            if method := _processing(layer):
                self._observe(method)
        initialize_layerwise_reload(self._model)

    def finish(self) -> None:
        """See `Lane.finish`."""
        self._close()

    def look(self) -> None:
        """See `Lane.look`: at what no post-processing has shown."""
        unprocessed = [name for layer, names in self._names.items() if _processing(layer) is None for name in names]
        self._landed |= found(self._model, self._landing, unprocessed)

    def landed(self) -> dict[str, str]:
        """See `Lane.landed`."""
        return self._landed

    def abandon(self) -> None:
        """See `Lane.abandon`: half-filled layers would count as filled in the next update."""
        self._close()

    def _observe(self, method: QuantizeMethodBase) -> None:
        process = method.process_weights_after_loading

        def look_and_process(layer: torch.nn.Module) -> None:
            names = self._names.get(layer, [])
            self._landed |= _digests(_parts(dict.fromkeys(names, layer), self._landing))
            process(layer)

        self._observed.append(method)
        vars(method)["process_weights_after_loading"] = look_and_process

    def _close(self) -> None:
        try:
            finalize_layerwise_reload(self._model, self._config.model_config)
            for layer, method in self._tied:
                method.process_weights_after_loading(layer)
        finally:
            for method in self._observed:
                del vars(method)["process_weights_after_loading"]
            self._observed = []


def lane_of(model: torch.nn.Module, config: VllmConfig, landing: Landing | None, names: Collection[str]) -> Lane:
    """The quickest way of loading that is right for a model."""
    if landing is not None and model_device(model).type == "cuda" and all(map(_used_as_loaded, model.modules())):
        return InPlace(model, config, landing, names)
    return LayerWise(model, config, landing, names)


def model_device(model: torch.nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(model.parameters()).device


def _used_as_loaded(layer: torch.nn.Module) -> bool:
    """Whether kernels on a card use a layer's parameters in the form and place in which loaders fill them."""
    recorded = loadable_parameters(layer)
    live: dict[str, torch.Tensor] = dict(layer.named_parameters(recurse=False))
    if any(recorded[name].shape != tensor.shape for name, tensor in live.items()):
        return False
    method = _processing(layer)
    if method is None:
        return True
    if isinstance(method, UnquantizedFusedMoEMethod):
        kept = method.unquantized_backend == UnquantizedMoeBackend.TRITON
    else:
        kept = type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return kept and _loadable(live)


def _processing(layer: torch.nn.Module) -> QuantizeMethodBase | None:
    """What derives from a layer's parameters what its kernels use, if anything does."""
    method = getattr(layer, "quant_method", None)  # an attribute, or a module of the layer
    return method if isinstance(method, QuantizeMethodBase) else None


def _loadable(parameters: dict[str, torch.Tensor]) -> bool:
    """Whether the loaders that split a tensor over workers are still there."""
    return all(
        callable(getattr(tensor, "weight_loader", None)) for name, tensor in parameters.items() if "weight" in name
    )


def tied_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, QuantizeMethodBase]]:
    """The layers whose parameters belong to a layer before them, as the output layer's may to the embedding, each with
    the method that derives from them what its kernel uses: on CPU a packed copy.

    vLLM's reload processes only the first of both (limitation 2 of `vllm.model_executor.model_loader.reload`).
    """
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own and own <= seen and isinstance(layer, VocabParallelEmbedding):
            yield layer, layer.quant_method
        seen |= own


def found(model: torch.nn.Module, landing: Landing, names: Collection[str]) -> dict[str, str]:
    """Digests of the parts of tensors that this worker's live parameters hold now."""
    return _digests(held_parts(model, landing, names))


def held_parts(model: torch.nn.Module, landing: Landing, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The parts of tensors that this worker's live parameters hold, as views."""
    layers = named_layers(model)
    return _parts({name: layers[landing.places[name].layer] for name in names if name in landing.places}, landing)


def _check_derived(layers: dict[str, MLAAttention]) -> None:
    """Compare the matrices that latent attention derives from its projection with the projection as it is now."""
    same: list[torch.Tensor] = []
    for layer in layers.values():
        weight = cast(torch.Tensor, layer.kv_b_proj.weight)
        both = weight.T.view(layer.kv_lora_rank, layer.num_heads, -1)  # (rank, heads, key + value)
        keys, values = both.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
        derived = cast(Any, layer)  # by post-processing
        pairs = ((keys.permute(1, 2, 0), derived.W_UK_T), (values.transpose(0, 1), derived.W_UV))
        same.append(torch.stack([(ours == theirs).all() for ours, theirs in pairs]).all())
    for name, right in zip(layers, torch.stack(same).tolist() if same else [], strict=True):
        if not right:
            raise SyncMismatch(f"the matrices that {name} derives from its kv_b_proj are not those of the new weights")


def _digests(parts: dict[str, torch.Tensor]) -> dict[str, str]:
    return dict(zip(parts, tensor_digests(list(parts.values())), strict=True))


def _parts(layers: dict[str, torch.nn.Module], landing: Landing) -> dict[str, torch.Tensor]:
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
        raise SyncMismatch(
            f"loading changed the shape of {place.layer}.{place.parameter} from {list(shape)} to "
            f"{list(parameter.shape)}: it cannot be found what landed there"
        )
    return parameter


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
