"""Proof of a weight update, which the driving process demands before any engine serves it."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from storage.errors import SyncMismatch
from tasks.engine.protocol import BASE, Arrived, weights_digest
from trainer_core.protocol import Planned, Sent
from trainer_core.weights.plan import WeightPlan, text_digest

_SHOWN = 4  # names spelled out in a message
_AGAIN = (
    "No engine serves the update. Start the run again, which syncs the weights again; if it fails in the same place, "
    "the tensor is converted or loaded wrongly: report it with the name"
)


def agreed_plan(planned: Sequence[Planned], version: int) -> WeightPlan:
    """The plan that all trainer ranks have made. Raises SyncMismatch: they have made different ones, or not for this
    version; or it has no tensors, or one name twice."""
    text, digest = planned[0].plan, planned[0].digest
    for rank, one in enumerate(planned):
        if one.digest != digest:
            raise SyncMismatch(
                f"trainer rank {rank} has planned the weight update {one.digest}, rank 0 {digest}: they hold different "
                "models. Nothing was sent; run again, which starts from the stored state"
            )
    plan = None if text is None else WeightPlan.model_validate_json(text)
    if plan is None or text is None or text_digest(text) != digest or plan.version != version:
        found = None if plan is None else f"{text_digest(text or '')} to version {plan.version}"
        raise SyncMismatch(f"trainer rank 0 has announced the plan {digest} to version {version}, but made {found}")
    if not plan.tensors:
        fact = "the plan of the weight update is empty"
        raise SyncMismatch(f"{fact}: the trainer found no weights with Hugging Face names")
    counts = Counter(tensor.name for tensor in plan.tensors)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise SyncMismatch(f"the plan of the weight update has {_shown(twice)} twice. Nothing was sent")
    return plan


def proven(
    plan: WeightPlan, sent: Sequence[Sent], arrived: Mapping[int, Arrived], expected: str | None = None
) -> dict[str, str]:
    """Digest of each tensor by name, if every engine has received and loaded exactly what was planned and sent. `sent`
    is by every trainer rank, `arrived` at every engine, by its number; `expected` is the `weights_digest` that they
    must have. Raises SyncMismatch: otherwise, with the names and digests."""
    digests: dict[str, str] = {}
    for rank, one in enumerate(sent):
        if twice := digests.keys() & one.digests.keys():
            raise SyncMismatch(f"{_shown(twice)} were sent by trainer rank {rank} and by another one. {_AGAIN}")
        digests |= one.digests
    _check_names({tensor.name for tensor in plan.tensors}, digests, "planned", "sent")
    landed = next(iter(arrived.values())).landed
    for number, one in arrived.items():
        _check_arrived(digests, one.digests, number)
        if one.landed != landed:
            fact = f"engine {number} has found {one.landed} tensors again in its parameters, another one {landed}"
            raise SyncMismatch(f"{fact}, though their models are the same. {_AGAIN}")
    if len(made := {one.quantized for one in arrived.values()}) > 1:
        fact = f"engines have made different FP8 numbers of the same weights: {_shown(map(str, made))}"
        raise SyncMismatch(f"{fact}. {_AGAIN}")
    if plan.form == "adapter":
        digests[BASE] = plan.base
    found = weights_digest(digests)
    if expected not in (None, found):
        raise SyncMismatch(
            f"the weights to be served for version {plan.version} are {found}, but {expected} were served when it was "
            "committed. Check the store with `ratchet verify`"
        )
    return digests


def differing(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Names of tensors whose digests differ, or that only one side has, sorted."""
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def _check_arrived(sent: Mapping[str, str], arrived: Mapping[str, str], engine: int) -> None:
    _check_names(sent, arrived, "sent", f"received by engine {engine}")
    if wrong := differing(sent, arrived):
        first = wrong[0]
        more = f" (and {len(wrong) - 1} more: {_shown(wrong[1:])})" if len(wrong) > 1 else ""
        fact = f"engine {engine} has received {first} with digest {arrived[first]}"
        raise SyncMismatch(f"{fact}, but {sent[first]} was sent{more}. {_AGAIN}")


def _check_names(wanted: Collection[str], found: Collection[str], was: str, became: str) -> None:
    missing, unknown = set(wanted) - set(found), set(found) - set(wanted)
    if missing or unknown:
        parts = [f"{_shown(missing)} not {became}, though {was}"] if missing else []
        parts += [f"{_shown(unknown)} {became}, though not {was}"] if unknown else []
        raise SyncMismatch(f"tensors of the weight update differ: {'; '.join(parts)}. {_AGAIN}")


def _shown(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{', '.join(ordered[:_SHOWN])}{more}"
