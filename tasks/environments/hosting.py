"""Environments in processes of their own, as the driver of a run uses them: opened, asked, and ended."""

import asyncio
import itertools
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import psutil

from storage.errors import InputError
from tasks.config.environment import scoring_environment, without_secrets
from tasks.config.reward import EnvironmentSection
from tasks.environments.host import LARGEST, PACKET
from tasks.environments.playing import find_environment
from tasks.rewards.resolve import values_of, variables_of
from tasks.rewards.sample import Reason
from tasks.rewards.words import exit_words

_COMMAND = [sys.executable, "-P", "-m", "tasks.environments.host"]  # -P: no file of the working directory hides ours
_START_S, _OPEN_S, _END_S = 120.0, 120.0, 15.0
_HOSTS = 3  # tried in turn


class EnvironmentFailed(Exception):
    """An environment did not do its part: an infrastructure failure, which is not a reward."""

    def __init__(self, reason: Reason, detail: str, restoring: bool = False) -> None:
        """With `restoring` the turns before it cannot be gone on with."""
        super().__init__(detail)
        self.reason: Reason = reason
        self.detail, self.restoring = detail, restoring
        self.seconds = 0.0  # of the call that failed


class Host:
    """The process that opens environments of one class; another one takes its place if it is lost."""

    def __init__(self, section: EnvironmentSection) -> None:
        self._section, self._numbers = section, itertools.count()
        self._replacing = asyncio.Lock()
        self.source = ""  # digest of the file of the class, and of those beside it that it imports
        self.drives = False  # True if it is a function that drives conversations
        self.reads = False  # True if its steps take the calls of tools in an answer

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()  # it kills what it has started, and ends
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait()

    async def open(self) -> "Opened":
        """A process with an environment in it, which is yet to begin. Raises EnvironmentFailed: there is none, even of
        another host."""
        for _ in range(_HOSTS):
            number, host = next(self._numbers), self._process
            reader, writer = await self._asked({"open": number})
            if await _line(reader, _OPEN_S):
                return Opened(self, number, reader, writer)
            writer.close()
            await self._replace(host)
        raise EnvironmentFailed("exit", f"no process could be started for an environment, by {_HOSTS} hosts")

    async def _replace(self, host: subprocess.Popen[bytes]) -> None:
        """Start another host in place of one that opens nothing: it has been killed, and may not be gone yet."""
        async with self._replacing:
            if self._process is host:
                host.kill()
                self.__exit__()
                self._start()

    async def how(self, number: int) -> str:
        """The end of the process of an environment, which has closed its socket, in words; empty if it is not known."""
        reader, writer = await self._asked({"how": number})
        said = await _line(reader, _END_S)
        writer.close()
        return f", {exit_words(int(said))}" if said else ""

    def end(self, number: int) -> None:
        """Kill the process of an environment, whatever it does."""
        self._sent({"end": number})

    async def _asked(self, packet: dict[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The end of a socket whose other end the host is given with a packet."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._sent(packet, theirs.fileno())
        return await asyncio.open_unix_connection(sock=ours, limit=2 * LARGEST)

    def _sent(self, packet: dict[str, int], *descriptors: int) -> None:
        with suppress(OSError):  # its end
            socket.send_fds(self._control, [json.dumps(packet).encode()], descriptors)

    def _start(self) -> None:
        section = self._section
        found = find_environment(section.function)
        variables = list(variables_of(dict(section.arguments)))
        secrets = values_of({name: f"env:{name}" for name in variables}).values()
        arguments = values_of(section.arguments, "environment.arguments")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                _COMMAND, stdin=theirs.fileno(), start_new_session=True, env=_environment(variables)
            )
        self._control.settimeout(_START_S)
        order = {"target": asdict(found), "arguments": arguments, "secrets": list(secrets)}
        order["memory_mib"] = section.memory_mib
        try:
            self._control.send(json.dumps(order).encode())
            hello = json.loads(self._control.recv(PACKET) or b'{"detail": "its process ended while it was imported"}')
        except TimeoutError:
            hello = {"detail": f"it was not imported within {_START_S:g} s"}
        if "source" not in hello:
            self.__exit__()
            raise InputError(
                f"environment.function {found.name!r} cannot be used: {without_secrets(hello['detail'])}. Fix it, set "
                "environment.arguments, or name another one"
            )
        if self.source not in ("", hello["source"]):  # what is played is recorded under the digest of the first
            self.__exit__()
            raise InputError(
                f"environment.function {found.name!r} has changed while conversations were under way, and a host of it "
                "was lost: put the file back to go on with them, or start again to play this iteration with the new one"
            )
        self.source, self.drives, self.reads = hello["source"], hello["drives"], hello["reads"]


async def _line(reader: asyncio.StreamReader, patience_s: float) -> bytes:
    """A line of a host; empty if it has ended, or is stopped and says nothing."""
    try:
        async with asyncio.timeout(patience_s):
            return await reader.readline()
    except TimeoutError:
        return b""


def host_processes() -> dict[str, int]:
    """Process ids of the hosts that this process has started, as `environment-NUMBER`."""
    found: dict[str, int] = {}
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it ends meanwhile
            if child.cmdline()[-1:] == _COMMAND[-1:]:
                found[f"environment-{len(found)}"] = child.pid
    return found


def _environment(variables: Sequence[str]) -> dict[str, str]:
    """The environment of a host, whose clients reach the endpoint on loopback past every proxy."""
    plain = scoring_environment(variables)
    past = ",".join(filter(None, (plain.get("no_proxy") or plain.get("NO_PROXY"), "127.0.0.1")))
    return {**_trusting(plain), "no_proxy": past, "NO_PROXY": past}


def _trusting(plain: dict[str, str]) -> dict[str, str]:
    """The same with the system's folder of certificates, where it has one: each client that is made reads the file of
    all of them, which takes as long as ten requests, but what it needs of a folder."""
    folder = Path(ssl.get_default_verify_paths().openssl_capath)
    named = plain.keys() & {"SSL_CERT_FILE", "SSL_CERT_DIR"} or not any(folder.glob("*.0"))
    return plain if named else {**plain, "SSL_CERT_DIR": str(folder)}


class Opened:
    """An environment in its process, used by one task. As a context manager it is ended."""

    def __init__(self, host: Host, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._host, self._number, self._reader, self._writer = host, number, reader, writer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._host.end(self._number)
        self._writer.close()

    async def ask(self, patience_s: float, what: str, **asked: Any) -> dict[str, Any]:
        """The answer to a request. Raises EnvironmentFailed: there is none within the time, or it is a failure; `what`
        names the request."""
        try:
            async with asyncio.timeout(patience_s):
                self._writer.write(f"{json.dumps(asked)}\n".encode())
                await self._writer.drain()
                answer = json.loads(await self._reader.readline())
        except TimeoutError:
            raise EnvironmentFailed("timeout", f"{what} did not end within {patience_s:.3g} s") from None
        except (OSError, ValueError):  # it is gone, within a line or before it, or its line is endless
            how = await self._host.how(self._number)
            raise EnvironmentFailed("exit", f"the process of its environment ended during {what}{how}") from None
        if "failed" in answer:
            raise EnvironmentFailed("exception", f"{what}: {without_secrets(answer['failed'])}")
        return answer
