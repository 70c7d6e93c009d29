"""A host of environments: imports their class once, and forks a process for each conversation.

Started by `tasks.environments.hosting`, with a socket of packets as standard input: the first packet is the order, each
further one opens a conversation, with the descriptor of its own socket, or ends one. It ends, and everything that its
processes have started, when nobody holds the other end.
"""

import asyncio
import ctypes
import gc
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import psutil

from storage.errors import InputError
from tasks.environments.playing import Driven, begun, called, loaded, made_by, stepped, takes_calls, tools_of
from tasks.environments.protocol import Turn
from tasks.rewards.words import LONGEST, described, hide, shown, storable
from tasks.rewards.worker import killed_with_descendants
from trainer_core.user_code import UserFunction

LARGEST = 1 << 20  # bytes of an answer of an environment: one that says more has failed
PACKET = 1 << 17
_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36
_TICK_S = 1.0


def main() -> None:
    """Serve one order."""
    _adopt()
    control = socket.socket(fileno=0)
    order = json.loads(control.recv(PACKET))
    hide(order["secrets"])
    found = UserFunction(**order["target"])
    try:
        it = loaded(found)
        make = partial(made_by, found, it.function, order["arguments"])
        made = make()  # refused now, not in every conversation
        reads = not isinstance(made, Driven) and takes_calls(made)
        if isinstance(made, Driven) and (openai := sys.modules.get("openai")):
            asyncio.run(_warmed(openai))
        gc.freeze()  # a collection in a fork would copy every page of what is imported
        hello = {"status": "ready", "source": it.digest, "drives": isinstance(made, Driven), "reads": reads}
        control.send(json.dumps(hello).encode())
        started = {-one.pid: one.pid for one in psutil.Process().children()}  # for all conversations, by the module
        _Conversations(control, make, order["memory_mib"], started).serve()
    except InputError as error:
        control.send(json.dumps({"status": "refused", "detail": storable(str(error))}).encode())
    except Exception as error:  # noqa: BLE001 - a module may raise anything while it is imported
        control.send(json.dumps({"status": "refused", "detail": described(error)}).encode())
    killed_with_descendants(None)


async def _warmed(openai: Any) -> None:
    """Ask for two answers that are made up, one of them streamed: a client imports most of itself, and builds the types
    of what it is given, at its first requests, and the forks share that."""
    call = {"index": 0, "id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "delta": message}
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
    said = json.dumps({"id": "", "created": 0, "model": "", "choices": [choice], "usage": usage})
    answers = iter([("application/json", said), ("text/event-stream", f"data: {said}\n\n")])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        kind, text = next(answers)
        head = f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write(f"{head}{text}".encode())
        await reader.read()  # what is left of the request, until the client has gone
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=5.0) as client:
            with suppress(openai.OpenAIError):
                asked = {"model": "", "messages": [message], "tools": []}
                await client.chat.completions.create(**asked)
                _ = [one async for one in await client.chat.completions.create(**asked, stream=True)]


def _adopt() -> None:
    """Keep below this process what its descendants have started and left."""
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass
class _Conversations:
    """The processes of conversations, and what the packets ask for."""

    control: socket.socket
    make: Callable[[], Any]
    memory_mib: int | None
    processes: dict[int, int]  # by the number of the conversation
    codes: dict[int, int] = field(default_factory=dict)  # exit codes of those that have ended by themselves
    ended: list[int] = field(default_factory=list)

    def serve(self) -> None:
        """Until nobody holds the other end."""
        due = 0.0
        while self._next():
            if self.ended and time.monotonic() > due:  # seldom: it looks at all processes of the machine
                _end(set(self.processes.values()))
                self.ended.clear()
                due = time.monotonic() + _TICK_S

    def _next(self) -> bool:
        """Do what the packets that have come ask for; False if there is none any more."""
        patience, goes_on = _TICK_S, True
        while goes_on and select.select([self.control], [], [], patience)[0]:
            packet, descriptors, _, _ = socket.recv_fds(self.control, PACKET, 1)
            asked, patience, goes_on = json.loads(packet or "{}"), 0.0, bool(packet)
            if "open" in asked:
                self._open(asked["open"], *descriptors)
            elif "how" in asked:
                self._tell(asked["how"], *descriptors)
            elif asked.get("end") in self.processes:  # else an earlier host has opened it
                self._close(asked["end"])
            for one in descriptors:
                os.close(one)
        self._reap()
        return goes_on

    def _open(self, number: int, descriptor: int) -> None:
        host, process = os.getpid(), os.fork()
        if process == 0:
            self.control.close()
            _serve(self.make, self.memory_mib, descriptor, host)
        for other in [one for one, before in self.processes.items() if before == process]:  # it ended by itself
            del self.processes[other]
        self.codes.pop(process, None)
        self.processes[number] = process

    def _tell(self, number: int, descriptor: int) -> None:
        """Write the exit code of the process of a conversation, which has closed its socket."""
        with suppress(KeyError, OSError):  # of an earlier host; nobody waits for it any more
            process = self.processes[number]
            if process not in self.codes:
                life = os.pidfd_open(process)
                select.select([life], [], [], _TICK_S)  # its socket is closed a little before it has ended
                os.close(life)
                self._reap()
            os.write(descriptor, str(self.codes[process]).encode())

    def _close(self, number: int) -> None:
        process = self.processes.pop(number)
        self.ended.append(process)
        self.codes.pop(process, None)
        with suppress(ChildProcessError):  # it ended by itself, and its number may be that of a stranger
            os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(process, signal.SIGKILL)

    def _reap(self) -> None:
        ours = set(self.processes.values())
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in ours:
                    self.codes[found[0]] = os.waitstatus_to_exitcode(found[1])


def _end(kept: set[int]) -> None:
    """Kill everything below this process but `kept` and what is below them: what a conversation has started is below
    its process, however it was started, and below this one once that has ended."""
    doomed, below, host = list[psutil.Process](), set[int](), os.getpid()
    for one in psutil.Process().children(recursive=True):  # a parent comes before its children
        with suppress(psutil.NoSuchProcess):
            if (one.pid not in kept) if (parent := one.ppid()) == host else parent in below:
                doomed.append(one)
                below.add(one.pid)
    for one in doomed:  # all are known before the first dies, whose children get another parent
        with suppress(psutil.NoSuchProcess):
            one.kill()


def _serve(make: Callable[[], Any], memory_mib: int | None, descriptor: int, host: int) -> NoReturn:
    """The forked process: one environment, and an answer to each line."""
    try:
        os.setsid()  # an environment that signals its group does not reach the host
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _adopt()
        if os.getppid() == host:
            os.write(descriptor, b"\n")  # it is there: see `Host.open`
            nothing = os.open(os.devnull, os.O_RDWR)
            for target in (0, 1, 2):
                os.dup2(nothing, target)
            _limit_memory(memory_mib)
            _converse(make, socket.socket(fileno=descriptor), memory_mib)
    finally:
        os._exit(0)


def _converse(make: Callable[[], Any], ours: socket.socket, memory_mib: int | None) -> None:
    process = os.getpid()
    try:
        asyncio.run(_conversation(make, ours.dup(), memory_mib))
    except BaseException as error:  # noqa: BLE001 - what ends the loop, as a SystemExit of a task
        if os.getpid() == process:
            ours.sendall(_failed(f"it raised {described(error)}") + b"\n")


def _limit_memory(mib: int | None) -> None:
    """Bound what this process, and each that it starts, can allocate beyond what this process has now."""
    if mib is not None:
        most = psutil.Process().memory_info().data + (mib << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


async def _conversation(make: Callable[[], Any], ours: socket.socket, memory_mib: int | None) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=16 * LARGEST)
    process, environment = os.getpid(), None
    while line := await reader.readline():
        try:
            environment = make() if environment is None else environment
            said = await _answer(environment, json.loads(line))
            answer = json.dumps(said, allow_nan=False, ensure_ascii=False).encode()
        except (InputError, MemoryError) as error:
            answer = _failed(_told(error, memory_mib))
        except (TypeError, ValueError, RecursionError) as error:  # of json: a message holds something else than texts
            answer = _failed(f"it gave what JSON cannot hold: {described(error)}")
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            answer = _failed(described(error))
        if os.getpid() != process:  # it has forked, and both would answer
            os._exit(0)
        if len(answer) > LARGEST:
            answer = _failed(f"it gave {len(answer)} bytes at once; {LARGEST} are possible")
        writer.write(answer + b"\n")
        await writer.drain()


async def _answer(environment: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(environment, Driven):
        return {"reward": await environment.drive(asked["url"], asked["key"], asked["record"], asked["seed"])}
    if "action" in asked:
        observation, reward, done = await stepped(environment, asked["action"], asked.get("calls"))
        saved = None if done else await _saved(environment)
        return {"observation": observation, "reward": reward, "done": done, "state": saved}
    record, seed = asked["record"], asked["seed"]
    if asked["state"] is not None:
        return {"restored": await called(environment, environment.load, record, seed, asked["state"])}
    observation, tools = await begun(environment, record, seed), tools_of(environment)
    if asked["turns"]:
        await called(environment, environment.replay, [Turn(**one) for one in asked["turns"]])
    saved, goes_on = await _saved(environment), _offers(environment, "replay")
    return {"observation": observation, "tools": tools, "state": saved, "goes_on": goes_on or saved is not None}


async def _saved(environment: Any) -> str | None:
    """The state of an environment that can be loaded; None of another one."""
    if not (_offers(environment, "save") and _offers(environment, "load")):
        return None
    saved = await called(environment, environment.save)
    if not isinstance(saved, str):
        raise InputError(f"{type(environment).__name__}.save returned {shown(saved)}: expected a text")
    return saved


def _offers(environment: Any, method: str) -> bool:
    return inspect.iscoroutinefunction(getattr(type(environment), method, None))


def _told(error: InputError | MemoryError, memory_mib: int | None) -> str:
    """A failure in words, which name the limit that it met."""
    words = storable(str(error)) if isinstance(error, InputError) else described(error)
    if memory_mib is None or not any(isinstance(one, MemoryError) for one in (error, error.__context__)):
        return words
    return f"{words}: environment.memory_mib = {memory_mib} limits its memory; raise it, or leave it out"


def _failed(detail: str) -> bytes:
    return json.dumps({"failed": detail[: 2 * LONGEST]}).encode()


if __name__ == "__main__":
    main()
