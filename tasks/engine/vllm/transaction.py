"""A weight update as the engine's process sees it: what its workers say, compared. Imports without vLLM or torch."""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from storage.digest import value_digest
from storage.errors import SyncMismatch
from tasks.engine.protocol import BASE, Arrived, weights_digest
from trainer_core.weights.channel import Channel
from trainer_core.weights.plan import Form

Workers = Callable[..., list[Any]]  # calls a method of every worker, with options; their results


class Transaction:
    """One update of all workers of an engine."""

    def __init__(self, workers: Workers, form: Form = "whole", base: str = "") -> None:
        self._workers, self.form, self.base = workers, form, base
        self.arrived: Arrived | None = None  # received and verified update
        self.touched = False  # True if a worker's previous weights are gone, or may be

    def prepare(self, plan: str, digest: str, channel: Channel, first: int) -> str:
        answers = self._workers("prepare_update", plan=plan, channel=channel.model_dump_json(), first=first)
        _refuse(answers)
        computed = {cast(str, answer["digest"]) for answer in answers}
        if computed != {digest}:
            raise SyncMismatch(
                f"the trainer planned the weight update {digest}, workers of the engine read {sorted(computed)}: they "
                "run different versions of Ratchet, or the plan was changed on the way"
            )
        return digest

    def receive(self) -> Arrived:
        self.touched = True  # until the workers say otherwise
        answers = [json.loads(answer) for answer in self._workers("receive_update")]
        self.touched = any(answer.get("written", True) for answer in answers)
        _refuse(answers)
        first, *others = answers
        if any(other["digests"] != first["digests"] for other in others):
            raise SyncMismatch("the processes of the engine received different tensors; sync the weights again")
        self.arrived = Arrived(
            digests=first["digests"],
            landed=sum(answer["landed"] for answer in answers),
            bytes=first["bytes"],
            quantized=value_digest(made) if any(made := [answer["quantized"] for answer in answers]) else None,
            seconds=max((answer["seconds"] for answer in answers), key=lambda seconds: sum(seconds.values())),
        )
        return self.arrived

    def forget(self) -> None:
        """Let the workers forget what they prepared."""
        self._workers("forget_update")

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each tensor that was received; of an adapter with that of the frozen weights."""
        found = {} if self.arrived is None else self.arrived.digests
        return {**found, BASE: self.base} if found and self.form == "adapter" else found

    def holds(self, digest: str) -> bool:
        """True if the weights of that digest were received."""
        return self.arrived is not None and weights_digest(self.digests) == digest


def _refuse(answers: Sequence[dict[str, Any]]) -> None:
    for answer in answers:
        if "refused" in answer:
            raise SyncMismatch(answer["refused"])
