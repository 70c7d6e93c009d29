"""A process that reports which files and folders it flushes and which names it links, and may kill itself after a link.

ROOT KILL STEP...: KILL is the end of the name after whose link it sends itself SIGKILL, or "-". A step is "part"
(write_bytes), "file" (a file that is handed over), "hold" (the lease, until the end), "rerun", "choice" or the number
of the iteration whose manifest is committed.

flushes.py reads these arguments from its input: see `tests.storage.forks`.
"""

import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from storage.backends.root import Root, open_root
from storage.manifest import commit
from storage.ownership.lease import hold
from storage.parts import PartWriter
from storage.revisions import record_choice, record_rerun
from tasks.stages.names import Stage
from tests.storage.forks import serve
from tests.storage.revised import choice, rerun
from tests.storage.tables import manifest


def record(kill: str) -> None:
    """Make this process report each flush and link before anything else can happen."""
    fsync, link = os.fsync, os.link

    def said_fsync(descriptor):
        fsync(descriptor)
        sys.stdout.write(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink()}\n")

    def said_link(source, target, **options):
        link(source, target, **options)
        sys.stdout.write(f"link {target}\n")
        sys.stdout.flush()
        if str(target).endswith(kill):
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync, os.link = said_fsync, said_link


def do(root: Root, step: str, stack: ExitStack) -> None:
    writer = PartWriter(root, "run", 1, Stage.TRAIN)
    if step == "hold":
        stack.enter_context(hold(root, "run", "worker", 3600))
    elif step == "part":
        writer.write_bytes("part.arrow", b"content")
    elif step == "file":
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=root.folder.parents[1])))
        (folder / "part.arrow").write_bytes(b"content")
        writer.write_files(folder, ["part.arrow"])
    elif step == "rerun":
        record_rerun(root, "run", rerun(1, Stage.TRAIN, 1))
    elif step == "choice":
        record_choice(root, "run", choice(1), 1)
    else:
        commit(root, manifest(Stage.TRAIN, int(step)))


def begin(url: str, kill: str, *steps: str) -> None:
    record(kill)
    with ExitStack() as things:
        for asked in steps:
            do(open_root(url), asked, things)


if __name__ == "__main__":
    serve(begin)
