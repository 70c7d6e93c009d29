import io

import pytest
import torch

from storage.backends.local import CHUNK_BYTES
from trainer_core.state.open_stream import OpenStream


@pytest.mark.parametrize("numbers", [1, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, CHUNK_BYTES])
def test_what_is_written_in_pieces_is_what_torch_writes(numbers):
    tensor, whole, pieces = torch.arange(numbers), io.BytesIO(b"before"), io.BytesIO(b"before")
    whole.seek(0, io.SEEK_END)
    pieces.seek(0, io.SEEK_END)
    torch.save(tensor, whole)
    stream = OpenStream(pieces)
    torch.save(tensor, stream)
    stream.close()
    assert pieces.getvalue() == whole.getvalue()


def test_no_write_is_larger_than_a_piece():
    sizes = []

    class Sizes(io.BytesIO):
        def write(self, data):
            sizes.append(len(data))
            return super().write(data)

    torch.save(torch.zeros(CHUNK_BYTES), OpenStream(Sizes()))
    assert sum(sizes) > 4 * CHUNK_BYTES
    assert max(sizes) == CHUNK_BYTES
