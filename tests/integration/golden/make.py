"""Regenerate the golden run after a change of a format, until 0.1.0 is tagged.

    python -m tests.integration.golden.make

It stores a run that is killed in the rollout of iteration 2 when two of its four pieces are recorded, and beside it the
identity of each stage of the same run without interruption.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from storage import kill_points
from storage.backends.root import open_root
from storage.kill_points import Point
from storage.upkeep.catalog import contents
from tasks.config.environment import prepare_process

GOLDEN = Path(__file__).parent
RUN, PIECES = "golden", 2


def interrupted(url: str) -> None:
    """Run in this process until two pieces of iteration 2 are recorded, then kill it."""
    from flows.cli.app import execute

    def observe(point: Point, key: str) -> None:
        pieces = contents(open_root(url), RUN).pieces if "/000002/" in key and point is Point.MID_PART else ()
        if sum("/000002/" in piece for piece in pieces) == PIECES:
            os.kill(os.getpid(), signal.SIGKILL)

    prepare_process()
    sys.argv = _command(url)
    with kill_points.observed(observe):
        execute()


def _command(url: str) -> list[str]:
    return ["ratchet", "run", str(GOLDEN / "golden.toml"), "--run", RUN, "--root", url, "--json"]


def _digests(url: str) -> dict[str, str]:
    newest = contents(open_root(url), RUN).newest
    return {f"{one.stage}@{one.iteration}": one.digest for one in newest}


def main() -> None:
    """Make both runs and write the archive and the identities."""
    with TemporaryDirectory() as folder:
        whole, killed = (f"file://{folder}/{name}" for name in ("whole", "killed"))
        environment = {**os.environ, "PREFECT_HOME": f"{folder}/home"}
        subprocess.run([sys.executable, "-m", "flows", *_command(whole)[1:]], env=environment, check=True)
        code = subprocess.run(
            [sys.executable, "-c", f"from tests.integration.golden.make import interrupted; interrupted({killed!r})"],
            env=environment,
        ).returncode
        if code != -signal.SIGKILL:
            sys.exit(f"the run that was to be killed ended with code {code}")
        digests = _digests(whole)
        (GOLDEN / "digests.json").write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
        with tarfile.open(GOLDEN / "run.tar.gz", "w:gz") as archive:
            archive.add(f"{folder}/killed", arcname=".")
        shutil.rmtree(f"{folder}/home", ignore_errors=True)


if __name__ == "__main__":
    main()
