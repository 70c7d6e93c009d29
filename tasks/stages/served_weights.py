"""Moving the learner's weights into the engines, and proving that they arrived."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage.errors import SyncMismatch
from storage.manifest import Manifest, need
from tasks.engine.engine import weights_digest
from tasks.stages.context import RunContext
from tasks.stages.held_state import ensure_state, learner
from tasks.stages.names import Stage
from tasks.stages.prepare import model_directory
from tasks.workers.fleet import EngineHandle
from tasks.workers.scratch import scratch
from tasks.workers.trainers import TrainerGroup
from trainer_core.weights.records import TensorRecord


@dataclass(frozen=True)
class Delivery:
    """What one transfer brought to every engine."""

    weights_digest: str
    """Identity of all weights together."""
    tensors: int
    bytes: int


def engines_of(context: RunContext, prepared: Manifest) -> list[EngineHandle]:
    """The run's engines, started if they are not there, with the trainer ranks beside them."""
    learner(context, prepared)
    return context.fleet.engines(model_directory(context, prepared))


def ensure_served(context: RunContext, prepared: Manifest, synced: Manifest) -> list[EngineHandle]:
    """Engines that hold the weights which the weight-sync stage `synced` recorded.

    An engine that is new, or holds something else, gets them from the train state of that iteration.

    Raises:
        SyncMismatch: the state on storage gives other weights than were recorded.
    """
    engines = engines_of(context, prepared)
    wanted = (synced.iteration, synced.facts["weights_digest"])
    if all((held.weight_version, held.weights_digest) == wanted for held in (e.identity() for e in engines)):
        return engines
    context.outbox.settle()
    trained = need(context.root, synced.run, synced.iteration, Stage.TRAIN)
    group = ensure_state(context, prepared, trained)
    delivery = deliver(engines, group, synced.iteration)
    if delivery.weights_digest != synced.facts["weights_digest"]:
        raise SyncMismatch(
            f"the state of iteration {synced.iteration} exports weights {delivery.weights_digest}, but "
            f"{synced.facts['weights_digest']} were served when it was committed. Check the store with ratchet verify"
        )
    return engines


def deliver(engines: list[EngineHandle], group: TrainerGroup, version: int) -> Delivery:
    """Export from the live model and load into every engine in place.

    Raises:
        SyncMismatch: an engine did not receive exactly the tensors that were sent.
    """
    with scratch(memory=True) as folder:  # the engine is another process of this host
        records: list[TensorRecord] = group.call("export", str(folder))[0]
        digest = weights_digest({record.name: record.digest for record in records})
        with ThreadPoolExecutor(len(engines)) as pool:
            receipts = list(pool.map(lambda engine: engine.receive(str(folder), version, records), engines))
    for receipt in receipts:
        if receipt.weights_digest != digest:
            raise SyncMismatch(f"an engine reports weights {receipt.weights_digest} after {digest} were sent")
    return Delivery(digest, len(records), receipts[0].bytes)
