"""Processes of environments: those that are over end, with everything that they have started."""

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil
import pytest

from storage.errors import InputError
from tasks.config.reward import EnvironmentSection
from tasks.environments.hosting import EnvironmentFailed, Host, host_processes

FILE = Path(__file__).parent / "sums.py"
PATIENCE_S = 60.0
BEGIN = {"record": {"id": "a", "prompt": "1+1="}, "seed": 3, "state": None, "turns": []}


def sleepers():
    """Processes below this one that the environment has started."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found += [one.pid] if "987654" in one.cmdline() else []
    return found


async def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_an_environment_that_hangs_is_ended_with_what_it_has_started_while_others_go_on(tmp_path):
    section = EnvironmentSection(function=f"{FILE}:Once", arguments={"marks": str(tmp_path), "how": "hang"})

    async def play(host):
        async with await host.open() as other:
            async with await host.open() as hanging:
                for one in (hanging, other):
                    await one.ask(PATIENCE_S, "its beginning", **BEGIN)
                    await one.ask(PATIENCE_S, "turn 1", action="1")
                turn = asyncio.ensure_future(hanging.ask(PATIENCE_S, "turn 2", action="1"))
                await until(sleepers)
                turn.cancel()
            await until(lambda: not sleepers())
            assert (await other.ask(PATIENCE_S, "turn 2", action="1"))["done"] is False

    with Host(section) as host:
        asyncio.run(play(host))
        assert list(host_processes()) == ["environment-0"]
    assert host_processes() == {}


@pytest.mark.parametrize("last", ["1", "2"])
def test_what_an_environment_has_left_ends_with_it_even_where_it_has_ended_by_itself(last):
    async def play(host):
        async with await host.open() as opened:
            await opened.ask(PATIENCE_S, "its beginning", **BEGIN)
            await until(lambda: len(sleepers()) == 2)
            with suppress(EnvironmentFailed):
                await opened.ask(PATIENCE_S, "turn 1", action=last)
            assert len(sleepers()) == 2
        await until(lambda: not sleepers())

    with Host(EnvironmentSection(function=f"{FILE}:Leaving")) as host:
        asyncio.run(play(host))


def test_an_environment_that_forks_answers_once():
    async def play(host):
        async with await host.open() as opened:
            await opened.ask(PATIENCE_S, "its beginning", **BEGIN)
            for action in ("1", "22"):
                said = await opened.ask(PATIENCE_S, "a turn", action=action)
                assert said["observation"] == f"{len(action)}+3="
                await asyncio.sleep(0.2)  # for another answer

    with Host(EnvironmentSection(function=f"{FILE}:Forking")) as host:
        asyncio.run(play(host))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Unmade", "ConnectionError: the sandbox is gone"),
        ("Toolless", "AttributeError: .* no attribute '_loaded_tools'"),
    ],
)
def test_an_environment_that_cannot_begin_says_why(tmp_path, kind, told):
    async def play(host):
        async with await host.open() as opened:
            with pytest.raises(EnvironmentFailed, match=told):
                await opened.ask(PATIENCE_S, "its beginning", **BEGIN)

    arguments = {"marks": str(tmp_path / "mark")} if kind == "Unmade" else {}
    with Host(EnvironmentSection(function=f"{FILE}:{kind}", arguments=arguments)) as host:
        asyncio.run(play(host))


def test_an_edited_environment_does_not_go_on_with_the_conversations_of_the_first(tmp_path):
    file = tmp_path / "edited.py"
    file.write_text(Path(FILE).read_text())

    async def main() -> None:
        with pytest.raises(InputError, match="Leaving' has changed while conversations were under way"):
            await host.open()

    with Host(EnvironmentSection(function=f"{file}:Leaving")) as host:
        file.write_text(f"{file.read_text()}\n")
        os.kill(*host_processes().values(), signal.SIGKILL)
        asyncio.run(main())
    assert host_processes() == {}


def test_a_host_that_is_being_killed_is_replaced_before_anything_is_asked_of_it():
    section = EnvironmentSection(function=f"{FILE}:Sums")

    async def begun(host):
        async with await host.open() as opened:
            return (await opened.ask(PATIENCE_S, "its beginning", **BEGIN))["observation"]

    async def play(host):
        for _ in range(3):
            (killed,) = host_processes().values()
            os.kill(killed, signal.SIGKILL)  # and it may take packets until it is gone
            assert await asyncio.gather(*(begun(host) for _ in range(8))) == ["1+1="] * 8
            assert list(host_processes().values()) != [killed]

    with Host(section) as host:
        asyncio.run(play(host))


def test_a_host_that_is_stopped_is_replaced(monkeypatch):
    async def play(host):
        monkeypatch.setattr("tasks.environments.hosting._OPEN_S", 1.0)
        (stopped,) = host_processes().values()
        os.kill(stopped, signal.SIGSTOP)
        async with await host.open() as opened:
            assert (await opened.ask(PATIENCE_S, "its beginning", **BEGIN))["observation"] == "1+1="
        assert list(host_processes().values()) != [stopped]

    with Host(EnvironmentSection(function=f"{FILE}:Sums")) as host:
        asyncio.run(play(host))


def test_a_host_whose_module_has_children_reaped_at_once_outlives_those_that_end_by_themselves(tmp_path):
    module = tmp_path / "reaped.py"
    module.write_text(f"import signal\n{FILE.read_text()}\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n")

    async def play(host):
        before = host_processes()
        for _ in range(2):
            async with await host.open() as opened:
                for one in psutil.Process(*before.values()).children():
                    one.kill()
                with pytest.raises(EnvironmentFailed, match="the process of its environment ended during"):
                    await opened.ask(PATIENCE_S, "its beginning", **BEGIN)
        async with await host.open() as opened:
            assert (await opened.ask(PATIENCE_S, "its beginning", **BEGIN))["observation"] == "1+1="
        assert host_processes() == before

    with Host(EnvironmentSection(function=f"{module}:Sums")) as host:
        asyncio.run(play(host))


def test_the_end_of_a_conversation_of_an_earlier_host_ends_nothing_of_the_present_one():
    section = EnvironmentSection(function=f"{FILE}:Sums")

    async def play(host):
        async with AsyncExitStack() as earlier:
            await earlier.enter_async_context(await host.open())
            os.kill(*host_processes().values(), signal.SIGKILL)
            async with await host.open() as opened:
                await opened.ask(PATIENCE_S, "its beginning", **BEGIN)
                await earlier.aclose()
                async with await host.open():  # so the packet before it was read
                    assert (await opened.ask(PATIENCE_S, "turn 1", action="1"))["done"] is False

    with Host(section) as host:
        asyncio.run(play(host))


def test_an_environment_that_allocates_beyond_its_limit_fails_by_name_while_others_go_on():
    section = EnvironmentSection(function=f"{FILE}:Greedy", memory_mib=64)

    async def play(host):
        async with await host.open() as other, await host.open() as greedy:
            for one in (greedy, other):
                await one.ask(PATIENCE_S, "its beginning", **BEGIN)
            with pytest.raises(EnvironmentFailed, match=r"MemoryError.*environment\.memory_mib = 64") as failure:
                await greedy.ask(PATIENCE_S, "turn 1", action="2")
            assert failure.value.reason == "exception"
            assert (await other.ask(PATIENCE_S, "turn 1", action="1"))["done"] is False

    with Host(section) as host:
        asyncio.run(play(host))


@pytest.mark.parametrize(
    ("action", "reason", "told"),
    [
        ("exit", "exception", r"turn 1: Ending\.step \(sums\.py:\d+\) raised SystemExit: 3 \(sums\.py, line \d+\)$"),
        ("task", "exception", r"turn 1: it raised SystemExit: no no "),
        ("interrupt", "exception", r"turn 1: it raised KeyboardInterrupt \(sums\.py, line \d+\)$"),
        ("code", "exit", r"ended during turn 1, with code 3$"),
        ("signal", "exit", r"ended during turn 1, by signal SIGSEGV$"),
    ],
)
def test_an_environment_that_ends_its_process_is_a_failure_that_says_how(action, reason, told):
    async def play(host):
        async with await host.open() as opened:
            await opened.ask(PATIENCE_S, "its beginning", **BEGIN)
            with pytest.raises(EnvironmentFailed, match=told) as failure:
                await opened.ask(PATIENCE_S, "turn 1", action=action)
            assert failure.value.reason == reason
            assert len(str(failure.value)) < 3000

    with Host(EnvironmentSection(function=f"{FILE}:Ending")) as host:
        asyncio.run(play(host))


@pytest.mark.parametrize("how", ["stop", "block"])
def test_an_environment_that_is_frozen_is_a_failure_that_is_named_and_is_ended_while_others_go_on(tmp_path, how):
    section = EnvironmentSection(function=f"{FILE}:Once", arguments={"marks": str(tmp_path), "how": how})

    async def play(host):
        async with await host.open() as other:
            before = psutil.Process(*host_processes().values())
            for told in (True, False):  # a fresh environment takes its place
                async with await host.open() as opened:
                    for asked in (BEGIN, {"action": "1"}):
                        await opened.ask(PATIENCE_S, "its beginning", **asked)
                    if told:
                        with pytest.raises(EnvironmentFailed, match="turn 2 of prompt 'a' did not end") as failure:
                            await opened.ask(1.0, "turn 2 of prompt 'a'", action="1")
                        assert failure.value.reason == "timeout"
                    else:
                        assert (await opened.ask(PATIENCE_S, "turn 2", action="1"))["reward"] == 1.0
                await until(lambda: len(before.children()) == 1)
            assert (await other.ask(PATIENCE_S, "its beginning", **BEGIN))["observation"] == "1+1="

    with Host(section) as host:
        asyncio.run(play(host))


def test_conversations_share_one_execution_of_a_file_and_not_their_instances(tmp_path):
    (tmp_path / "mine.py").write_text(
        f"from tests.tasks.environments.sums import Sums\nwith open({str(tmp_path / 'runs')!r}, 'a') as runs:\n"
        "    runs.write('x')\nclass Mine(Sums):\n    pass\n"
    )

    async def play(host):
        for _ in range(3):
            async with await host.open() as opened:
                assert (await opened.ask(PATIENCE_S, "its beginning", **BEGIN))["observation"] == "1+1="
                await opened.ask(PATIENCE_S, "turn 1", action="1")

    with Host(EnvironmentSection(function=f"{tmp_path}/mine.py:Mine")) as host:
        asyncio.run(play(host))
    assert (tmp_path / "runs").read_text() == "x"
