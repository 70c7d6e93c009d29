"""Token columns become texts a batch at a time."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models

from tasks.data.tokenizer import TextCodec

STOP = 999


@pytest.fixture(scope="module")
def codec():
    """A tokenizer of a thousand words, of which the last is special."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1000)}, unk_token="w0"))
    tokenizer.add_special_tokens([f"w{STOP}"])
    return TextCodec(tokenizer, (STOP,), 10)


def column(lengths, value=None):
    """An array of lists of these lengths, of random tokens or of `value`."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    random = np.random.default_rng(0).integers(300, 1000, offsets[-1])
    tokens = random if value is None else np.full(offsets[-1], value)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens.astype(np.int32)))


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 1], [70_000, 1, 70_000], [40_000] * 5, [1] * 3000], ids=len)
def test_a_column_is_decoded_as_its_rows_are(codec, lengths):
    whole = column(lengths)
    expected = [codec.tokenizer.decode(row, skip_special_tokens=True) for row in whole.to_pylist()]
    assert codec.decode_column(whole) == expected
    cut = len(lengths) // 3
    assert codec.decode_column(pa.chunked_array([whole.slice(0, cut), whole.slice(cut)])) == expected
    assert codec.decode_column(whole.slice(cut)) == expected[cut:]


def test_rows_of_any_kind_are_decoded(codec):
    assert codec.decode_batch([[1, 2], np.array([3, STOP], np.int32), (4,), []]) == ["w1 w2", "w3", "w4", ""]


def test_no_column_becomes_lists_as_a_whole(codec):
    tokens = column([1000] * 1000, STOP)  # their text is empty
    tracemalloc.start()
    texts = codec.decode_column(pa.chunked_array([tokens]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts == [""] * 1000
    assert peak < tokens.nbytes  # as lists the column takes nine times as much
