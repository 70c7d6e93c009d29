"""A sender of hand-made tensors, and the driver's part of a weight update, for tests of engines and transports."""

import threading

import pytest
import torch

from storage.errors import RatchetError, SyncMismatch
from tasks.engine.protocol import Sampling, weights_digest
from tests.tasks.engine_process import weights_of
from trainer_core.weights.channel import Channel
from trainer_core.weights.digest import tensor_digests
from trainer_core.weights.packing import dtype_name, tensors_of, views
from trainer_core.weights.plan import ALIGNMENT, Bucket, PlannedTensor, WeightPlan, text_digest
from trainer_core.weights.transports.ends import open_sender

CPU = torch.device("cpu")
ARENA = 64 << 10


def plan_of(weights, version=1, arena_bytes=ARENA, senders=1, form="whole", base=""):
    """Buckets in the order of `weights`, dealt to the senders in turn."""
    tensors, sizes = [], []
    for name, tensor in weights.items():
        if not sizes or sizes[-1] + tensor.nbytes > arena_bytes:
            sizes.append(0)
        tensors.append(
            PlannedTensor(
                name=name,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                bucket=len(sizes) - 1,
                offset=sizes[-1],
            )
        )
        sizes[-1] += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    buckets = [Bucket(number=number, sender=number % senders, nbytes=size) for number, size in enumerate(sizes)]
    arena, kind = max(sizes), {"form": form, "base": base}
    return WeightPlan(version=version, tensors=tuple(tensors), buckets=tuple(buckets), arena_bytes=arena, **kind)


class Sending(threading.Thread):
    """Sends one rank's buckets as a trainer rank does; keeps what it sent, or the reason of its failure."""

    def __init__(self, channel, plan, weights, rank=0, before=None):
        """`before(bucket, arena)` is called before a bucket is published, and may change it, skip it or raise."""
        super().__init__(daemon=True)
        self.channel, self.plan, self.weights, self.rank, self.before = channel, plan, weights, rank, before
        self.digests, self.error = {}, None
        self.start()

    def run(self):
        try:
            sender = open_sender(self.channel, self.plan, self.rank, CPU)
        except RatchetError as error:
            self.error = error
            return
        try:
            self.send(sender)
            sender.finish()
        except (RatchetError, ValueError) as error:
            self.error = error
            sender.fail(str(error))
        finally:
            sender.close()

    def send(self, sender):
        planned = tensors_of(self.plan)
        for bucket in self.plan.buckets:
            if bucket.sender != self.rank:
                continue
            arena = sender.arena(bucket)
            packed = dict(views(planned[bucket.number], arena))
            for name, place in packed.items():
                place.copy_(self.weights[name])
            self.digests |= dict(zip(packed, tensor_digests(list(packed.values())), strict=True))
            if self.before is not None:
                self.before(bucket, packed)
            sender.publish(bucket)

    def result(self):
        self.join(120)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.digests


def deliver(
    engine, folder, weights, version=1, transport="memory", before=None, receivers=1, in_flight="abort", **planning
):
    """Update one engine as a whole, up to the commit; the tensors that arrived, and those that were sent."""
    plan = plan_of(weights, version, **planning)
    channel = Channel(transport=transport, folder=str(folder), receivers=receivers, deadline_s=30)
    digest = text_digest(plan.model_dump_json())
    assert engine.prepare_update(plan.model_dump_json(), digest, channel, 0, in_flight) == digest
    ranks = sorted({bucket.sender for bucket in plan.buckets})
    senders = [Sending(channel, plan, weights, rank, before) for rank in ranks]
    arrived = engine.receive_update()
    return arrived, {name: digest for sender in senders for name, digest in sender.result().items()}


def tensors_of_model(directory):
    """All tensors of a model directory."""
    return {name: torch.from_numpy(array) for name, array in weights_of(directory).items()}


def update(engine, folder, directory, version, **more):
    """Update one engine as a whole to the weights of a model directory; the tensors that arrived."""
    folder.mkdir()
    arrived, sent = deliver(engine, folder, tensors_of_model(directory), version, **more)
    assert arrived.digests == sent
    engine.commit_update(version, weights_digest(sent))
    return arrived


def serve(served, folder, which="new", version=10, **more):
    """Give the engine of `served` the weights of that model."""
    update(served.engine, folder, vars(served)[which], version, **more)


def refused(engine, folder, weights, error, match, **more):
    folder.mkdir()
    with pytest.raises(error, match=match):
        deliver(engine, folder, weights, 9, **more)


def assert_unusable(engine):
    assert engine.identity().weight_version is None
    with pytest.raises(SyncMismatch, match="sync the weights again"):
        engine.generate([[5, 6, 7]], [0], Sampling(max_tokens=2))
    with pytest.raises(SyncMismatch, match="sync the weights again"):
        engine.score([[5, 6, 7]])
