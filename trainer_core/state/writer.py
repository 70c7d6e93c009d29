"""Adapts megatron-core's writer of distributed checkpoints to files that are stored afterwards."""

import contextlib
import os
import queue
from collections.abc import Iterator
from typing import IO, Any, cast

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from trainer_core.state.open_stream import OpenStream
from trainer_core.state.repeatable import write_metadata


@contextlib.contextmanager
def scratch_writer() -> Iterator[None]:
    """Let dist_checkpointing.save write scratch files: fast, the same bytes each time, and no safer than necessary.

    Files are flushed and get a digest when they are stored, so nothing waits for the disk here, and torch's CRC of
    each tensor is left out. get_write_results_queue would start a Manager process per rank, which re-imports the main
    module (10 s) and outlives a rank that ends by a signal; a synchronous save writes in threads of this process.
    """
    flush, checksums = os.fsync, get_crc32_options()
    results, writer = filesystem_async.get_write_results_queue, filesystem_async.FileSystemWriterAsync
    os.fsync = lambda fd: None
    set_crc32_options(False)
    filesystem_async.get_write_results_queue = lambda mp_mode="spawn": queue.Queue()  # pyright: ignore
    filesystem_async.FileSystemWriterAsync = _Writer
    try:
        yield
    finally:
        filesystem_async.FileSystemWriterAsync = writer
        filesystem_async.get_write_results_queue = results
        set_crc32_options(checksums)
        os.fsync = flush


class _Writer(FileSystemWriterAsync):
    def __init__(self, path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self.transforms = _Untransformed()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for written in results for result in written}
        write_metadata(str(self.checkpoint_dir), metadata, places)


class _Untransformed(_StorageWriterTransforms):
    """torch makes a class for each tensor here, whose `write` is called for every few bytes of it."""

    def transform_save_stream(self, write_item: WriteItem, raw_stream: Any) -> tuple[IO[bytes], list[str]]:
        return cast(IO[bytes], OpenStream(raw_stream)), []
