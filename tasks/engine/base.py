"""A base for engines of the user's own: requests, weight updates and refusals around three methods."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.errors import SyncMismatch
from tasks.data.backends import read_backend, token_bytes
from tasks.engine import protocol
from tasks.engine.ends import complete_after
from tasks.engine.protocol import (
    COMPLETIONS,
    Arrived,
    Begun,
    Collected,
    EngineIdentity,
    EngineProtocol,
    EngineSpec,
    Every,
    Finished,
    Increment,
    InFlight,
    Sampling,
    TokenIds,
    unusable_weights,
)
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import WeightPlan, text_digest

if TYPE_CHECKING:
    import torch


class Response(NamedTuple):
    """One sampled response."""

    tokens: Sequence[int]  # token ids, with the stop token if one ended it
    logprobs: Sequence[float]  # log-probability of each token under the distribution that it was drawn from, nat
    finish_reason: str  # `stop` if a stop token ended it, `length` at `Sampling.max_tokens` or the end of the context


class _Queued(NamedTuple):
    number: int
    prompts: Sequence[TokenIds]
    seeds: Sequence[int]
    sampling: Sampling


class _Prepared(NamedTuple):
    plan: WeightPlan
    channel: Channel
    receiver: int


class BaseEngine(EngineProtocol, ABC):
    """An engine in one process that samples a batch at a time. A subclass has `parameters`, `sample`, `logprobs`. It
    gives no increments, and samples what was begun once more: a response depends on prompt and seed alone."""

    def __init__(self, spec: EngineSpec) -> None:
        """A subclass loads the model of `spec.model_dir` too, on `spec.device`."""
        self.spec = spec
        self._queue: list[_Queued] = []
        self._finished: list[Finished] = []
        self._identity = EngineIdentity(weight_version=None, weights_digest=None)
        self._unusable: str | None = None
        self._update: _Prepared | None = None
        self._arrived: Arrived | None = None
        self._committed: dict[str, str] = {}  # digests of what arrived with the weights that are served
        self._landed: dict[str, str] = {}  # digests of the live parameters when the last update had been written

    @abstractmethod
    def parameters(self) -> "Mapping[str, torch.Tensor]":
        """The live parameters by their Hugging Face names, in their whole shapes: an update is written into them."""

    @abstractmethod
    def sample(self, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> Sequence[Response]:
        """A response for each (prompt, seed). It depends on prompt, seed, sampling and weights alone. What follows a
        text of `sampling.stop` is cut off afterwards."""

    @abstractmethod
    def logprobs(self, sequences: Sequence[TokenIds]) -> list[NDArray[np.float32]]:
        """As `score`."""

    def loaded(self) -> None:
        """New weights are served from now on; anything that was computed with the old ones is to be forgotten."""

    def identity(self) -> EngineIdentity:
        return EngineIdentity(weight_version=None, weights_digest=None) if self._unusable else self._identity

    def generate(self, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> pa.RecordBatch:
        self.drop()
        self.enqueue(0, prompts, seeds, sampling)
        return self._sampled(self._queue.pop()).completions

    def enqueue(
        self,
        number: int,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        sampling: Sampling,
        begun: Sequence[Begun] = (),
        every: Every | None = None,
        name: str = "",
    ) -> None:
        self._check_usable()
        self.spec.check_batch(number, prompts)
        self._queue.append(_Queued(number, prompts, seeds, sampling))

    def collect(self, wait_s: float) -> Collected:
        if self._queue and not self._finished and self._update is None:
            self._finished.append(self._sampled(self._queue.pop(0)))
        finished, self._finished = self._finished, []
        return Collected(finished, sum(one.completions.num_rows for one in finished))

    def drop(self) -> Mapping[str, Sequence[Increment]]:
        self._queue.clear()
        self._finished.clear()
        return {}

    def score(self, sequences: Sequence[TokenIds]) -> list[NDArray[np.float32]]:
        self._check_usable()
        self.spec.check_lengths(sequences, "sequence")
        self.drop()
        return self.logprobs(sequences) if len(sequences) else []

    def survey_model(self) -> None:
        """Nothing to look at: there are no frozen weights."""

    def prepare_update(
        self, plan: str, digest: str, channel: Channel, first_receiver: int, in_flight: InFlight = "abort"
    ) -> str:
        made, found = WeightPlan.model_validate_json(plan), text_digest(plan)
        if found != digest:
            raise SyncMismatch(f"the plan of the weight update has the digest {found}, not {digest}: sync again")
        self._check_plan(made)
        if in_flight == "wait":
            self._finished += [self._sampled(queued) for queued in self._queue]
        if in_flight != "keep":
            self._queue.clear()
        self._update, self._arrived = _Prepared(made, channel, first_receiver), None
        return found

    def receive_update(self) -> Arrived:
        if self._update is None:
            raise SyncMismatch("no weight update was prepared, so none can be received; sync the weights again")
        from trainer_core.weights.transports.ends import receiving

        live, began, digests = self.parameters(), time.monotonic(), dict[str, str]()
        plan, channel, number = self._update
        with receiving(channel, plan, number, next(iter(live.values())).device) as receiver:
            for bucket in plan.buckets:
                arena = receiver.arena(bucket)
                self._unusable = "a weight update began and did not finish"
                digests |= self._written(bucket.number, arena, live)
                receiver.release(bucket)
        size, seconds = plan.nbytes, {"load": time.monotonic() - began}
        self._arrived = Arrived(digests=digests, landed=len(digests), bytes=size, seconds=seconds)
        return self._arrived

    def commit_update(self, version: int, weights_digest: str) -> EngineIdentity:
        if self._arrived is None or protocol.weights_digest(self._arrived.digests) != weights_digest:
            raise SyncMismatch(f"weights {weights_digest} were not received, so they cannot be served; sync them again")
        self._identity = EngineIdentity(weight_version=version, weights_digest=weights_digest)
        self._committed, self._update, self._arrived, self._unusable = self._arrived.digests, None, None, None
        self.loaded()
        return self._identity

    def abort_update(self, reason: str) -> bool:
        if self._update is not None:
            self._update, self._unusable = None, reason if self._unusable else None
        if self._unusable:
            self.drop()
        return self._unusable is None

    def refuse(self, reason: str) -> None:
        self.drop()
        self._unusable = reason

    def held(self) -> dict[str, str]:
        if self.identity().weights_digest is None:
            return {}
        now, kept = self._digests(self._landed), self._committed.items()
        return {name: arrived if now[name] == self._landed[name] else now[name] for name, arrived in kept}

    def sleep(self) -> bool:
        return False

    def wake(self) -> None:
        """See `EngineProtocol.wake`."""

    def _sampled(self, queued: _Queued) -> Finished:
        sampled, stop = self.sample(queued.prompts, queued.seeds, queued.sampling), queued.sampling.stop
        responses = [self._ended(one, stop) for one in sampled] if stop else sampled
        columns = [
            pa.array([np.asarray(one.tokens, np.int32) for one in responses], pa.list_(pa.int32())),
            pa.array([np.asarray(one.logprobs, np.float32) for one in responses], pa.list_(pa.float32())),
            pa.array([one.finish_reason for one in responses], pa.string()),
        ]
        completions = pa.RecordBatch.from_arrays(columns, schema=COMPLETIONS)
        return Finished(queued.number, completions, self._identity.weight_version)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return token_bytes(read_backend(Path(self.spec.model_dir)))

    def _ended(self, response: Response, stop: Sequence[str]) -> Response:
        """A response without what follows a stop text: no token before depends on it."""
        count = complete_after(response.tokens, stop, self._token_bytes)
        return response if count is None else Response(response.tokens[:count], response.logprobs[:count], "stop")

    def _check_plan(self, plan: WeightPlan) -> None:
        planned = {one.name: one.shape for one in plan.tensors}
        live = {name: tuple(tensor.shape) for name, tensor in self.parameters().items()}
        for name in sorted(planned.keys() | live.keys()):
            if planned.get(name) != live.get(name):
                fact = f"the weight update sends {name} with the shape {planned.get(name)}, and the engine has it with"
                raise SyncMismatch(f"{fact} {live.get(name)} (None: not at all): correct `parameters` of the engine")

    def _written(self, bucket: int, arena: "torch.Tensor", live: "Mapping[str, torch.Tensor]") -> dict[str, str]:
        """Copy a bucket to the live parameters; the digests of what arrived, by name. Raises SyncMismatch: a parameter
        holds something else afterwards."""
        from trainer_core.weights.digest import tensor_digests
        from trainer_core.weights.packing import tensors_of, views

        assert self._update is not None
        sent = dict(views(tensors_of(self._update.plan)[bucket], arena))
        wanted = [tensor.to(live[name].dtype) for name, tensor in sent.items()]
        for name, tensor in zip(sent, wanted, strict=True):
            live[name].detach().copy_(tensor)
        landed = self._digests(sent)
        for name, digest in zip(sent, tensor_digests(wanted), strict=True):
            if landed[name] != digest:
                raise SyncMismatch(f"{name} was written to `parameters` of the engine, which hold something else now")
        self._landed |= landed
        return dict(zip(sent, tensor_digests(list(sent.values())), strict=True))

    def _digests(self, names: Mapping[str, object]) -> dict[str, str]:
        """Digests of live parameters."""
        from trainer_core.weights.digest import tensor_digests

        live = self.parameters()
        return dict(zip(names, tensor_digests([live[name] for name in names]), strict=True))

    def _check_usable(self) -> None:
        if self._unusable:
            raise unusable_weights(self._unusable)
