"""A bucket's conversions: views before its turn, the others in it, and nothing is kept after it."""

from tests.tasks.engine_update import plan_of
from tests.trainer_core.ranks import run_ranks


def filled(_rank, _world, _store):
    """Tensors converted until the bucket's turn and after it, their places in the arena, and those kept then."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from trainer_core.weights.conversion import Conversion, Parcel, Positions
    from trainer_core.weights.exchange import Shards
    from trainer_core.weights.packing import tensors_of, views
    from trainer_core.weights.plan import Row

    converted, made = [], []

    def conversion(name, are_views):
        def convert(tensor):
            converted.append(name)
            if are_views:
                return {name: tensor[:2]}
            made.append(torch.arange(3) + tensor.long()[0, :3])
            return {name: made[-1]}

        row = Row(name=name, expert=False, tensors=())
        module = torch.nn.Linear(4, 4)
        return Conversion(row, module, "weight", module.weight, False, are_views, convert, None)

    conversions = [conversion("seen", True), conversion("made", False), conversion("seen too", True)]
    tensors = {one.row.name: one.convert(one.live)[one.row.name] for one in conversions}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    plan = plan_of(tensors)
    (planned,) = tensors_of(plan).values()
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    parcel = Parcel(planned, conversions)
    converted.clear()
    parcel.look()
    before = list(converted)
    parcel.fill(arena, Shards(), Positions(torch.device("cpu")))
    kept = StorageWeakRef(made[-1].untyped_storage())
    made.clear()
    right = all(torch.equal(tensor, expected[name]) for name, tensor in views(planned, arena))
    return before, converted[len(before) :], right, kept.expired()


def test_views_are_made_ahead_and_what_was_packed_is_not_kept():
    assert run_ranks(1, filled) == [(["seen", "seen too"], ["made"], True, True)]


def rows_twice(_rank, _world, _store):
    """Positions requested in a row, and again after the first were changed in place."""
    import torch

    from trainer_core.weights.conversion import Positions

    positions = Positions(torch.device("cpu"))
    asked = [(8,), (8.0,), (0, 8, 2), (1, 8, 2), (0, 8, 4)]
    equal = [torch.equal(positions.arange(*bounds), torch.arange(*bounds)) for bounds in asked]
    again = positions.arange(8) is positions.arange(8)
    positions.arange(8).add_(1)
    return equal, again, torch.equal(positions.arange(8), torch.arange(8))


def test_positions_are_those_that_were_asked_for_and_are_made_once():
    assert run_ranks(1, rows_twice) == [([True] * 5, True, True)]
