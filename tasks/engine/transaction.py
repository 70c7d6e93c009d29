"""A weight update as the engine's process sees it: what its workers say, compared. Imports without vLLM or torch."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from storage.errors import SyncMismatch
from tasks.engine.protocol import Arrived, weights_digest
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import ALIGNMENT, Bucket, PlannedTensor, WeightPlan
from trainer_core.weights.records import TensorRecord

Workers = Callable[..., list[Any]]
"""Calls a method of every worker, with options; their results."""


class Transaction:
    """One update of all workers of an engine."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.arrived: Arrived | None = None
        """What was received and verified."""
        self.touched = False
        """Whether a worker's weights of before are gone, or may be."""

    def prepare(self, plan: WeightPlan, digest: str, channel: Channel, first: int, files: Sequence[str] = ()) -> str:
        """See `EngineProtocol.prepare_update`.

        Args:
            files: names of the files of an export, one per bucket, in `channel.folder`.
        """
        answers = self._workers(
            "prepare_update",
            plan=plan.model_dump_json(),
            channel=channel.model_dump_json(),
            first=first,
            files=list(files),
        )
        _refuse(answers)
        computed = {cast(str, answer["digest"]) for answer in answers}
        if computed != {digest}:
            raise SyncMismatch(
                f"the trainer planned the weight update {digest}, workers of the engine read {sorted(computed)}: they "
                "run different versions of Ratchet, or the plan was changed on the way"
            )
        return digest

    def receive(self) -> Arrived:
        """See `EngineProtocol.receive_update`."""
        self.touched = True  # until the workers say otherwise
        answers = self._workers("receive_update")
        self.touched = any(answer.get("written", True) for answer in answers)
        _refuse(answers)
        first, *others = answers
        if any(other["digests"] != first["digests"] for other in others):
            raise SyncMismatch("the processes of the engine received different tensors; sync the weights again")
        self.arrived = Arrived(
            digests=first["digests"],
            landed=sum(answer["landed"] for answer in answers),
            bytes=first["bytes"],
            seconds=max((answer["seconds"] for answer in answers), key=lambda seconds: sum(seconds.values())),
        )
        return self.arrived

    def forget(self) -> None:
        """Let the workers forget what they prepared."""
        self._workers("forget_update")

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each tensor that was received."""
        return {} if self.arrived is None else self.arrived.digests

    def holds(self, digest: str) -> bool:
        """Whether the weights of that digest were received."""
        return self.arrived is not None and weights_digest(self.arrived.digests) == digest


def _refuse(answers: Sequence[dict[str, Any]]) -> None:
    for answer in answers:
        if "refused" in answer:
            raise SyncMismatch(answer["refused"])


def plan_of_export(records: Sequence[TensorRecord], version: int) -> tuple[WeightPlan, list[str]]:
    """The plan of an update from the files of an export, one bucket each, and their names by bucket."""
    files = list(dict.fromkeys(record.file for record in records))
    places = {file: place for place, file in enumerate(files)}
    sizes = [0] * len(files)
    tensors: list[PlannedTensor] = []
    for record in sorted(records, key=lambda record: places[record.file]):
        bucket = places[record.file]
        tensor = PlannedTensor(
            name=record.name, dtype=record.dtype, shape=record.shape, bucket=bucket, offset=sizes[bucket]
        )
        sizes[bucket] += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        tensors.append(tensor)
    buckets = tuple(Bucket(number=number, sender=0, nbytes=size) for number, size in enumerate(sizes))
    return WeightPlan(
        version=version, tensors=tuple(tensors), buckets=buckets, arena_bytes=max(sizes, default=0)
    ), files
