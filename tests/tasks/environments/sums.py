"""Environments of tests: a game over the digits that small engines answer, and others that do not do their part."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path


class Sums:
    """Say a sum after each answer, `turns` times; the reward of an answer is its last digit."""

    def __init__(self, turns=3, log=""):
        self._turns, self._log = turns, log

    async def reset(self, record, seed):
        self._said, self._seed, self._id = 0, seed, record["id"]
        return record["prompt"]

    async def step(self, action):
        self._said += 1
        if self._log:
            with Path(self._log).open("a") as file:
                file.write(json.dumps([self._id, self._said, action, self._seed]) + "\n")
        done = self._said == self._turns
        return None if done else f"{len(action)}+{self._seed % 7}=", float(action[-1]) if action else 0.0, done


class Replayed(Sums):
    """The same, which goes on in another process."""

    async def replay(self, turns):
        self._said = len(turns)


class Loaded(Sums):
    """The same by a text."""

    async def save(self):
        return json.dumps([self._said, self._seed, self._id])

    async def load(self, record, seed, state):
        self._said, self._seed, self._id = json.loads(state)


class Unreliable(Sums):
    """Sandboxes of which a share fails in each turn, and a judge that fails in the last one; the answers decide."""

    def __init__(self, sandbox=0, judge=0):
        super().__init__()
        self._sandbox, self._judge = sandbox, judge

    async def step(self, action):
        chance = sum(map(ord, action)) * 7919 + self._said * 31
        if chance % 100 < self._sandbox:
            raise ConnectionError("the sandbox is gone")
        said, reward, done = await super().step(action)
        return said, None if done and chance // 100 % 100 < self._judge else reward, done


class Unseeded(Replayed):
    """Draws what it asks from something else than its seed."""

    async def reset(self, record, seed):
        await super().reset(record, seed)
        self._seed = random.randrange(10**9)
        return f"{self._seed}="

    async def step(self, action):
        said, _, done = await super().step(action)
        return said, float(self._seed), done


class Odd(Sums):
    """Gives what few environments give."""

    tools = ()

    def __init__(self, how):
        super().__init__()
        self._how = how
        if how == "tools":
            self.tools = ["calculator"]

    async def step(self, action):
        said, reward, done = await super().step(action)
        others = {"assistant": [{"role": "assistant", "content": "1="}], "surrogate": "1\udc80="}
        return None if done else others.get(self._how, said), reward, done


class Once(Replayed):
    """Fails in its second turn if nothing else has, by a file: dies, or hangs."""

    def __init__(self, marks, how):
        super().__init__()
        self._marks, self._how = Path(marks), how

    async def step(self, action):
        if self._said == 1:
            try:
                (self._marks / str(self._seed)).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                await misbehave(self._how, self._marks)
        return await super().step(action)


async def misbehave(how, folder=None):
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        subprocess.Popen(["sleep", "987654"], cwd=folder)
        await asyncio.sleep(987654)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "block":
        signal.pause()
    if how == "raise":
        raise RuntimeError("no")


class Leaving(Sums):
    """Starts a process that outlives the one which has started it, and ends itself in the turn whose answer is `2`."""

    async def reset(self, record, seed):
        subprocess.Popen(["sh", "-c", "setsid sleep 987654 & setsid setsid sleep 987654 &"]).wait()
        return await super().reset(record, seed)

    async def step(self, action):
        await misbehave("die" if action == "2" else "")
        return await super().step(action)


class Forking(Sums):
    """Forks, and goes on in both processes."""

    async def step(self, action):
        os.fork()
        return await super().step(action)


class Ending(Sums):
    """Ends its process as the answer says."""

    async def step(self, action):
        match action:
            case "exit":
                sys.exit(3)
            case "task":
                await asyncio.create_task(self.leave())
            case "interrupt":
                raise KeyboardInterrupt
            case "code":
                os._exit(3)
            case "signal":
                os.kill(os.getpid(), signal.SIGSEGV)

    async def leave(self):
        sys.exit("no " * 9999)


class Unmade(Sums):
    """Can be made once, by a file."""

    def __init__(self, marks):
        super().__init__()
        if Path(marks).exists():
            raise ConnectionError("the sandbox is gone")
        Path(marks).touch()


class Toolless(Sums):
    """Shows tools that it has not loaded."""

    @property
    def tools(self):
        return self._loaded_tools


class Greedy(Sums):
    """Allocates 1 GiB in the turn whose answer is `2`."""

    async def step(self, action):
        self._held = bytearray(1 << 30) if action == "2" else b""
        return await super().step(action)


KINDS = ("good", "die", "hang", "stop", "block", "raise", "message", "endless", "speaks", "nan", "set")


class Bad(Sums):
    """Does in its second turn what its record says; good ones are among them."""

    @staticmethod
    def kind(name):
        return KINDS[sum(map(ord, name)) % len(KINDS)]

    async def step(self, action):
        said, reward, done = await super().step(action)
        if self._said < 2:
            return said, reward, done
        kind = self.kind(self._id)
        await misbehave(kind)
        answers = {
            "message": ([{"role": "user"}], 0.0, False),
            "endless": ("1" * (2 << 20), 0.0, False),
            "speaks": ("one more", 1.0, True),
            "nan": (None, float("nan"), True),
            "set": ([{"role": "user", "content": "1", "more": {1}}], 0.0, False),
        }
        return answers.get(kind, (said, reward, done))
