"""Programs of the policy, run under bubblewrap, or in containers of podman, of an image with libraries for them: no
network, no files but Python's own, nothing left behind."""

import errno
import json
import os
import platform
import random
import re
import select
import selectors
import shutil
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from storage.errors import InputError, StageFailed
from storage.ownership.scratch import scratch

_MB, _KB = 1 << 20, 1 << 10
_FIRST_USER = 10**9
READY = b"limits are set"
START_S, GONE_S = 60.0, 30.0
_CHUNK = 1 << 16
_FILES = 4096  # files and folders of a program: the kernel has a KiB for each, and no limit of memory counts it
_NAMESPACE = ("--unshare-user", "--disable-userns")
_REFUSED_CALLS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, (248, 249, 250, 29, 64, 68, 240, 319, 447, 425, 321, 298, 323)),
    "aarch64": (0xC00000B7, (217, 218, 219, 194, 190, 186, 180, 279, 447, 425, 280, 241, 282)),
}
"""By machine, its number in filters, and those of system calls that lead out of the limits: keys of the session, which
a process inherits (add_key, request_key, keyctl), memory that no limit counts (shmget, semget, msgget, mq_open,
memfd_create, memfd_secret), and doors to the kernel (io_uring_setup, bpf, perf_event_open, userfaultfd)."""
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
_ID = re.compile("(sha256:)?[0-9a-f]{64}")
_LOOK_S = 0.1
_BEGINS_S = 30.0  # that Python may take to begin in a container that runs
_NOBODY = 65534
_ALONE = (
    "--rm", "--interactive", "--pull=never", "--log-driver=none", "--network=none", "--ipc=none", "--http-proxy=false",
    "--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges", "--workdir=/tmp",
    f"--user={_NOBODY}:{_NOBODY}", "--hostname=sandbox", "--entrypoint=",
)  # fmt: skip
_LAUNCHER = """
import os, resource, sys
ready, limits = {ready}, {limits}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
os.write(ready, {said})
os.close(ready)
os.execv(sys.executable, [sys.executable, "-X", "utf8", *{flags}, "/program.py"])
"""


class SandboxFailed(StageFailed):
    """The sandbox itself failed: nothing is known about the program."""


@dataclass(frozen=True)
class ProgramLimits:
    seconds: float = 10.0
    """Seconds to its end; the start of the sandbox does not count. A process has as many of processor time."""
    memory_mb: int = 512  # address space of each of its processes, in MiB
    processes: int = 16  # processes and threads at a time
    files_mb: int = 16  # bytes that it may write to files, which are in memory, in MiB
    output_kb: int = 64  # bytes that it may write to standard output and standard error together, in KiB


NO_TIME = ProgramLimits(seconds=0.0)


@dataclass(frozen=True)
class Ran:
    """The end of a program."""

    code: int | None  # exit code, 128 + N if signal N ended it; None if it was stopped for its time or its output
    output: str  # text that it wrote to standard output
    errors: str  # text that it wrote to standard error
    stopped: str | None  # limit for which it was stopped: `seconds` or `output_kb`


def check_sandbox() -> None:
    """Run a program in the sandbox. Raises InputError: it cannot be had on this machine, with reason and repair."""
    if shutil.which("bwrap") is None:
        raise InputError(
            "programs of the policy run only in a sandbox, and bubblewrap is not installed: "
            "`apt-get install bubblewrap`, or your system's package of that name"
        )
    try:
        ran = run_python("print(6 * 7)", ProgramLimits())
    except SandboxFailed as failure:
        raise InputError(
            "programs of the policy run only in a sandbox, which does not start on this machine: "
            f"{failure}. Allow user namespaces (`sysctl -w kernel.unprivileged_userns_clone=1`, and in Ubuntu "
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`); a container needs the capability "
            "SYS_ADMIN or a seccomp profile that allows them"
        ) from None
    if (ran.code, ran.output) != (0, "42\n"):
        raise InputError(f"the sandbox runs, but Python does not run in it: exit code {ran.code}, {ran.errors!r}")


def run_python(program: str, limits: ProgramLimits, given: str = "") -> Ran:
    """Run a Python program, which has the standard library alone and the text `given` as its standard input, and end
    every process that it has started. Raises SandboxFailed: the sandbox did not start, or did not end; never for what
    the program does."""
    if (bubblewrap := shutil.which("bwrap")) is None:
        raise SandboxFailed("bubblewrap is not installed")
    with ExitStack() as open_files:
        source, entered = (
            open_files.enter_context(in_memory(text.encode(errors="surrogatepass"))) for text in (program, given)
        )
        calls = open_files.enter_context(in_memory(_filter_of_calls()))
        heard, ready = _pipe(open_files)
        told, telling = _pipe(open_files)
        options = _options(limits, source.fileno(), calls.fileno(), telling.fileno())
        launch = launcher(f"{ready.fileno()}", bounds(limits) | {"NPROC": limits.processes}, "-I", "-S")
        running = subprocess.Popen(
            [bubblewrap, *options, os.path.realpath(sys.executable), "-I", "-S", "-c", launch],
            stdin=entered,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            pass_fds=[one.fileno() for one in (source, calls, ready, telling)],
        )
        with running:
            ready.close()
            telling.close()
            first = _first_process(told.read(), open_files)
            began = select.select([heard], [], [], START_S)[0] and os.read(heard.fileno(), len(READY)) == READY
            (output, errors), stopped = followed(running, limits if began else NO_TIME)
            _end(running, first)
        if not began:
            raise SandboxFailed(f"bubblewrap ended with code {running.returncode}: {errors.strip() or 'no message'}")
        return Ran(None if stopped else running.returncode, output, errors, stopped)


def in_memory(content: bytes) -> IO[bytes]:
    """A file without a name."""
    file = os.fdopen(os.memfd_create("sandbox"), "wb+")
    file.write(content)
    file.seek(0)
    return file


def _pipe(open_files: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    ends = os.pipe()
    reading, writing = os.fdopen(ends[0], "rb"), os.fdopen(ends[1], "wb")
    return open_files.enter_context(reading), open_files.enter_context(writing)


def _filter_of_calls() -> bytes:
    """A program of the kernel (classic BPF, seccomp(2)) which refuses these calls with EPERM, and every call of another
    machine's form. Raises SandboxFailed: they are not known for this machine."""
    if (machine := platform.machine()) not in _REFUSED_CALLS:
        raise SandboxFailed(f"no filter of system calls is known for {machine!r}: run on x86_64 or aarch64")
    number, refused = _REFUSED_CALLS[machine]
    left = range(len(refused), -1, -1)  # instructions between each comparison and the last one
    steps = [
        (0x20, 0, 0, 4), (0x15, 0, len(refused) + 3, number), (0x20, 0, 0, 0), (0x35, len(refused) + 1, 0, 1 << 30),
        *((0x15, after, 0, call) for after, call in zip(left, refused, strict=False)),
        (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50000 | errno.EPERM),
    ]  # fmt: skip
    return b"".join(struct.pack("HBBI", *one) for one in steps)


def _options(limits: ProgramLimits, source: int, calls: int, telling: int) -> list[str]:
    """Options of bubblewrap, up to the command that it runs. What may limit the number of files must not run the
    program: so there is a second user namespace, in which no further one can be made. The limit of processes does not
    bind root, so root becomes a user id that no other process has before it enters that."""
    as_root = os.geteuid() == 0
    nobody = f"{_FIRST_USER + random.SystemRandom().randrange(10**9)}"
    user = (
        ("SETUID", "--cap-add", "CAP_SETGID") if as_root else ("SETFCAP", "--unshare-user", "--uid", "0", "--gid", "0")
    )
    leave = ("setpriv", "--reuid", nobody, "--regid", nobody, "--clear-groups") if as_root else ()
    folders = [one for path in _SYSTEM for one in ("--ro-bind-try", path, path)]
    size = str(limits.files_mb * _MB)
    return [
        "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--cap-add",
        f"CAP_{user[0]}", *user[1:], "--info-fd", str(telling), "--seccomp", str(calls), *folders,
        *_python(), "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev",
        "--perms", "1777", "--size", size, "--tmpfs", "/tmp",
        "--perms", "0444", "--ro-bind-data", str(source), "/program.py", "--remount-ro", "/", "--chdir", "/tmp",
        "sh", "-c", f'mount -o remount,nosuid,nodev,nr_inodes={_FILES} tmpfs /tmp && exec "$0" "$@"',
        *leave, "bwrap", *_NAMESPACE, "--uid", nobody, "--dev-bind", "/", "/",
    ]  # fmt: skip


def _python() -> Iterator[str]:
    """Options that show the folder of this Python, below folders that every user may enter."""
    python = Path(sys.base_prefix).resolve()
    if not python.is_relative_to("/usr"):
        for folder in reversed(python.parents[:-1]):
            yield from ("--perms", "0755", "--dir", str(folder))
        yield from ("--ro-bind", str(python), str(python))


def bounds(limits: ProgramLimits) -> dict[str, int]:
    """Limits of each process, by the names of `resource`."""
    processor = int(limits.seconds) + 1
    sizes = {"AS": limits.memory_mb * _MB, "FSIZE": limits.files_mb * _MB}
    return {**sizes, "CPU": processor, "NOFILE": 64, "CORE": 0}


def launcher(ready: str, limits: Mapping[str, int], *flags: str) -> str:
    """A program that sets these limits within the sandbox, says so to the descriptor that the expression `ready` gives,
    closes it, and becomes Python with /program.py and the flags."""
    return _LAUNCHER.format(ready=ready, limits=dict(limits), said=READY, flags=flags)


def followed(running: subprocess.Popen[bytes], limits: ProgramLimits) -> tuple[tuple[str, str], str | None]:
    """Output and errors until both are closed, or the limit that stopped them."""
    assert running.stdout is not None and running.stderr is not None
    read = {running.stdout.fileno(): b"", running.stderr.fileno(): b""}
    until, stopped = time.monotonic() + limits.seconds, None
    with selectors.DefaultSelector() as waiting:
        for one in read:
            waiting.register(one, selectors.EVENT_READ)
        while waiting.get_map() and stopped is None:
            found = waiting.select(max(0.0, until - time.monotonic()))
            for key, _ in found:
                chunk = os.read(key.fd, _CHUNK)
                read[key.fd] += chunk
                if not chunk:
                    waiting.unregister(key.fd)
            over = sum(map(len, read.values())) > limits.output_kb * _KB
            stopped = "output_kb" if over else None if found else "seconds"
    if stopped is None:
        try:
            running.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = "seconds"
    texts = [text[: limits.output_kb * _KB].decode(errors="replace") for text in read.values()]
    return (texts[0], texts[1]), stopped


def _first_process(told: bytes, open_files: ExitStack) -> int | None:
    """A descriptor of the sandbox's first process; None if it did not begin, or has ended."""
    if not told:
        return None
    try:
        first = os.pidfd_open(json.loads(told)["child-pid"])
    except ProcessLookupError:
        return None
    open_files.callback(os.close, first)
    return first


def _end(running: subprocess.Popen[bytes], first: int | None) -> None:
    """End what still runs. The kernel ends every process of the sandbox before its first has ended, which dies with
    bubblewrap. Raises SandboxFailed: it is still there."""
    running.kill()
    running.wait()
    if first is not None and not select.select([first], [], [], GONE_S)[0]:
        raise SandboxFailed(f"processes of a program are still there {GONE_S:.0f} s after they were ended")
    if first is not None:
        with suppress(ChildProcessError):  # it is ours to collect only where orphans become our children
            os.waitid(os.P_PIDFD, first, os.WEXITED)


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
    with scratch() as folder, in_memory(given.encode(errors="surrogatepass")) as entered:
        source, ready = _files(folder, program)
        heard = os.open(ready, os.O_RDWR | os.O_NONBLOCK)
        options = [f"--name={name}", *_ALONE, *_podman_options(limits, source, ready)]
        launch = launcher('os.open("/ready", os.O_WRONLY)', bounds(limits), "-I")
        command = [podman, "run", *options, image, "python3", "-I", "-c", launch]
        try:
            running = subprocess.Popen(command, stdin=entered, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            with running:
                began = _began(heard, running)
                (output, errors), stopped = followed(running, limits if began else NO_TIME)
                running.kill()  # or what it does not read would hold up the container's end
                if stopped is not None:
                    _end_container(podman, name)
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


def _podman_options(limits: ProgramLimits, source: Path, ready: Path) -> list[str]:
    memory = f"{limits.memory_mb}m"
    return [
        f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={limits.processes}",
        f"--timeout={int(_BEGINS_S + limits.seconds) + 1}", f"--tmpfs=/tmp:rw,size={limits.files_mb}m,mode=1777",
        "--ulimit=nofile=64:64", "--ulimit=nproc=4096:4096",
        f"--volume={source}:/program.py:ro", f"--volume={ready}:/ready",
    ]  # fmt: skip


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


def _end_container(podman: str, name: str) -> None:
    """End the container, and every process in it. Raises SandboxFailed: it is still there."""
    command = [podman, "rm", "--force", "--ignore", "--time=0", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GONE_S, check=False)
    except subprocess.TimeoutExpired:
        raise SandboxFailed(f"container {name} is still there {GONE_S:.0f} s after it was ended") from None
    if done.returncode:
        raise SandboxFailed(f"container {name} was not ended: {done.stderr.strip()}")
