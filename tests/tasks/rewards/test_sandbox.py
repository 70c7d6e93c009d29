"""Programs of the policy end as its failures, whatever they do, and leave nothing."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from storage.errors import InputError
from tasks.config.reward import RewardSection
from tasks.rewards import sandbox
from tasks.rewards.code import code_tests, program_of, read_tests
from tasks.rewards.sandbox import ProgramLimits, Ran, SandboxFailed, check_sandbox, run_python
from tasks.rewards.trying import check_reward

LIMITS = ProgramLimits(seconds=2.0, processes=8, files_mb=4, memory_mb=256)

SAYS_WHERE = "import os; print(os.readlink('/proc/self/ns/pid'), flush=True)"

# programs that must not reach `print("reached")`
HOSTILE = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "memory": "whole = bytearray(1 << 30)",
    "memory in pieces": "kept = []\nwhile True: kept.append(bytes(1 << 20))",
    "one large file": "open('/tmp/large', 'wb').write(bytes(64 << 20))",
    "many files": "for n in range(64): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))",
    "shared memory": "open('/dev/shm/large', 'wb').write(b'1')",
    "root of the file system": "open('/here', 'w')",
    "system files": "open('/usr/here', 'w')",
    "its own text": "open('/program.py', 'w')",
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(60)",
    "endless output": "while True: print('a' * 1000)",
    "endless errors": "import sys\nwhile True: print('a' * 1000, file=sys.stderr)",
    "network": "import socket\nsocket.create_connection(('1.1.1.1', 53), 1)",
    "loopback": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "signals to the parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(PARENT, 9)",
    "signals to all": "import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(PARENT, signal.SIGKILL)",
    "the run's folder": "open('FOLDER/secret').read()",
    "environment": "import os\nassert 'SECRET_OF_THE_RUN' in os.environ",
    "environment of others": "assert b'SECRET_OF_THE_RUN' in open('/proc/PARENT/environ', 'rb').read()",
    "another user": "import os\nos.setuid(0)",
    "user namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "more limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "devices": "open('/dev/vda', 'rb')",
    "crash": "import ctypes\nctypes.string_at(0)",
    "recursion": "def f(): return f()\nf()",
}

# the same, of what only bubblewrap's options refuse
OUTSIDE = {
    "keys of the session": "import ctypes, platform\ncall = 250 if platform.machine() == 'x86_64' else 219\n"
    "assert ctypes.CDLL(None).syscall(call, 0, -3, 0) > 0",
    "memory of System V": "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
    "files in memory": "import os\nos.memfd_create('a')",
    "many empty files": "for n in range(5000): open(f'/tmp/{n}', 'w').close()",
}


@pytest.mark.parametrize("program", (HOSTILE | OUTSIDE).values(), ids=HOSTILE | OUTSIDE)
def test_hostile_programs_fail_and_leave_nothing(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "1")
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {"PORT": str(server.getsockname()[1]), "PARENT": str(os.getpid()), "FOLDER": str(tmp_path)}
        for word, value in words.items():
            program = program.replace(word, value)
        ran = run_python(f"{SAYS_WHERE}\n{program}\nprint('reached')", LIMITS)
    assert ran.code != 0
    assert "reached" not in ran.output
    assert len(ran.output) + len(ran.errors) <= LIMITS.output_kb * 1024 * 2
    assert still_there(ran) == set()


def still_there(ran: Ran) -> set[str]:
    """Processes of the sandbox whose name the program has printed first."""
    where, found = ran.output.splitlines()[0], set[str]()
    assert where.startswith("pid:[") and where != str(Path("/proc/self/ns/pid").readlink())
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # one of others, or one that ended
            if str((folder / "ns" / "pid").readlink()) == where and "State:\tZ" not in (folder / "status").read_text():
                found.add(folder.name)
    return found


def test_what_goes_on_in_the_background_ends_with_the_program():
    program = "import time\nif os.fork() == 0:\n    os.setsid(); os.close(1); os.close(2); time.sleep(60)\nprint(1)"
    ran = run_python(f"{SAYS_WHERE}\n{program}", LIMITS)
    assert (ran.code, ran.output.splitlines()[1:], ran.stopped) == (0, ["1"], None)
    assert still_there(ran) == set()


def test_where_orphans_become_children_none_is_left():
    program = """
import ctypes, os
from tasks.rewards.sandbox import ProgramLimits, run_python
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # as a scoring process
run_python("print(1)", ProgramLimits())
run_python("while True: pass", ProgramLimits(seconds=0.2))
os.waitpid(-1, os.WNOHANG)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ChildProcessError: [Errno 10] No child processes" in ran.stderr


def test_a_program_has_its_input_a_folder_and_the_standard_library():
    program = "import json\nopen('here', 'w').write(input())\nprint(json.loads(open('here').read())['a'])"
    assert run_python(program, LIMITS, '{"a": "ä"}').output == "ä\n"


@pytest.mark.parametrize(
    ("program", "seconds", "stopped"),
    [
        ("while True: pass", 0.5, "seconds"),
        ("while True: print('a' * 1000)", LIMITS.seconds, "output_kb"),
        ("raise SystemExit(3)", LIMITS.seconds, None),
    ],
)
def test_the_limit_that_stopped_a_program_is_told(program: str, seconds: float, stopped: str | None):
    ran = run_python(program, replace(LIMITS, seconds=seconds))
    assert (ran.stopped, ran.code) == (stopped, None if stopped else 3)


def test_a_sandbox_that_fails_is_no_failure_of_the_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "_NAMESPACE", ("--no-such-option",))
    with pytest.raises(SandboxFailed, match="no-such-option"):
        run_python("print(1)", LIMITS)
    with pytest.raises(SandboxFailed):
        code_tests({"tests": "assert True"}, "x = 1")
    with pytest.raises(InputError, match=r"does not start on this machine.*no-such-option"):
        check_sandbox()


def test_without_bubblewrap_nothing_runs_and_the_start_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxFailed, match="not installed"):
        run_python("print(1)", LIMITS)
    with pytest.raises(InputError, match="apt-get install bubblewrap"):
        check_reward(RewardSection(function="code_tests", max_failures=0.25))


def test_tests_that_outlast_the_call_are_refused_and_the_repair_works():
    slow = RewardSection(function="code_tests", arguments={"seconds": 8})
    with pytest.raises(InputError, match=r"reward\.deadline_s is 5\. Set it to 9 or more"):
        check_reward(slow)
    check_reward(slow.model_copy(update={"deadline_s": 9.0}))


DOUBLE = "def double(x):\n    return 2 * x"
PAIRS = [{"input": "4", "output": "8"}, {"input": "5\n", "output": "10 "}]
SCORES = {
    "right": (f"Here:\n```python\n{DOUBLE}\n```\nDone.", ["assert double(2) == 4"], 1.0),
    "the last block": (f"```python\nx = 1\n```\n```py\n{DOUBLE}\n```", "assert double(2) == 4", 1.0),
    "without a block": (DOUBLE, "assert double(2) == 4", 1.0),
    "thought does not count": (f"<think>```python\n{DOUBLE}\n```</think>nothing", "assert double(2) == 4", 0.0),
    "wrong": (DOUBLE, ["assert double(2) == 4", "assert double(2) == 5"], 0.0),
    "an open line": (f"{DOUBLE}\nprint(1, end='')", "assert double(2) == 4", 1.0),
    "leaves early": (f"{DOUBLE}\nraise SystemExit(0)", "assert double(2) == 5", 0.0),
    "leaves at once": ("import os\nos._exit(0)", "assert False", 0.0),
    "no program": ("I do not know.", "assert True", 0.0),
    "hangs": ("while True: pass", "assert True", 0.0),
    "input and output": ("print(2 * int(input()))", PAIRS, 1.0),
    "another output": ("print(8)", PAIRS, 0.0),
    "an output before it fails": ("print(8)\n1 / 0", [{"input": "4", "output": "8"}], 0.0),
}  # fmt: skip


@pytest.mark.parametrize(("response", "tests", "reward"), SCORES.values(), ids=SCORES)
def test_a_program_scores_by_its_tests(response: str, tests: object, reward: float):
    assert code_tests({"tests": tests}, response, seconds=60.0 if reward else 1.0) == reward


def test_the_seconds_are_of_all_tests_together():
    pairs = [{"input": "", "output": ""}] * 20
    began = time.monotonic()
    assert code_tests({"tests": pairs}, "import time\ntime.sleep(0.4)", seconds=1.0) == 0.0
    assert time.monotonic() - began < 20 * 0.4


@pytest.mark.parametrize(
    ("tests", "reason"),
    [([], "no test"), (None, "no test"), ([1], "neither"), ([{"input": "1"}], "neither"), ("assert (", "never closed"),
     ([{"input": 1, "output": "1"}], "neither")],
)  # fmt: skip
def test_tests_that_cannot_be_read_say_why(tests: object, reason: str):
    with pytest.raises((ValueError, TypeError, SyntaxError), match=reason):
        read_tests({"tests": tests}, "tests")


@pytest.mark.parametrize(
    "response",
    [
        "a\n```\nx = 1\n```\n```json\n{}\n```",
        "```bash\npip\n```\nThen:\n```python\nx = 1\n```",
        "```py\nx = 1\n```\nIt prints\n```text\n1\n```\nand\n```\n2\n```",
        "1. So:\n   ~~~Python\n   x = 1\n   ~~~",
        "```\na\n```\n```python title\nx = 1\n```\n```python\ny =",
    ],
)
def test_the_program_of_a_response(response):
    assert program_of(response) == "x = 1\n"
