"""The table of metrics as a TensorBoard event file: one event for each iteration.

The format is written here because the libraries that do it import torch, which a process that only drives or shows a
run does not: event.proto, summary.proto and record_writer.h of TensorFlow."""

import struct

from flows.views.table import GrowingFile, Row
from flows.views.trackers import TrackedRun
from storage import layout
from storage.backends.root import Root

_VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reversed
_MASK = 0xA282EAD8
_WORD = 0xFFFFFFFF


def opening(row: Row) -> bytes:
    """The record with which a file begins: it names the format."""
    return _record(_double(1, row.finished.timestamp()) + _bytes(3, _VERSION.encode()))


def record_of(row: Row) -> bytes:
    """The record of a row; its time is that of the iteration's last stage."""
    values = (_bytes(1, name.encode()) + _float(2, value) for name, value in row.values.items())
    summary = b"".join(_bytes(1, value) for value in values)
    return _record(_double(1, row.finished.timestamp()) + _key(2, 0) + _varint(row.iteration) + _bytes(5, summary))


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


class TensorBoard:
    """The event file of a run, as a `Tracker`. It compares the file with all rows, and writes on where they differ."""

    def __init__(self, root: Root, run: str) -> None:
        self._file = GrowingFile(root, layout.report_key(run, layout.EVENTS))
        self._there, self._equal, self._begun = b"", 0, False

    def begin(self, run: TrackedRun) -> int:
        self._there, self._equal, self._begun = self._file.read(), 0, False
        return 0

    def log(self, row: Row) -> None:
        """Add the row of the next iteration, unless the file has it. Correct records stay: a reader can go on."""
        record = record_of(row) if self._begun else opening(row) + record_of(row)
        end = self._equal + len(record)
        if self._there[self._equal : end] == record:
            self._equal = end
        elif self._equal < len(self._there):
            self._file.replace(self._there[: self._equal] + record)
            self._there, self._equal = b"", 0
        else:
            self._file.append(record)
            self._there, self._equal = b"", 0
        self._begun = True

    def end(self, complete: bool) -> None:
        """Remove records of rows that do not exist any more, and upload."""
        if self._equal < len(self._there):
            self._file.replace(self._there[: self._equal])
            self._there = b""
        self._file.flush()
