"""Stand-in for Python in tests of the real stack: it asks a server to fork the process, and lives as long as that.

Whoever starts and ends processes does so with this one, which has their environment: a signal is handed on, the other
process dies with this one, by a pipe that only this one can write to, and this one ends as the other has ended. What no
server has imported begins as always. The first argument is the folder of the servers, the second is Python.
"""

import array
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

AGENTS = ("/ray/dashboard/agent.py", "/ray/_private/runtime_env/agent/main.py")
"""They end if their parent is not the raylet; so this process ends with it, and the forked one with this."""
RAY = ("/ray/dashboard/dashboard.py", "/ray/_private/log_monitor.py", "/ray/autoscaler/_private/monitor.py", *AGENTS)
PR_SET_PDEATHSIG = 1
WORKER = "/ray/_private/workers/default_worker.py"
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def kind_of(arguments: list[str]) -> str | None:
    """The kind of process; None if no server has what it needs.

    Of those that `multiprocessing` starts, engines and their workers are forked. The worker of a site begins as always:
    whoever ends a site looks for what the worker has started. The lines of the tutorial and of its example need
    transformers, which ranks have imported.
    """
    if arguments[0] == "-m":
        ours = arguments[1].split(".")[0] in ("flows", "uvicorn") and arguments[1] != "flows.site.worker"
        return "command" if ours else None
    if arguments[0].endswith("chat/make.py"):
        return "rank"
    if arguments[0] == "-c":
        if arguments[1].startswith("from transformers"):
            return "rank"
        spawned = "multiprocessing.spawn" in arguments[1] and "VLLM_WORKER_MULTIPROC_METHOD" in os.environ
        return "engine" if spawned else None if "multiprocessing" in arguments[1] else "command"
    if arguments[0].endswith(WORKER):
        return "engine" if "VLLM_WORKER_MULTIPROC_METHOD" in os.environ else "rank"
    return "command" if arguments[0].endswith(RAY) else None


def main(folder: str, python: str, arguments: list[str]) -> None:
    """Become Python, or stay for a process that is forked."""
    options = next((place for place, one in enumerate(arguments) if one[:2] not in ("-u", "-W")), len(arguments))
    kind = kind_of(arguments[options:]) if len(arguments) > options else None
    if kind is None or not Path(folder, kind, "socket").exists():
        os.execv(python, [python, *arguments])
    if arguments[options].endswith(AGENTS):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    files = [int(link.name) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    lifeline, _held = os.pipe()
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"{folder}/{kind}/socket")
    order = {
        "files": files, "arguments": arguments[options:], "environment": dict(os.environ), "folder": str(Path.cwd()),
        "ignored": {number: signal.getsignal(number) == signal.SIG_IGN for number in HANDED_ON},
    }  # fmt: skip
    passed = array.array("i", [*files, lifeline])
    server.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    server.sendall(json.dumps(order).encode())
    server.shutdown(socket.SHUT_WR)
    os.close(lifeline)
    answers = server.makefile()
    process = int(answers.readline() or os._exit(70))
    told = Path(folder, f"{os.getpid()}")  # for `own` in tests/forked_python.py
    told.with_suffix(".new").write_text(f"{process}")
    told.with_suffix(".new").rename(told)

    def hand_on(number: int, _: FrameType | None) -> None:
        os.kill(process, number)

    for number in HANDED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, hand_on)
    for file in files:
        os.close(file)  # whoever reads what the process writes waits for the process alone
    if arguments[options].endswith(WORKER):
        Path("/proc/self/comm").write_text("ray::Host")  # what Ray calls its worker, so that both are seen as such
    code = int(answers.readline() or "70")
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main(sys.argv[1], sys.argv[2], sys.argv[3:])
