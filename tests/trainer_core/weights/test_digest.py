import hashlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_core.weights.digest_cases import buffer, cases, in_buffer
from trainer_core.weights.digest import (
    Cut,
    PlannedDigests,
    Whole,
    dtype_name,
    mix,
    tensor_digest,
    tensor_digests,
    thought_of,
)
from trainer_core.weights.plan import PlannedTensor


def tensor(count=1000, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000])
def test_equal_tensors_have_equal_digests(count, dtype):
    assert tensor_digest(tensor(count, dtype)) == tensor_digest(tensor(count, dtype).clone())


def test_the_layout_in_memory_does_not_matter():
    whole = tensor(1200).to(torch.bfloat16).view(30, 40)
    assert tensor_digest(whole.t()) == tensor_digest(whole.t().contiguous())
    assert tensor_digest(whole[3:]) == tensor_digest(whole[3:].clone())
    odd = whole.view(-1)[1:1001]  # starts within a 64-bit word
    assert tensor_digest(odd) == tensor_digest(odd.clone())


def test_type_and_shape_matter():
    values = torch.zeros(8)
    assert tensor_digest(values) != tensor_digest(values.view(2, 4))
    assert tensor_digest(values) != tensor_digest(values.view(torch.int32))
    assert tensor_digest(values) != tensor_digest(torch.zeros(9))


@given(first=st.integers(0, 999), second=st.integers(0, 999))
def test_swapped_elements_show(first, second):
    values = tensor()
    swapped = values.clone()
    swapped[first], swapped[second] = values[second], values[first]
    assert (tensor_digest(swapped) == tensor_digest(values)) == torch.equal(swapped, values)


@given(place=st.integers(0, 3999), bit=st.integers(0, 7))
def test_a_flipped_bit_shows(place, bit):
    damaged = tensor()
    damaged.view(torch.uint8)[place] ^= 1 << bit
    assert tensor_digest(damaged) != tensor_digest(tensor())


def test_a_large_tensor_is_the_sum_of_its_chunks(monkeypatch):
    values = tensor(100_000)
    whole = tensor_digest(values)
    monkeypatch.setattr("trainer_core.weights.digest._CHUNK", 1 << 10)
    assert tensor_digest(values) == whole


def test_digests_are_pinned():
    # trainer and engine may run different versions of torch or hardware; they must agree on this
    assert tensor_digest(torch.arange(5, dtype=torch.float32)) == "28f8ff657b305d5b2e8cf6d57e61c504"


def test_many_at_once_have_the_digests_that_each_has_alone():
    assert tensor_digests(cases()) == [tensor_digest(tensor.clone()) for tensor in cases()]
    assert tensor_digests([]) == []


@pytest.mark.parametrize("kind", [None, torch.float32])
def test_digests_planned_for_a_buffer_are_those_of_what_it_holds(kind):
    outlined = in_buffer(torch.empty_like(buffer(), device="meta"))
    wanted = [Cut(one, kind or one.dtype) for one in outlined]
    planned = PlannedDigests({7: wanted[:3], 9: wanted[3:]}, torch.device("cpu"))
    for octets in (buffer(), buffer().flip(0)):
        planned.begin(7, octets)
        planned.begin(9, octets)
        begun = planned.begun()
        tensors = [one.to(kind or one.dtype) for one in in_buffer(octets)]
        assert begun[7].read() + begun[9].read() == tensor_digests(tensors)


@pytest.mark.parametrize("offset", [0, 256, 12, 20])
def test_the_digest_of_a_whole_planned_tensor_is_planned_as_that_of_its_part_would_be(offset):
    kernel = pytest.importorskip("trainer_core.weights.digest_kernel")
    planned = PlannedTensor(name="a", dtype="float32", shape=(3, 5), bucket=0, offset=offset)
    whole, part = Whole(planned), Cut(thought_of(planned), torch.float32)
    octets = torch.arange(400, dtype=torch.int64).view(torch.uint8)
    assert (whole.head(), whole.rows()) == (part.head(), part.rows())
    assert whole.rows() == kernel.rows_in_buffer(part.of)
    assert torch.equal(whole.at(octets).view(torch.uint8), part.at(octets).view(torch.uint8))
    assert torch.equal(whole.at(octets).view(torch.uint8).view(-1), octets[offset : offset + 60])


@pytest.mark.parametrize("count", [1, 4099, 70_000])
def test_a_digest_is_the_sum_of_its_mixed_words(count):
    words = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(1))
    total = int(mix(words, torch.arange(count)).sum()) % 2**64
    head = f"{dtype_name(words.dtype)} {(count,)} {total:016x}"
    assert tensor_digest(words) == hashlib.blake2b(head.encode(), digest_size=16).hexdigest()


@pytest.mark.slow
def test_the_kernel_for_cards_finds_the_same():
    pytest.importorskip("triton")
    code = "from tests.trainer_core.weights.digest_cases import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
