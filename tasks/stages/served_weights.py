"""Moving the trainer's weights into the engines, and proving that they arrived."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage.errors import SyncMismatch
from tasks.engine.protocol import weights_digest
from tasks.stages.context import RunContext
from tasks.stages.held_state import ensure_state, trainers
from tasks.stages.names import Stage
from tasks.stages.prepared import model_directory
from tasks.stages.turns import release
from tasks.stages.views import Prepared, Served, Trained
from tasks.workers.engines import EngineHandle
from tasks.workers.scratch import scratch
from tasks.workers.trainers import TrainerGroup


@dataclass(frozen=True)
class Delivery:
    """What one transfer delivered to every engine."""

    weights_digest: str
    """Identity of all weights together."""
    tensors: int
    bytes: int


def engines_of(context: RunContext, prepared: Prepared) -> list[EngineHandle]:
    """The run's engines, started if necessary."""
    return context.workers.engines(model_directory(context, prepared))


def ensure_served(context: RunContext, prepared: Prepared, served: Served) -> list[EngineHandle]:
    """Engines that hold the weights that the weight-sync stage `served` recorded.

    An engine that is new, or holds something else, gets them from the train state of that iteration. The trainer ranks
    are started too, and give up what `train.memory` names.

    Raises:
        SyncMismatch: the stored state gives other weights than those recorded.
    """
    release(context, trainers(context, prepared))
    engines = engines_of(context, prepared)
    wanted = (served.weight_version, served.weights_digest)
    if all((held.weight_version, held.weights_digest) == wanted for held in (e.identity() for e in engines)):
        return engines
    context.outbox.settle()  # the state to load may not be stored yet
    trained = Trained(context.need(served.weight_version, Stage.TRAIN))
    group = ensure_state(context, prepared, trained)
    release(context, group, weights=False)
    delivery = deliver(engines, group, served.weight_version)
    if delivery.weights_digest != served.weights_digest:
        raise SyncMismatch(
            f"the state of iteration {served.weight_version} exports weights {delivery.weights_digest}, but "
            f"{served.weights_digest} were served when it was committed. Check the store with `ratchet verify`"
        )
    release(context, group)
    return engines


def deliver(engines: list[EngineHandle], group: TrainerGroup, version: int) -> Delivery:
    """Export from the live model and load into every engine in place.

    Raises:
        SyncMismatch: an engine did not receive exactly the tensors that were sent.
    """
    with scratch(memory=True) as folder:  # the engine is another process on this host
        records = group.export(folder)
        digest = weights_digest({record.name: record.digest for record in records})
        with ThreadPoolExecutor(len(engines)) as pool:
            receipts = list(pool.map(lambda engine: engine.receive(str(folder), version, records), engines))
    for receipt in receipts:
        if receipt.weights_digest != digest:
            raise SyncMismatch(f"an engine reports weights {receipt.weights_digest} after {digest} were sent")
    return Delivery(digest, len(records), receipts[0].bytes)
