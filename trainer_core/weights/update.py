"""One update of the engines' weights, from the trainer's side: planned once, sent once, then dropped."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from storage.digest import value_digest
from storage.errors import SyncMismatch
from trainer_core.config import TrainerConfig
from trainer_core.model.mesh import Mesh
from trainer_core.model.model import Model
from trainer_core.platform.platform import quietly
from trainer_core.weights.channel import Channel
from trainer_core.weights.conversion import Conversion, Parcel, Positions, conversions, factors
from trainer_core.weights.digest import PlannedDigests, Whole
from trainer_core.weights.exchange import Shards, exchange, group_of
from trainer_core.weights.packing import Packing, tensors_of
from trainer_core.weights.plan import Bucket, Form, Place, WeightPlan, decode, encode, plan_of, text_digest
from trainer_core.weights.sending import BucketSender
from trainer_core.weights.whole import Exported, WholeExport


class Update:
    """A plan with this rank's means to carry it out. It holds live tensors and modules, and lives for one update."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        config: TrainerConfig,
        version: int,
        arena_bytes: int,
        form: Form = "whole",
        base: str = "",
    ) -> None:
        """Plan from the live weights, inside `model.weights`. Collective. `base` is the digest of the frozen weights,
        which other forms than `whole` name. Raises SyncMismatch on every rank, if one cannot send its weights or ranks
        do not hold the same."""
        self._mesh = mesh
        _settle(mesh)
        found, self._others, problem = _found(model, form)
        place = _place(mesh, config, version, arena_bytes, problem)
        mine = tuple(sorted((one.row for one in (*found, *self._others)), key=lambda row: row.name))
        told, self.exchanges = exchange(own := encode(place, mine), mesh)
        tables = decode(told, own, mine)
        self._whole = WholeExport(model, tables)
        lacking = any(not row.tensors for table in tables for row in table.rows)
        more = self._whole.outlines() if lacking and all(table.place.problem is None for table in tables) else []
        self.plan: WeightPlan = plan_of(tables, more).model_copy(update={"form": form, "base": base})
        self.text = self.plan.model_dump_json()
        self.digest = text_digest(self.text)
        self._exported = frozenset(tensor.name for tensor in more)
        self._conversions = {tensor.name: one for one in reversed(found) for tensor in one.row.tensors}
        self._planned = tensors_of(self.plan)
        sent = [bucket.number for bucket in self.plan.buckets if bucket.sender == mesh.rank]
        self._digests = PlannedDigests(
            {number: list(map(Whole, self._planned[number])) for number in sent}, mesh.device
        )
        self._positions = Positions(mesh.device)

    def problem(self) -> str | None:
        """The reason why the live model no longer fits the plan; None if it does."""
        problems = (one.changed() for one in (*self._conversions.values(), *self._others, self._whole))
        return next((problem for problem in problems if problem is not None), None)

    def send(self, channel: Channel) -> BucketSender:
        """Convert and send, inside `model.weights`; all ranks have made sure that none has a problem. Collective.
        Returns when every receiver has read everything that this rank sends. A rank that fails goes on with what is
        collective. Raises the first failure of this rank."""
        _settle(self._mesh)
        buckets = self.plan.buckets
        whole = [bucket for bucket in buckets if self._planned[bucket.number][0].name in self._exported]
        parcels = {}
        for bucket in buckets[: len(buckets) - len(whole)]:
            planned = self._planned[bucket.number]
            held = [one for tensor in planned if (one := self._conversions.get(tensor.name)) is not None]
            parcels[bucket.number] = Parcel(planned, list({id(one): one for one in held}.values()))
        own = [number for number in parcels if buckets[number].sender == self._mesh.rank]
        with BucketSender(channel, self.plan, self._mesh, self._digests) as sender, torch.no_grad():
            for number, parcel in parcels.items():
                if own[channel.arenas : channel.arenas + 1] == [number]:  # engines have hardly begun to read
                    with sender.noted():
                        for later in own[channel.arenas :]:
                            parcels[later].look()
                self._carry(sender, buckets[number], parcel)
            if whole:
                self._carry_exported(sender, whole)
            sender.finish()
            return sender

    def _carry(self, sender: BucketSender, bucket: Bucket, parcel: Parcel) -> None:
        shards = Shards()
        for expert in (False, True):
            wanted = [one for one in parcel.conversions if one.gathers and one.row.expert == expert]
            if wanted and bucket.sender in dist.get_process_group_ranks(group := group_of(expert)):
                shards.exchange([one.live for one in wanted], group)
        if bucket.sender == self._mesh.rank:
            sender.send(bucket, parcel.planned, lambda arena: parcel.fill(arena, shards, self._positions))
        for one in parcel.conversions:
            one.forget()

    def _carry_exported(self, sender: BucketSender, buckets: Sequence[Bucket]) -> None:
        """Export the weights that only the bridge converts, and send them from rank 0."""
        waiting = list(buckets)
        held: dict[str, torch.Tensor] = {}

        def send() -> None:
            bucket = waiting.pop(0)
            packing = Packing(self._planned[bucket.number])

            def fill(arena: torch.Tensor) -> None:
                packing.add(held)
                packing.write(arena)

            if bucket.sender == self._mesh.rank:
                sender.send(bucket, self._planned[bucket.number], fill)
            held.clear()

        for name, tensor in self._whole.exported():
            held[name] = tensor
            if waiting and name == self._planned[waiting[0].number][-1].name:
                send()
        while waiting:  # its last tensor did not come, which `send` tells
            send()


def _settle(mesh: Mesh) -> None:
    """Wait for what the device still does to the weights on other streams, such as bringing them back from the host."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def _found(model: Model, form: Form) -> tuple[list[Conversion], list[Exported], str | None]:
    try:
        with quietly(), torch.no_grad():
            if form == "adapter":
                return factors(model), [], None
            return *conversions(model, adapted=form == "whole"), None
    except SyncMismatch as error:
        return [], [], str(error)


def _place(mesh: Mesh, config: TrainerConfig, version: int, arena_bytes: int, problem: str | None) -> Place:
    return Place(
        rank=mesh.rank,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=group_of(expert=True).rank(),
        expert_replica=parallel_state.get_expert_data_parallel_rank(),
        version=version,
        arena_bytes=arena_bytes,
        config=value_digest({"parallel": config.parallel.model_dump(), "precision": config.precision}),
        problem=problem,
    )
