"""The channel of one weight update, from trainer ranks to engine workers. Imports without torch."""

from typing import Literal

from trainer_core.frozen import Frozen

Transport = Literal["memory", "cuda", "collective", "files"]
"""`memory`: arenas in shared memory of the host. `cuda`: arenas on the senders' cards, opened by CUDA IPC.
`collective`: broadcasts of process groups of each sender and the receivers (NCCL on cards, gloo on CPU).
`files`: safetensors files in a folder or an object store that both sides reach."""


class Channel(Frozen):
    """The channel of one update. The stage that drives the update makes it, and every process gets the same one."""

    transport: Transport
    """The way in which bytes move."""
    folder: str
    """New, empty local folder in which both sides meet and count their progress; for `files` the folder or URL of the
    files."""
    receivers: int
    """Engine workers that read, over all engines."""
    arenas: int = 2
    """Buffers of `WeightPlan.arena_bytes` of each sender."""
    deadline_s: float = 600.0
    """Seconds that one side waits for the other before it gives up."""


def idle() -> None:
    """Do nothing while a bucket is on its way."""
