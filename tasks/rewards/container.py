"""Programs of the policy, run in containers of podman: of an image that has the libraries which they may use."""

import os
import re
import select
import shutil
import subprocess
import time
import uuid
from pathlib import Path

from storage.errors import InputError
from storage.ownership.scratch import scratch
from tasks.rewards.sandbox import (
    GONE_S,
    NO_TIME,
    READY,
    START_S,
    ProgramLimits,
    Ran,
    SandboxFailed,
    bounds,
    followed,
    in_memory,
    launcher,
)

_ID = re.compile("(sha256:)?[0-9a-f]{64}")
_LOOK_S = 0.1
_BEGINS_S = 30.0  # that Python may take to begin in a container that runs
_NOBODY = 65534
_ALONE = (
    "--rm", "--interactive", "--pull=never", "--log-driver=none", "--network=none", "--ipc=none", "--http-proxy=false",
    "--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges", "--workdir=/tmp",
    f"--user={_NOBODY}:{_NOBODY}", "--hostname=sandbox", "--entrypoint=",
)  # fmt: skip


def check_image(image: str) -> None:
    """Run a program in a container of an image, which is named by its id. Raises InputError: it cannot be had on this
    machine; with the reason and a repair."""
    if shutil.which("podman") is None:
        raise InputError(
            f"programs of the policy are to run in containers of {image!r}, and podman is not installed: `apt-get "
            "install podman`, or leave image out, so that they run under bubblewrap"
        )
    if not _ID.fullmatch(image):
        asked = ["podman", "image", "inspect", "--format={{.Id}}", "--", image]
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        fact = f"{image!r} can be another image tomorrow: give the id of the one that is meant"
        there = f"image = {found!r} here" if found else f"podman has none of that name: `podman pull {image}` first"
        raise InputError(f"{fact}; {there}")
    try:
        ran = run_in_container(image, "print(6 * 7)", ProgramLimits())
    except SandboxFailed as failure:
        raise InputError(
            f"programs of the policy are to run in containers, and none starts: {failure}. `podman "
            "images --no-trunc` lists the ids of images that are here"
        ) from None
    if (ran.code, ran.output) != (0, "42\n"):
        raise InputError(f"python3 of image {image} does not run in a container: exit code {ran.code}, {ran.errors!r}")


def run_in_container(image: str, program: str, limits: ProgramLimits, given: str = "") -> Ran:
    """As `run_python`, in a container of the image with that id; the memory is that of all processes together. If this
    process is killed, podman ends the container by itself once the time for its start and the program is over. Raises
    SandboxFailed: the container did not start, or did not end; never for what the program does."""
    if (podman := shutil.which("podman")) is None:
        raise SandboxFailed("podman is not installed")
    name = f"ratchet-{uuid.uuid4().hex}"
    with scratch() as folder, in_memory(given) as entered:
        source, ready = _files(folder, program)
        heard = os.open(ready, os.O_RDWR | os.O_NONBLOCK)
        command = [podman, "run", f"--name={name}", *_ALONE, *_options(limits, source, ready), image, *_launch(limits)]
        try:
            running = subprocess.Popen(command, stdin=entered, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            with running:
                began = _began(heard, running)
                (output, errors), stopped = followed(running, limits if began else NO_TIME)
                running.kill()  # or what it does not read would hold up the container's end
                if stopped is not None:
                    _end(podman, name)
        finally:
            os.close(heard)
    if not began:
        raise SandboxFailed(f"podman ended with code {running.returncode}: {errors.strip() or 'no message'}")
    return Ran(None if stopped else running.returncode, output, errors, stopped)


def _files(folder: Path, program: str) -> tuple[Path, Path]:
    """The program, and the pipe by which its start is told; any user may read the one and write to the other."""
    source, ready = folder / "program.py", folder / "ready"
    source.write_text(program, errors="surrogatepass")
    source.chmod(0o444)
    os.mkfifo(ready)
    ready.chmod(0o666)
    return source, ready


def _options(limits: ProgramLimits, source: Path, ready: Path) -> list[str]:
    memory = f"{limits.memory_mb}m"
    return [
        f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={limits.processes}",
        f"--timeout={int(_BEGINS_S + limits.seconds) + 1}", f"--tmpfs=/tmp:rw,size={limits.files_mb}m,mode=1777",
        "--ulimit=nofile=64:64", "--ulimit=nproc=4096:4096",
        f"--volume={source}:/program.py:ro", f"--volume={ready}:/ready",
    ]  # fmt: skip


def _launch(limits: ProgramLimits) -> list[str]:
    return ["python3", "-I", "-c", launcher('os.open("/ready", os.O_WRONLY)', bounds(limits), "-I")]


def _began(heard: int, running: subprocess.Popen[bytes]) -> bool:
    """True once the limits are set in the container; False if podman ends before, or takes too long."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        ended = running.poll() is not None
        if select.select([heard], [], [], 0.0 if ended else _LOOK_S)[0]:
            return os.read(heard, len(READY)) == READY
        if ended:
            return False
    return False


def _end(podman: str, name: str) -> None:
    """End the container, and every process in it. Raises SandboxFailed: it is still there."""
    command = [podman, "rm", "--force", "--ignore", "--time=0", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GONE_S, check=False)
    except subprocess.TimeoutExpired:
        raise SandboxFailed(f"container {name} is still there {GONE_S:.0f} s after it was ended") from None
    if done.returncode:
        raise SandboxFailed(f"container {name} was not ended: {done.stderr.strip()}")
