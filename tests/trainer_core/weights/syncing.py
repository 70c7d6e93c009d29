"""One weight update of a trainer's ranks, read by a plain receiver in rank 0's process."""

import contextlib
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from storage.errors import RatchetError
from tests.trainer_core.models import read_export
from tests.trainer_core.oracle import export
from trainer_core.weights.channel import Channel
from trainer_core.weights.digest import tensor_digest, tensor_digests
from trainer_core.weights.packing import dtype_name, tensors_of, views
from trainer_core.weights.plan import WeightPlan
from trainer_core.weights.transports.ends import open_receiver

CPU = torch.device("cpu")
ARENA = 48 << 10  # several layers of the tiny models need several
OBJECT_COLLECTIVES = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class Reading(threading.Thread):
    """Reads all buckets as an engine's worker would, and keeps digests, or the reason of its failure."""

    def __init__(self, channel, plan, spoil):
        super().__init__(daemon=True)
        self.channel, self.plan, self.spoil = channel, plan, spoil
        self.found, self.error = {}, None
        self.start()

    def run(self):
        try:
            self.read(open_receiver(self.channel, self.plan, 0, CPU))
        except RatchetError as error:
            self.error = error

    def read(self, receiver):
        planned = tensors_of(self.plan)
        try:
            for bucket in self.plan.buckets:
                arena = receiver.arena(bucket)
                if self.spoil is not None:
                    self.spoil(bucket, receiver)
                found = dict(views(planned[bucket.number], arena))
                for name, digest in zip(found, tensor_digests(list(found.values())), strict=True):
                    self.found[name] = digest, dtype_name(found[name].dtype), tuple(found[name].shape)
                receiver.release(bucket)
        finally:
            receiver.close()


@contextlib.contextmanager
def counted():
    """Count calls of torch's collectives of pickled objects while this lasts."""
    calls, originals = Counter(), {name: getattr(torch.distributed, name) for name in OBJECT_COLLECTIVES}

    def spy(name):
        def called(*args, **kwargs):
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return called

    for name in originals:
        setattr(torch.distributed, name, spy(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(torch.distributed, name, original)


def sync(trainer, folder, version=1, arena_bytes=ARENA, between=None, stored=None, spoil=None, form="whole"):
    """Plan, send and receive. Returns a dictionary: received digests, types and shapes by name (on rank 0), digests as
    sent by this rank, exchanges, object collectives, and the plan's digest.
    """
    place = Path(folder, f"update-{version}")
    place.mkdir(exist_ok=True)
    channel = Channel(transport="memory", folder=str(place), receivers=1, deadline_s=60)
    with counted() as calls:
        planned = trainer.plan_weights(version, arena_bytes, form)
        plan = None if planned.plan is None else WeightPlan.model_validate_json(planned.plan)
        if between is not None:
            between(trainer)
        reading = Reading(channel, plan, spoil) if plan is not None else None
        try:
            sent = trainer.send_weights(planned.digest, channel, stored)
        finally:
            if reading is not None:
                reading.join(60)
    if reading is not None and reading.error is not None:
        raise reading.error
    return {
        "received": None if reading is None else reading.found,
        "sent": sent.digests,
        "exchanges": planned.exchanges,
        "objects": sum(calls.values()),
        "digest": planned.digest,
        "buckets": None if plan is None else len(plan.buckets),
        "plan": plan,
    }


def oracle(trainer, folder):
    """Result of megatron-bridge's export with fresh tasks: digests, types and shapes by name (on rank 0)."""
    records = export(trainer, folder)
    return {record.name: (record.digest, record.dtype, record.shape) for record in records} or None


def imported(folder, precision):
    """Expected tensors of a model that the trainer has just imported: as `oracle`."""
    expected = {}
    for name, array in read_export(folder).items():
        tensor = torch.from_numpy(np.asarray(array))
        if precision == "bf16" and "e_score_correction_bias" not in name and "inv_freq" not in name:
            tensor = tensor.to(torch.bfloat16)
        expected[name] = tensor_digest(tensor), dtype_name(tensor.dtype), tuple(tensor.shape)
    return expected
