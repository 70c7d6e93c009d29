"""Three ways of loading arrived tensors into vLLM's live model, and their proof. Imports torch and vLLM."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from storage.errors import RatchetError, SyncMismatch
from tasks.engine.vllm.landing import Landing, Place, named_layers, part_of
from tasks.engine.vllm.quantized import Fp8Layers
from tasks.engine.vllm.survey import Survey, addresses, found, named_digests, parts_in, processing
from trainer_core.weights.digest import BegunDigests
from trainer_core.weights.packing import element_type, views
from trainer_core.weights.plan import PlannedTensor

Planned = Mapping[int, Sequence[PlannedTensor]]  # the tensors of each bucket by its number, by offset
_WORD = 8  # bytes


class PlannedCopies:
    """The copies from one bucket. Parts that lie in one piece on both sides are copied as words by one launch for all
    of them, whatever their types; only where they begin in the bucket is known of them."""

    def __init__(self, planned: Sequence[PlannedTensor], survey: Survey) -> None:
        """`planned` are the tensors of the bucket, by offset; of what the survey has no part of, this worker has no
        use."""
        self._cuts: list[int] = []  # words before a piece, and those of it, one piece after another
        self._into: list[torch.Tensor] = []  # the words of each, (words,) int64
        self._others: list[tuple[PlannedTensor, Place, torch.Tensor]] = []
        self._end = 0
        for tensor in planned:
            if (into := survey.parts.get(tensor.name)) is None:
                continue
            place, words = survey.places[tensor.name], survey.words.get(tensor.name)
            first = None if words is None else _first_word(tensor, place, into)
            if first is None or words is None:
                self._others.append((tensor, place, into))
                continue
            self._cuts += [first - self._end, words.numel()]
            self._into.append(words)
            self._end = first + words.numel()

    def write(self, buffer: torch.Tensor) -> None:
        """Copy from the bucket's buffer, (bytes,) uint8, which begins at a whole word; a card is not waited for."""
        if self._into:
            words = buffer[: buffer.numel() // _WORD * _WORD].view(torch.int64)
            pieces = words.split_with_sizes([*self._cuts, words.numel() - self._end])[1::2]
            torch._foreach_copy_(self._into, list(pieces))  # pyright: ignore[reportPrivateImportUsage]
        for tensor, place, into in self._others:
            ((_, found),) = views([tensor], buffer)
            into.copy_(part_of(found, place.of))


def _first_word(tensor: PlannedTensor, place: Place, into: torch.Tensor) -> int | None:
    """Offset in the bucket, in words, at which the held part of a tensor begins; None if the tensor is converted, or
    its part is not one piece of whole words there."""
    if place.start is None or into.dtype != element_type(tensor.dtype):
        return None
    begin = tensor.offset + place.start * into.element_size()
    return None if begin % _WORD else begin // _WORD


@dataclass(frozen=True)
class Parcel:
    """A bucket that has arrived."""

    number: int
    planned: Sequence[PlannedTensor]  # tensors that it contains
    buffer: torch.Tensor  # (bytes,) uint8

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of everything in it."""
        return views(self.planned, self.buffer)


Arriving = Iterator[Parcel]  # one bucket after another, each until the next one is asked for


class _Loadable(Protocol):
    """Methods that every vLLM model class adds to `torch.nn.Module`."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """Load checkpoint tensors; returns the names of the parameters they went to."""
        ...


class InPlace:
    """vLLM's loaders write into the live parameters, which kernels use as they are; storage is never replaced."""

    keeps_views = False  # True if loaders may read a tensor later, so that it must not lie in an arena

    def __init__(self, survey: Survey, config: VllmConfig) -> None:
        self._model, self._config, self._latent = survey.model, config, survey.latent
        self._parts, self._digests, self._storage = survey.parts, survey.digests, survey.storage
        self._begun: BegunDigests | None = None

    def begin(self) -> None:
        """Prepare the model; from now on it must not compute."""

    def load(self, arriving: Arriving) -> set[str]:
        """Load everything; names of the parameters it went to, as far as loaders report them. Raises SyncMismatch:
        loaders failed, or stopped too early."""
        return by_loaders(self._model, arriving)

    def finish(self) -> None:
        """Derive from the parameters what kernels use."""
        if self._latent:
            with set_current_vllm_config(self._config):
                for layer in self._latent.values():  # it multiplies by matrices that it derives from kv_b_proj
                    layer.process_weights_after_loading(self._config.model_config.dtype)
            _check_derived(self._latent)

    def look(self) -> None:
        """Begin to see what the parameters hold, after `finish`; a card is not waited for."""
        self._begun = self._digests.begin()

    def landed(self) -> dict[str, str]:
        """Digest of the part of each tensor that was found in a parameter, by name of the checkpoint's tensor; after
        `look`. Raises SyncMismatch: a parameter was moved, so that CUDA graphs would read the old one."""
        now = addresses(self._model)
        if moved := [key for key, address in now.items() if address != self._storage.get(key)]:
            paths = {id(layer): path for path, layer in named_layers(self._model).items()}
            names = sorted(f"{paths[layer]}.{name}" for layer, name in moved)
            raise SyncMismatch(f"loading moved the parameter {names[0]}: CUDA graphs would go on reading the old one")
        return {} if self._begun is None else dict(zip(self._parts, self._begun.read(), strict=True))

    def quantized(self) -> dict[str, str]:
        """Digest of all that kernels read as FP8 numbers and scales, by name; after `finish`. Raises SyncMismatch: they
        were not made from the update's weights."""
        return {}

    def abandon(self) -> None:
        """Leave the model in a state in which the next update can begin: it writes over everything."""


class ByTable(InPlace):
    """Writes into the live parameters where the table says, for a table that vLLM's loaders were seen to follow: with a
    launch or two for each bucket. Loaders take 30 to 100 µs of the processor for each tensor."""

    def __init__(self, survey: Survey, config: VllmConfig, planned: Planned) -> None:
        super().__init__(survey, config)
        self._copies = {number: PlannedCopies(own, survey) for number, own in planned.items()}

    def load(self, arriving: Arriving) -> set[str]:
        """See `InPlace.load`; there are no loaders to report anything."""
        for bucket in arriving:
            self._copies[bucket.number].write(bucket.buffer)
        return set()


class LayerWise:
    """vLLM's layer-wise reload: for kernels that use another form of the parameters than the checkpoint's. A layer's
    parameters are looked at after its loaders and before its post-processing, which may repack or empty them."""

    keeps_views = True

    def __init__(self, survey: Survey, config: VllmConfig, planned: Planned) -> None:
        self._model, self._config, self._landing = survey.model, config, survey.landing or Landing()
        self._landed: dict[str, str] = {}
        self._tied = list(tied_layers(self._model))  # while an update is open it no longer shows
        self._names: dict[torch.nn.Module, list[str]] = {}
        for name in (tensor.name for own in planned.values() for tensor in own):
            if name in self._landing.places:
                self._names.setdefault(survey.layers[self._landing.places[name].layer], []).append(name)
        self._observed: list[QuantizeMethodBase] = []
        self._fp8 = Fp8Layers(survey.layers)

    def begin(self) -> None:
        self._fp8.begin()
        for layer in self._names:
            if method := processing(layer):
                self._observe(method)
        initialize_layerwise_reload(self._model)

    def load(self, arriving: Arriving) -> set[str]:
        return by_loaders(self._model, arriving)

    def finish(self) -> None:
        try:
            finalize_layerwise_reload(self._model, self._config.model_config)
            for layer, method in self._tied:
                method.process_weights_after_loading(layer)
        finally:
            for method in self._observed:
                del vars(method)["process_weights_after_loading"]
            self._observed = []

    def look(self) -> None:
        """See `InPlace.look`: at what no post-processing has shown."""
        unprocessed = [name for layer, names in self._names.items() if processing(layer) is None for name in names]
        self._landed |= found(named_layers(self._model), self._landing, unprocessed)

    def landed(self) -> dict[str, str]:
        return self._landed

    def quantized(self) -> dict[str, str]:
        return self._fp8.check()

    def abandon(self) -> None:
        """See `InPlace.abandon`: half-filled layers would count as filled in the next update."""
        self.finish()

    def _observe(self, method: QuantizeMethodBase) -> None:
        process = method.process_weights_after_loading

        def look_and_process(layer: torch.nn.Module) -> None:
            names = self._names.get(layer, [])
            self._landed |= named_digests(parts_in(dict.fromkeys(names, layer), self._landing))
            self._fp8.expect(layer)
            process(layer)

        self._observed.append(method)
        vars(method)["process_weights_after_loading"] = look_and_process


Lane = InPlace | LayerWise


def lane_of(survey: Survey, config: VllmConfig, planned: Planned, followed: bool) -> Lane:
    """The quickest way of loading that is right for a model. `planned` is what each bucket brings; `followed` says that
    loaders were seen to put every tensor where the table of the live model says."""
    if not survey.in_place:
        return LayerWise(survey, config, planned)
    return ByTable(survey, config, planned) if followed else InPlace(survey, config)


def by_loaders(model: torch.nn.Module, arriving: Arriving) -> set[str]:
    """Let vLLM's loaders take what arrives; what they raise becomes an error of ours, which keeps its type on its way.
    Raises SyncMismatch: they failed, or stopped too early."""
    names: list[str] = []

    def told() -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in arriving:
            for name, tensor in bucket.tensors():
                names[:] = [name]
                yield name, tensor

    tensors = told()
    try:
        loaded = cast(_Loadable, model).load_weights(tensors)
    except RatchetError:
        raise
    except Exception as error:
        raise SyncMismatch(f"vLLM's loaders failed at tensor {names} of a weight update: {error!r}") from error
    for name, _ in tensors:
        raise SyncMismatch(f"the engine's loaders stopped before tensor {name}, without saying why")
    return loaded


def tied_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, QuantizeMethodBase]]:
    """The layers whose parameters belong to a layer before them, as the output layer's may to the embedding, each with
    the method that derives from them what its kernel uses: on CPU a packed copy. vLLM's reload processes only the first
    of both (limitation 2 of `vllm.model_executor.model_loader.reload`)."""
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own and own <= seen and isinstance(layer, VocabParallelEmbedding):
            yield layer, layer.quant_method
        seen |= own


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
