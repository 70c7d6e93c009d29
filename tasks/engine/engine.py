"""The rollout engine: vLLM as a server of requests, which samples, scores, and loads new weights in place.

vLLM and torch are imported when an engine is created.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.errors import InputError, SyncMismatch, WorkerLost
from tasks.config.environment import set_engine_meeting_place
from tasks.engine.protocol import (
    COMPLETIONS,
    Collected,
    EngineIdentity,
    EngineProtocol,
    EngineSpec,
    Finished,
    Sampling,
    SyncReceipt,
    TokenIds,
    weights_digest,
)
from trainer_core.weights.records import TensorRecord


@dataclass(frozen=True)
class Unusable:
    """Why an engine must not generate."""

    reason: str


class Batch:
    """Requests that were queued together."""

    def __init__(self, number: int, prompts: Sequence[TokenIds], how: Sequence[Any]) -> None:
        self.number, self.prompts, self.how = number, prompts, how
        self.outputs: list[Any] = [None] * len(prompts)
        self.left = len(prompts)


class Engine(EngineProtocol):
    """vLLM, here or in processes that this one starts."""

    def __init__(self, spec: EngineSpec, meeting_place: str | None = None) -> None:
        """Start the engine with the weights in `spec.model_dir`.

        Args:
            meeting_place: empty folder where the processes of `spec.tensor` above 1 meet.

        Raises:
            InputError: the directory holds no model.
        """
        if not (Path(spec.model_dir) / "config.json").is_file():
            raise InputError(f"{spec.model_dir} holds no config.json: give a Hugging Face model directory")
        if meeting_place is not None:
            set_engine_meeting_place(meeting_place)
        from tasks.engine import core

        self._spec = spec
        self._waiting: deque[Batch] = deque()
        self._running: dict[str, tuple[Batch, int]] = {}
        self._names = itertools.count()
        self._sampling_parameters: Callable[[Sampling, int], Any] = core.sampling_parameters
        self._scoring_parameters: Callable[[], Any] = core.scoring_parameters
        self._core = core.Core(spec)
        self._held: EngineIdentity | Unusable = EngineIdentity(weight_version=None, weights_digest=None)

    def identity(self) -> EngineIdentity:
        """See `EngineProtocol.identity`."""
        if isinstance(self._held, Unusable):
            return EngineIdentity(weight_version=None, weights_digest=None)
        return self._held

    def generate(self, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> pa.RecordBatch:
        """See `EngineProtocol.generate`."""
        self.drop()
        self.enqueue(0, prompts, seeds, sampling)
        return _completions(self._complete())

    def enqueue(self, number: int, prompts: Sequence[TokenIds], seeds: Sequence[int], sampling: Sampling) -> None:
        """See `EngineProtocol.enqueue`."""
        self._check_usable()
        if not len(prompts):
            raise InputError(f"batch {number} holds no prompts: there is nothing to sample")
        self._check_lengths(prompts, "prompt")
        how = [self._sampling_parameters(sampling, seed) for seed in seeds]
        self._waiting.append(Batch(number, prompts, how))
        self._admit()

    def collect(self, wait_s: float) -> Collected:
        """See `EngineProtocol.collect`."""
        deadline = time.monotonic() + wait_s
        ended, finished = 0, []
        while self._running and not finished:
            samples, batches = self._step()
            ended += samples
            finished += [Finished(batch.number, _completions(batch.outputs)) for batch in batches]
            if time.monotonic() >= deadline:
                break
        return Collected(finished, ended)

    def drop(self) -> None:
        """See `EngineProtocol.drop`."""
        self._waiting.clear()
        if self._running:
            self._core.forget(list(self._running))
            self._running.clear()

    def score(self, sequences: Sequence[TokenIds]) -> list[NDArray[np.float32]]:
        """See `EngineProtocol.score`."""
        self._check_usable()
        self._check_lengths(sequences, "sequence")
        self.drop()
        if not len(sequences):
            return []
        self._waiting.append(Batch(0, sequences, [self._scoring_parameters() for _ in sequences]))
        self._admit()
        return [np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32) for output in self._complete()]

    def receive(self, directory: str, version: int, records: Sequence[TensorRecord]) -> SyncReceipt:
        """See `EngineProtocol.receive`."""
        clock = time.perf_counter()
        self.drop()
        self._held = Unusable("a weight update began and did not finish")
        try:
            digests = self._update(directory, records)
        except Exception as error:
            self._held = Unusable(str(error))
            raise
        identity = EngineIdentity(weight_version=version, weights_digest=weights_digest(digests))
        self._held = identity
        return SyncReceipt(
            version=version,
            digests=digests,
            weights_digest=str(identity.weights_digest),
            bytes=sum((Path(directory) / file).stat().st_size for file in {record.file for record in records}),
            seconds=time.perf_counter() - clock,
        )

    def _admit(self) -> None:
        """Begin with what waits: all of it, or the next batch once none is under way."""
        while self._waiting and not (self._spec.together and self._running):
            batch = self._waiting.popleft()
            named = {f"{next(self._names)}": (batch, row) for row in range(len(batch.prompts))}
            self._running |= named
            # plain integers: from numpy's, vLLM would make tensors of a type that it does not accept
            prompts = [np.asarray(prompt).tolist() for prompt in batch.prompts]
            self._core.add(list(zip(named, prompts, batch.how, strict=True)))

    def _step(self) -> tuple[int, list[Batch]]:
        """Responses that ended in one step, and the batches that are finished with them."""
        ended, finished = 0, []
        for output in self._core.step():
            batch, row = self._running.pop(output.request_id)
            batch.outputs[row] = output
            batch.left -= 1
            ended += 1
            if not batch.left:
                finished.append(batch)
        self._admit()
        return ended, finished

    def _complete(self) -> list[Any]:
        """The outputs of the one batch that is under way."""
        finished: list[Batch] = []
        while not finished:
            finished += self._step()[1]
        return finished[0].outputs

    def _update(self, directory: str, records: Sequence[TensorRecord]) -> dict[str, str]:
        files: dict[str, list[TensorRecord]] = {}
        for record in records:
            files.setdefault(record.file, []).append(record)
        if not files:
            raise SyncMismatch("a weight update without tensors: the trainer exported nothing")
        self._core.workers("start_weight_update")
        for number, (file, expected) in enumerate(files.items(), start=1):
            update = {
                "path": str(Path(directory) / file),
                "records": [record.model_dump() for record in expected],
                "final": number == len(files),
            }
            for refusal in self._core.workers("receive_file", update_info=update):
                if refusal is not None:
                    raise SyncMismatch(refusal)
        self._core.workers("finish_weight_update")
        self._core.forget_prompts()
        digests, *others = self._core.workers("received_digests")
        if any(other != digests for other in others):
            raise SyncMismatch("the processes of the engine read different tensors from the same files")
        return digests

    def _check_usable(self) -> None:
        if isinstance(self._held, Unusable):
            raise SyncMismatch(
                f"the engine's weights cannot be used because the last weight sync failed ({self._held.reason}); "
                "sync the weights again before generating"
            )

    def _check_lengths(self, sequences: Sequence[TokenIds], what: str) -> None:
        limit = self._spec.max_model_len - 1
        for index, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= limit:
                raise InputError(
                    f"{what} {index} has {len(sequence)} tokens; the engine accepts 1 to {limit} "
                    f"(engine.max_model_len is {self._spec.max_model_len} and one token is sampled)"
                )


def _completions(outputs: Sequence[Any]) -> pa.RecordBatch:
    responses = [output.outputs[0] for output in outputs]
    unknown = [one.finish_reason for one in responses if one.finish_reason not in ("stop", "length", "abort")]
    if unknown:
        raise WorkerLost(f"vLLM ended a response with finish_reason {unknown[0]!r}, which Ratchet does not know")
    columns = [
        _lists([response.token_ids for response in responses], pa.int32()),
        _lists([response.logprobs.logprobs for response in responses], pa.float32()),
        pa.array([response.finish_reason for response in responses], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=COMPLETIONS)


def _lists(rows: Sequence[Sequence[int]] | Sequence[Sequence[float]], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.fromiter(itertools.chain.from_iterable(rows), dtype=kind.to_pandas_dtype(), count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))
