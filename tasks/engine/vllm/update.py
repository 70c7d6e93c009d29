"""One weight update inside a worker of vLLM: checked before, loaded, and found afterwards. Imports torch and vLLM."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name

from storage.errors import SyncMismatch
from tasks.engine.vllm.landing import part_of
from tasks.engine.vllm.loading import Arriving, Lane, Parcel
from tasks.engine.vllm.survey import Survey, model_device
from trainer_core.weights.digest import BegunDigests, Cut, Outline, PlannedDigests, Whole, thought_of
from trainer_core.weights.packing import element_type, tensors_of
from trainer_core.weights.plan import Bucket, PlannedTensor, WeightPlan
from trainer_core.weights.transports.ends import Receiver

_SHOWN = 4  # names spelled out in a message
_UNUSED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass
class Report:
    digests: dict[str, str]  # `tensor_digest` of what arrived, by name
    landed: int  # tensors that were found again in the live parameters
    bytes: int  # bytes read
    seconds: dict[str, float]  # time by what it was spent on
    parts: dict[str, str]
    """Digest of what the live parameters hold of each tensor, by name, if kernels use them as they were loaded."""
    quantized: dict[str, str]  # digest of all that kernels read as FP8 numbers and scales, by name


@dataclass(frozen=True)
class _Expected:
    """Contents that a bucket must have."""

    arrived: list[str]  # names of its tensors
    held: list[str]  # those of which this worker must hold something
    cut: list[str]  # and those of which it must hold only a part, or another type
    wanted: list[Outline]  # outlines of the digested tensors: those that arrive, followed by the parts


class Update:
    """One update of one worker's model. Everything it knows of the model it has looked up for this update."""

    def __init__(self, survey: Survey, config: VllmConfig, plan: WeightPlan, lane: Lane) -> None:
        """Compare a plan with the live model; nothing is written. `lane` is the way of loading. Raises SyncMismatch: it
        is not what the model needs."""
        check_layout(plan)
        self._survey, self._config, self._plan, self._lane = survey, config, plan, lane
        self._landing = survey.landing
        if self._landing is not None:
            self._landing.check(plan, self._is_unused)
        self._planned = tensors_of(plan)
        self._buckets = {number: self._outlined(planned) for number, planned in self._planned.items()}
        wanted = {number: bucket.wanted for number, bucket in self._buckets.items()}
        self._begun = PlannedDigests(wanted, model_device(survey.model))
        self._digests: dict[str, str] = {}
        self._expected: dict[str, str] = {}
        self._seconds: dict[str, float] = dict.fromkeys(("wait", "load", "digest", "finish"), 0.0)
        self.written = False  # True if the model's previous weights are gone

    @property
    def followed(self) -> int | None:
        """The layout of the model, if every tensor was found where it says, in the parameters that kernels use."""
        return None if self._lane.keeps_views else self._survey.layout

    def receive(self, opened: AbstractContextManager[Receiver]) -> Report:
        """Load what arrives, and compare what landed with it; raises as `EngineProtocol.receive_update`."""
        try:
            with opened as receiver, torch.no_grad():
                return self._receive(receiver)
        except BaseException:
            if self.written:
                self._lane.abandon()
            raise

    def _receive(self, receiver: Receiver) -> Report:
        first = self._arena(receiver, self._plan.buckets[0])
        self.written = True
        self._lane.begin()
        before = self._seconds["wait"] + self._seconds["digest"]
        with self._timed("load"):
            loaded = self._lane.load(self._arriving(receiver, first))
        self._seconds["load"] -= self._seconds["wait"] + self._seconds["digest"] - before
        with self._timed("finish"):
            self._lane.finish()
        with self._timed("digest"):
            begun = self._begun.begun()
            self._lane.look()
            self._read(begun)  # while a card looks
            self._check_landed(loaded, self._lane.landed())
            quantized = self._lane.quantized()
        parts = {} if self._lane.keeps_views else self._expected
        return Report(self._digests, len(self._expected), self._plan.nbytes, self._seconds, parts, quantized)

    def _arriving(self, receiver: Receiver, first: torch.Tensor) -> Arriving:
        """Contents of each bucket, valid until the next one arrives."""
        for bucket in self._plan.buckets:
            arena = first if bucket.number == self._plan.buckets[0].number else self._arena(receiver, bucket)
            own = arena.clone() if self._lane.keeps_views else arena
            yield Parcel(bucket.number, self._planned[bucket.number], own)
            with self._timed("digest"):
                self._begun.begin(bucket.number, own)
            receiver.release(bucket)

    def _arena(self, receiver: Receiver, bucket: Bucket) -> torch.Tensor:
        with self._timed("wait"):
            return receiver.arena(bucket)

    def _outlined(self, planned: Sequence[PlannedTensor]) -> _Expected:
        """Contents of a bucket, and the parts of them that this worker must hold."""
        arriving = {tensor.name: Whole(tensor) for tensor in planned}
        parts = {name: part for name, whole in arriving.items() if (part := self._part(whole)) is not None}
        cut = {name: part for name, part in parts.items() if part is not arriving[name]}
        return _Expected(list(arriving), list(parts), list(cut), [*arriving.values(), *cut.values()])

    def _read(self, begun: Mapping[int, BegunDigests]) -> None:
        """Wait for the digests of what arrived."""
        for number, expected in self._buckets.items():
            digests = begun[number].read()
            self._digests |= zip(expected.arrived, digests, strict=False)
            self._expected |= {name: self._digests[name] for name in expected.held}
            self._expected |= zip(expected.cut, digests[len(expected.arrived) :], strict=True)

    def _part(self, tensor: Whole) -> Outline | None:
        place = None if self._landing is None else self._landing.places.get(tensor.planned.name)
        if self._landing is None or place is None or not place.held:
            return None
        kind = self._landing.types[place.layer, place.parameter]
        if place.whole and kind == element_type(tensor.planned.dtype):
            return tensor
        return Cut(part_of(thought_of(tensor.planned), place.of), kind)

    def _check_landed(self, loaded: set[str], found: Mapping[str, str]) -> None:
        for name, digest in self._expected.items():
            landed = found.get(name)
            if landed != digest:
                place = "" if self._landing is None else f" in {self._landing.places[name].layer}"
                how = "not loaded" if landed is None else "loaded otherwise than it arrived"
                raise SyncMismatch(
                    f"tensor {name} was {how}{place}: digest {digest} arrived, and {landed or 'nothing'} is in the "
                    "engine's parameters. Sync the weights again"
                )
        if self._landing is None:  # loaders leave the module that holds experts out of the names of these
            told, wanted = (
                {name.replace(".experts.routed_experts.", ".experts.") for name in names}
                for names in (loaded, self._survey.parameters)
            )
            if told != wanted:
                missing, unknown = _named(sorted(wanted - told)), _named(sorted(told - wanted))
                raise SyncMismatch(f"parameters that vLLM loaded: {missing} missing, {unknown} not expected")

    def _is_unused(self, name: str) -> bool:
        """True if a checkpoint may hold a tensor that vLLM's model does not use."""
        config = cast(Any, self._config.model_config.hf_text_config)
        return name.endswith(_UNUSED) or get_spec_layer_idx_from_weight_name(config, name) is not None

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - start


def check_layout(plan: WeightPlan) -> None:
    """Raises SyncMismatch unless every tensor is there once, each where no other is."""
    if not plan.tensors:
        raise SyncMismatch("a weight update without tensors: the trainer exported nothing")
    twice = [name for name, count in Counter(tensor.name for tensor in plan.tensors).items() if count > 1]
    if twice:
        raise SyncMismatch(f"tensor {twice[0]} is in the weight update twice")
    ends = dict.fromkeys((bucket.number for bucket in plan.buckets), 0)
    sizes = {bucket.number: bucket.nbytes for bucket in plan.buckets}
    for tensor in plan.tensors:
        element_type(tensor.dtype)
        end = tensor.offset + tensor.nbytes
        if tensor.bucket not in sizes or not ends[tensor.bucket] <= tensor.offset <= end <= sizes[tensor.bucket]:
            raise SyncMismatch(f"tensor {tensor.name} lies over another one in the weight update, or in no bucket")
        ends[tensor.bucket] = end


def _named(names: list[str]) -> str:
    return f"{len(names)} {names[:_SHOWN]}" if names else "none"
