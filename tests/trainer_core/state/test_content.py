"""The identity of a state's content: equal however the tensors are divided, different if anything differs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import RatchetError
from tests.trainer_core.ranks import run_ranks
from trainer_core.config import OptimizerConfig, ParallelConfig
from trainer_core.state.content import Identifier
from trainer_core.state.facts import StateFacts
from trainer_core.state.files import Box, Region, Shard

OPTIMIZER = OptimizerConfig(learning_rate=0.1)
FACTS = StateFacts(
    step=3, optimizer_updates=2, optimizer=OPTIMIZER, parallel=ParallelConfig(), precision="fp32",
    transformer_engine=False,
)  # fmt: skip
SHAPE, ROWS = (12, 6), 10  # the last two rows are padding


@st.composite
def boxes(draw):
    """A whole shape, a box in it, and a range of the box's elements."""
    size = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    start = [draw(st.integers(0, length - 1)) for length in size]
    shape = [draw(st.integers(1, length - begin)) for length, begin in zip(size, start, strict=True)]
    first, last = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return tuple(size), tuple(start), tuple(shape), first, last


@given(boxes())
@settings(max_examples=300, deadline=None)
def test_positions_and_regions_are_those_of_the_elements(drawn):
    size, start, shape, first, last = drawn
    whole = torch.arange(math.prod(size)).reshape(size)
    box = Box("name", size, size, Region(start, shape))
    inside = whole[tuple(slice(begin, begin + length) for begin, length in zip(start, shape, strict=True))]
    values = inside.reshape(-1)[first:last]
    assert box.positions(first, last - first, torch.device("cpu")).equal(values)
    regions = list(Shard(box, first, values).regions())
    for region, part in regions:
        assert part.equal(whole[region.within(Region((0,) * len(size), size))])
    assert torch.cat([part.reshape(-1) for _, part in regions] or [values]).equal(values)


def weights(dtype="float32"):
    values = torch.zeros(SHAPE)
    values[:ROWS] = torch.from_numpy(np.random.default_rng(0).standard_normal((ROWS, SHAPE[1]), np.float32))
    return values.to(getattr(torch, dtype))


def shard_of(values, rows, columns, cut=slice(None), size=SHAPE):
    """The elements `cut` of a box of a matrix."""
    start, shape = (rows.start, columns.start), (rows.stop - rows.start, columns.stop - columns.start)
    box = Box("matrix", size, (ROWS, SHAPE[1]), Region(start, shape))
    flat = values[rows, columns].reshape(-1)
    begin, end, _ = cut.indices(flat.numel())
    return Shard(box, begin, flat[begin:end])


ALL, LEFT, RIGHT = slice(0, SHAPE[1]), slice(0, 2), slice(2, SHAPE[1])
WHOLE = slice(0, SHAPE[0])
DIVISIONS = {
    "one rank": [[(WHOLE, ALL)], []],
    "rows": [[(slice(0, 6), ALL)], [(slice(6, 12), ALL)]],
    "columns": [[(WHOLE, LEFT)], [(WHOLE, RIGHT)]],
    "ranges": [[(WHOLE, ALL, slice(0, 31))], [(WHOLE, ALL, slice(31, None))]],
    "ranges of columns": [[(WHOLE, LEFT), (WHOLE, RIGHT, slice(17, None))], [(WHOLE, RIGHT, slice(0, 17))]],
}


def identities(rank, world_size, store):
    """Identities by name: of one matrix, divided in several ways, and of others."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)

    def identity(division, values=None, generators="0" * 32, size=SHAPE, facts=FACTS):
        values = weights() if values is None else values
        shards = [shard_of(values, *one, size=size) for one in division[rank]]
        try:
            return Identifier().identity(shards, facts, generators, rank, torch.device("cpu"))
        except RatchetError as error:
            return str(error)

    one, found = DIVISIONS["one rank"], {name: identity(division) for name, division in DIVISIONS.items()}
    swapped, signed = weights(), weights()
    swapped[0, 0], swapped[7, 3] = weights()[7, 3], weights()[0, 0]
    signed[11, 5] = -0.0
    stray = weights()
    stray[10, 0] = 1e-30
    found["less padding"] = identity([[(slice(0, 11), ALL)], []], size=(11, SHAPE[1]))
    found["negative zero in the padding"] = identity(one, signed)
    found["swapped"] = identity(one, swapped)
    found["bf16"] = identity(one, weights("bfloat16"))
    found["in the padding"] = identity(one, stray)
    found["twice"] = identity([[(WHOLE, ALL)], [(slice(0, 1), ALL)]])
    found["lost"] = identity([[(slice(0, 9), ALL)], []])
    found["step"] = identity(one, facts=FACTS.model_copy(update={"step": 4}))
    found["layout"] = identity(one, facts=FACTS.model_copy(update={"parallel": ParallelConfig(data=2)}))
    for name, drawn in {"drawn": ("f" * 32, "0" * 32), "drawn elsewhere": ("0" * 32, "f" * 32)}.items():
        found[name] = identity(one, generators=drawn[rank])
    return found


@pytest.fixture(scope="module")
def found():
    first, second = run_ranks(2, identities)
    assert first == second
    return first


@pytest.mark.parametrize("name", [*DIVISIONS, "less padding", "negative zero in the padding"])
def test_the_identity_does_not_depend_on_who_holds_what(found, name):
    assert found[name] == found["one rank"]


@pytest.mark.parametrize(
    ("name", "differing"),
    [
        ("swapped", ["tensors"]),
        ("bf16", ["tensors"]),
        ("step", ["progress"]),
        ("layout", ["generators"]),
        ("drawn", ["generators"]),
        ("drawn elsewhere", ["generators"]),
    ],
)
def test_the_identity_says_what_differs(found, name, differing):
    assert found[name].differences(found["one rank"], generators=True) == differing
    assert found[name].differences(found["one rank"], generators=False) == [
        one for one in differing if one != "generators"
    ]


def test_generators_belong_to_their_ranks(found):
    assert found["drawn"] != found["drawn elsewhere"]


def test_what_is_no_whole_state_is_refused(found):
    assert found["in the padding"].startswith("1 elements of matrix belong to no token")
    assert found["twice"].startswith("the ranks own 66 elements of matrix, whose shape is (10, 6)")
    assert found["lost"].startswith("the ranks own 54 elements of matrix")


def test_the_rules_of_the_identity_are_pinned(found):
    """Stored manifests hold it: other rules are another scheme."""
    one = found["one rank"]
    assert (one.scheme, one.tensors, one.progress, one.generators) == (
        1,
        "61661e0aa8da26409f5d150f6e293c4e",
        "3ba33c6883ee35151eba17f7f04fc5f7",
        "8340bf55ceae7859a1abbdfbe71d9a65",
    )


def test_a_setting_that_a_later_version_adds_does_not_change_the_progress():
    assert "clip_grad" not in FACTS.progress()["optimizer"]
    assert FACTS.progress()["optimizer"] == {"learning_rate": 0.1}
