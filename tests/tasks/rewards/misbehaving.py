"""Reward functions that misbehave, found by dotted name."""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction

import numpy as np


def crashing(record, response):
    if response == "die":
        os._exit(3)
    if response == "raise":
        raise ValueError("no number in it")
    sys.stdout.write("to standard output, which must not disturb\n")
    return 0.5


RETURNED = {
    "nan": math.nan,
    "infinity": -math.inf,
    "numpy": np.float32("nan"),
    "too large": 3.5e38,
    "huge": 10**400,
    "text": "0.5",
    "nothing": None,
    "list": [0.5],
    "complex": 0.5j,
    "empty": {},
    "part": {"good": 1.0, "bad": math.nan},
    "sum": {"one": 3e38, "two": 3e38},
    "integer": 1,
    "truth": True,
    "fraction": Fraction(1, 4),
    "half": np.float16(0.5),
    "largest": -float(np.finfo(np.float32).max),
    "parts": {"good": np.float32(0.25), "bad": -1},
}


def returning(record, response):
    return RETURNED[response]


def complaining(record, response):
    raise ValueError(f"cannot read {response}\udc80")


def judged(record, response, *, api_key, headers):
    if response == "raise":
        raise ValueError(f"401 for {api_key} with {headers['Authorization']}")
    if response == "tell":
        return api_key
    if response == "die":
        sys.stderr.write(f"{'.' * 490}{api_key}\n")
        os._exit(3)
    if response == "cut":
        raise ValueError("." * 980 + api_key)  # at the end of the stored text
    return float(api_key == record["key"] and headers["Authorization"] == record["key"])


def losing(records, responses):
    return [len(text) / 0 for text in responses]


NOT_A_FUNCTION = 3


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


def behaving(record, response):
    """1.0, after what the response says."""
    BEHAVIOUR[response]()
    return 1.0


def raising(error):
    def call():
        raise error

    return call


def hang_deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def leave_a_daemon():
    """A process that no longer belongs to the group or the parent of this one."""
    subprocess.run([sys.executable, "-c", DAEMON], check=True)


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
"""


def forget():
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def later(seconds, action):
    return lambda: threading.Timer(seconds, action).start()


BEHAVIOUR = {
    "nothing": lambda: None,
    "raise": raising(KeyError("answer")),
    "raise without text": raising(NoText()),
    "interrupt": raising(KeyboardInterrupt()),
    "sys.exit": lambda: sys.exit("enough"),
    "os._exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill the group": lambda: os.killpg(0, signal.SIGKILL),
    "real-time signal": lambda: os.kill(os.getpid(), 40),
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(600),
    "hang deaf": hang_deaf,
    "print": lambda: sys.stdout.write("x" * 3_000_000),
    "print and hang": lambda: [sys.stderr.write("x" * 1000) for _ in iter(int, 1)],
    "fork": os.fork,
    "forget": forget,
    "close": lambda: os.closerange(0, 200),
    "read": lambda: sys.stdin.read() and os._exit(1),
    "daemon": leave_a_daemon,
    "child": lambda: subprocess.Popen(["sleep", "600"]),
    "threads": lambda: [threading.Thread(target=time.sleep, args=(600,)).start() for _ in range(8)],
    "die later": later(0.05, lambda: os._exit(4)),
    "slow": lambda: time.sleep(0.3),
    "kill the keeper": lambda: os.kill(os.getppid(), signal.SIGKILL),
}
