"""Handles forward the calls of a protocol to all members of a group."""

import inspect

import pytest

from tasks.config.run import WorkersSection
from tasks.engine.protocol import EngineProtocol
from tasks.workers.interface import EngineHandle, GroupHandle, TrainerGroup
from tests.small.here import GroupHere
from trainer_core.protocol import TrainerProtocol


class Member:
    """Answers every call with the call."""

    def __init__(self, number):
        self.number, self.given = number, []

    def __getattr__(self, name):
        def answer(*arguments, **options):
            self.given.append((name, arguments, options))
            return self.number

        return answer


def calls_of(protocol):
    return {name: method for name, method in vars(protocol).items() if inspect.isfunction(method) and name[0] != "_"}


@pytest.mark.parametrize(("handle", "protocol"), [(EngineHandle, EngineProtocol), (TrainerGroup, TrainerProtocol)])
def test_every_call_of_the_protocol_goes_to_all_members_with_its_arguments(handle, protocol):
    own = vars(handle)
    forwarded = {name for name in calls_of(protocol) if own[name].__doc__ == calls_of(protocol)[name].__doc__}
    assert len(forwarded) > 10
    for name in forwarded:
        members = [Member(number) for number in (7, 8)]
        made = handle(GroupHere(members, lambda _: None), WorkersSection())
        assert vars(handle)[name](made, 1, key=2) == 7  # the first one's answer
        assert all(member.given == [(name, (1,), {"key": 2})] for member in members)


def test_a_handle_keeps_its_own_calls():
    class Handle(GroupHandle, EngineProtocol, forwards=EngineProtocol):
        def identity(self):
            return "own"

    assert Handle(GroupHere([Member(1)], lambda _: None), WorkersSection()).identity() == "own"
