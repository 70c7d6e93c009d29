"""Event files: as TensorBoard reads them, and as they should be."""

import struct
from collections.abc import Sequence

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from flows.views.events import opening, record_of
from flows.views.table import Row, Series


def parsed(data: bytes) -> list[Event]:
    """The events of a file, read by the classes of another library, with its checksums."""
    found, start = [], 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        body = data[start + 12 : start + 12 + length]
        checks = struct.unpack_from("<I", data, start + 8) + struct.unpack_from("<I", data, start + 12 + length)
        assert checks == (masked_crc32c(data[start : start + 8]), masked_crc32c(body))
        found.append(Event.FromString(body))
        start += 16 + length
    return found


def encoded(rows: Sequence[Row]) -> bytes:
    """The file of a run that has these rows."""
    series = Series()
    named = [row.model_copy(update={"values": series.named(row)}) for row in rows]
    return b"".join([*map(opening, rows[:1]), *map(record_of, named)])
