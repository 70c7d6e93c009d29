"""The table of metrics as a TensorBoard event file: one event for each iteration.

The format is written here because the libraries that do it import torch, which a process that only drives or shows a
run does not: event.proto, summary.proto and record_writer.h of TensorFlow.
"""

import struct
from collections.abc import Mapping, Sequence

from flows.views.table import Row, Series
from storage import layout
from storage.backends.root import Root
from storage.derived import GrowingFile

_VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reversed
_MASK = 0xA282EAD8
_WORD = 0xFFFFFFFF


def encode(rows: Sequence[Row]) -> bytes:
    """The file: an event that names the format, then one for each row. The same rows give the same bytes."""
    return _encoded(rows, Series())


def _encoded(rows: Sequence[Row], series: Series) -> bytes:
    opening = _double(1, rows[0].finished.timestamp() if rows else 0.0) + _bytes(3, _VERSION.encode())
    return _record(opening) + b"".join(record_of(row, series.named(row)) for row in rows)


def record_of(row: Row, values: Mapping[str, float]) -> bytes:
    """The record of a row's values, by the names of their curves; its time is that of the iteration's last stage."""
    tagged = (_bytes(1, name.encode()) + _float(2, value) for name, value in values.items())
    summary = b"".join(_bytes(1, value) for value in tagged)
    return _record(
        _double(1, row.finished.timestamp()) + _key(2, 0) + _varint(row.iteration) + _bytes(5, summary),
    )


def _record(data: bytes) -> bytes:
    # length, its masked CRC, content, its masked CRC
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    register = _WORD
    for byte in data:
        register = _TABLE[(register ^ byte) & 0xFF] ^ (register >> 8)
    crc = register ^ _WORD
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK) & _WORD)


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = [_table_entry(value) for value in range(256)]


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _varint(value: int) -> bytes:
    done = bytearray()
    while value > 0x7F:
        done.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*done, value])


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, 2) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    largest = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
    return _key(field, 5) + struct.pack("<f", min(max(value, -largest), largest))


class EventFile:
    """The event file of a run, one record at a time."""

    def __init__(self, root: Root, run: str) -> None:
        self._file = GrowingFile(root, layout.report_key(run, layout.EVENTS))
        self._begun, self._series = False, Series()

    def load(self, rows: Sequence[Row]) -> None:
        """Make the file hold exactly these rows. What is right at its beginning stays, so that a reader can go on."""
        self._begun, self._series = bool(rows), Series()
        if self._file.read() != (whole := _encoded(rows, self._series) if rows else b""):
            self._file.replace(whole)

    def add(self, row: Row) -> None:
        """Add the row of the next iteration."""
        if self._begun:
            self._file.append(record_of(row, self._series.named(row)))
        else:
            self.load([row])

    def flush(self) -> None:
        """Upload what was not uploaded yet."""
        self._file.flush()
