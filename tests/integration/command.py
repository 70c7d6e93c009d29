"""The command line as a person uses it: a process, judged by its exit code, its output and its stored results."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from storage.backends.root import open_root
from storage.manifest import Manifest, need
from tasks.stages.names import Stage
from tests.forked_python import Finished, of_workers

PROJECT = Path(__file__).resolve().parent.parent.parent
TINY = Path(__file__).parent / "tiny.toml"
IN_FLIGHT = Path(__file__).parent / "in_flight.toml"
DEADLINE_S = 600  # only ends what hangs
RUN = "proof"
"""Id of the shared runs; those of `ratchet prove-resume` have it too, so that results can be compared."""
NOTEBOOK = """
import asyncio, runpy, sys

async def cell():  # under a running event loop, as in a notebook
    runpy.run_path(sys.argv[0], run_name="__main__")

sys.argv = sys.argv[1:]
asyncio.run(cell())
"""
PIECES = ["--set", "rollout.groups_per_part=2"]  # eight, so that it can be killed in the middle


def start(*arguments: str, home: Path) -> subprocess.Popen[str]:
    """Start `ratchet` with its own Prefect home, so that it neither sees nor disturbs other runs."""
    environment = {**os.environ, **of_workers(home / "python"), "PREFECT_HOME": str(home)}
    return subprocess.Popen(
        [str(home / "python"), "-m", "flows", *arguments],
        cwd=PROJECT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def python(folder: Path, home: Path, *words: str) -> Finished:
    """A Python process of a user, in a folder of theirs outside the checkout."""
    environment = {**os.environ, **of_workers(home / "python"), "PREFECT_HOME": str(home), "PYTHONPATH": str(PROJECT)}
    command = [str(home / "python"), *words]
    return finish(
        subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    )


def finish(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Finished:
    out, err = process.communicate(timeout=deadline_s)
    return Finished(process.returncode, out, err)


def ratchet(*arguments: str, home: Path) -> Finished:
    return finish(start(*arguments, home=home))


def run_tiny(root: str | Path, home: Path, *arguments: str) -> Finished:
    return ratchet("run", str(TINY), "--root", str(root), "--run", RUN, "--json", *arguments, home=home)


def prove(
    config: Path, root: str, iterations: int, kills: Sequence[str], settings: Sequence[str], home: Path
) -> Finished:
    """`ratchet prove-resume` with these kills, where each of its two runs samples for itself."""
    words = ["--root", root, "--iterations", str(iterations), "--regenerate", "--json"]
    words += [word for kill in kills for word in ("--at", kill)]
    words += [word for setting in settings for word in ("--set", setting)]
    return finish(start("prove-resume", str(config), *words, home=home), deadline_s=1700)


def committed(root: str, iteration: int, stage: Stage) -> Manifest:
    return need(open_root(root), RUN, iteration, stage)
