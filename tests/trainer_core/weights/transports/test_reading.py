"""An arena on a card is released once the card has read it; the card gets its next work without a wait."""

from types import SimpleNamespace

import pytest

from tests.tasks.engine_update import CPU, Sending, plan_of
from tests.trainer_core.weights.transports.test_transports import Receiving, assert_same, channel_of, weights
from trainer_core.weights.channel import Signals
from trainer_core.weights.transports import shared
from trainer_core.weights.transports.ends import open_receiver, open_sender


@pytest.fixture
def waited(monkeypatch):
    """Receivers' cards have read something only after a wait: as often as this has entries."""
    times = []
    monkeypatch.setattr(shared, "_now", lambda _device: SimpleNamespace(synchronize=lambda: times.append(1)))
    return times


@pytest.fixture
def reading(tmp_path, waited):
    """A receiver, the number of waits for its card, and the released arenas."""
    plan = plan_of(weights(count=24))
    channel = channel_of(tmp_path, "memory")
    sender, receiver = open_sender(channel, plan, 0, CPU), open_receiver(channel, plan, 0, CPU)
    signals = Signals(channel, plan)
    return SimpleNamespace(
        plan=plan, sender=sender, receiver=receiver, waited=waited, released=lambda: int(signals.released[0, 0])
    )


def publish(reading, number):
    bucket = reading.plan.buckets[number]
    reading.sender.arena(bucket)
    reading.sender.publish(bucket)
    return bucket


def read(reading, bucket):
    reading.receiver.arena(bucket)
    reading.receiver.release(bucket)


def test_an_arena_is_released_when_the_next_bucket_was_given_to_the_card(reading):
    one, two = publish(reading, 0), publish(reading, 1)
    read(reading, one)
    assert (reading.released(), reading.waited) == (0, [])
    reading.receiver.arena(two)
    assert (reading.released(), reading.waited) == (0, [])
    reading.receiver.release(two)
    assert (reading.released(), reading.waited) == (1, [1])


def test_it_is_released_before_a_bucket_is_waited_for(reading):
    """The sender may need that arena for it."""
    for number in range(6):  # there are two arenas
        read(reading, publish(reading, number))
        if number:
            assert reading.released() >= number


def test_the_last_one_is_released_at_once(reading):
    for number in range(len(reading.plan.buckets)):
        read(reading, publish(reading, number))
    assert reading.released() == len(reading.plan.buckets) == len(reading.waited)
    reading.sender.finish()


def test_a_sender_with_one_arena_is_not_waited_for_while_it_waits(tmp_path, waited):
    sent = weights(count=24)
    plan, channel = plan_of(sent), channel_of(tmp_path, "memory", arenas=1)
    receiving = Receiving(channel, plan)
    Sending(channel, plan, sent).result()
    assert_same(receiving.result(), sent)
    assert len(waited) == len(plan.buckets)
