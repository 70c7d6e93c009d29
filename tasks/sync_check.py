"""Comparing what engines hold with what a run has stored, tensor by tensor."""

from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import BaseModel, computed_field

from storage.errors import SyncMismatch
from tasks.engine.protocol import weights_digest
from tasks.stages.context import RunContext
from tasks.stages.names import Stage
from tasks.stages.proof import differing
from tasks.stages.served_weights import ensure_served
from tasks.stages.views import Prepared, Served
from tasks.workers.interface import EngineHandle


class CheckedEngine(BaseModel, frozen=True, extra="forbid"):
    """One engine, compared with the stored weights."""

    name: str
    weight_version: int | None  # version that it serves; None if it serves none
    weights_digest: str | None  # of the weights that it holds now; None if it holds none that it could serve
    differing: tuple[str, ...]  # tensors that are not those of the stored state; empty also if these are not known
    problem: str | None = None  # reason why it does not serve the stored weights; None if it does


class CheckedSync(BaseModel, frozen=True, extra="forbid"):
    """The engines of a run, compared with the stored weights of an iteration."""

    run: str
    iteration: int
    weights_digest: str  # of the weights that the iteration's weight sync has recorded
    stored: Literal["equal", "different", "not compared"]  # comparison of these weights with those of the stored state
    engines: tuple[CheckedEngine, ...]

    @computed_field
    @property
    def equal(self) -> bool:
        """True if every engine serves them, and the stored state gives no others."""
        return self.stored != "different" and not any(engine.problem for engine in self.engines)


def check_sync(
    context: RunContext,
    iteration: int,
    stored: Mapping[str, str] | None,
    running: Mapping[str, EngineHandle],
    say: Callable[[str], object],
) -> CheckedSync:
    """Compare engines with the weights of an iteration. `stored` holds the `tensor_digest` of each weight of the stored
    state by name; None if they are not known. The engines `running`, by name, are only asked; if there are none, new
    ones are started in `context`, and get the stored weights as after a restart. Raises NotCommitted: the iteration has
    no weight sync."""
    served = Served(context.need(iteration, Stage.WEIGHT_SYNC))
    if not (engines := [_checked(name, engine, served, stored) for name, engine in running.items()]):
        say("the run has no engines here: a new one gets the stored weights")
        engines = _new(context, served, stored)
    known = "not compared" if stored is None else "equal"
    if stored is not None and weights_digest(stored) != served.weights_digest:
        known = "different"
    return CheckedSync(
        run=context.run, iteration=iteration, weights_digest=served.weights_digest, stored=known, engines=tuple(engines)
    )


def _new(context: RunContext, served: Served, stored: Mapping[str, str] | None) -> list[CheckedEngine]:
    try:
        engines = ensure_served(context, Prepared(context.need(0, Stage.PREPARE)), served)
    except SyncMismatch as error:
        nothing = {"weight_version": None, "weights_digest": None, "differing": ()}
        return [CheckedEngine(name="new engine", **nothing, problem=str(error))]
    return [_checked(f"new engine {number}", engine, served, stored) for number, engine in enumerate(engines)]


def _checked(name: str, engine: EngineHandle, served: Served, stored: Mapping[str, str] | None) -> CheckedEngine:
    version, held = engine.identity().weight_version, engine.held()
    found = weights_digest(held) if held else None
    wrong = differing(stored, held) if stored is not None and held else []
    seen = {"weight_version": version, "weights_digest": found, "differing": tuple(wrong)}
    return CheckedEngine(name=name, **seen, problem=_problem(version, found, served))


def _problem(version: int | None, found: str | None, served: Served) -> str | None:
    if found is None:
        return "it serves no weights: the next weight sync, or the next stage that samples, gives it some"
    if found != served.weights_digest:
        return f"it holds weights {found}, but {served.weights_digest} were served"
    if version != served.weight_version:
        return f"it serves version {version}, not {served.weight_version}"
    return None
