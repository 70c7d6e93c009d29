"""Arenas that are nearer to their sender than to the model: their content is copied first, a bucket ahead."""

import pytest

from tests.tasks.engine_update import CPU, Sending, plan_of
from tests.trainer_core.weights.transports.test_transports import Receiving, assert_same, channel_of, weights
from trainer_core.weights.channel import Signals
from trainer_core.weights.transports.ends import open_receiver, open_sender
from trainer_core.weights.transports.shared import HostOpener, SharedReceiver


class Distant(HostOpener):
    """Shows arenas as if they lay on another card."""

    def open(self, sender):
        return super().open(sender)[0], False


def distant(channel, plan, number=0):
    return SharedReceiver(channel, plan, number, CPU, Distant(channel, plan, CPU))


@pytest.mark.parametrize(("senders", "receivers", "arenas"), [(1, 1, 1), (2, 2, 2)])
def test_from_a_distant_arena_everything_arrives_as_it_was_sent(tmp_path, senders, receivers, arenas):
    sent = weights()
    plan = plan_of(sent, senders=senders)
    channel = channel_of(tmp_path, "memory", receivers, arenas=arenas)
    reading = [Receiving(channel, plan, number, opened=distant) for number in range(receivers)]
    for one in [Sending(channel, plan, sent, rank) for rank in range(senders)]:
        one.result()
    for one in reading:
        assert_same(one.result(), sent)


def test_a_distant_arena_is_free_again_before_what_it_held_is_loaded(tmp_path):
    """The sender overwrites its only arena while the receiver still uses the copied bucket."""
    sent = weights()
    plan = plan_of(sent)
    channel = channel_of(tmp_path, "memory", arenas=1)
    last = plan.buckets[-1].number

    def until_overwritten(bucket):
        if bucket.number < last:
            Signals(channel, plan).published(plan.buckets[bucket.number + 1])

    reading = Receiving(channel, plan, at=until_overwritten, opened=distant)
    Sending(channel, plan, sent).result()
    assert_same(reading.result(), sent)


def test_while_a_distant_bucket_is_loaded_the_next_one_is_fetched(tmp_path):
    plan = plan_of(weights())
    channel = channel_of(tmp_path, "memory")
    sender, receiver = open_sender(channel, plan, 0, CPU), distant(channel, plan)
    one, two = plan.buckets[:2]
    arenas = [sender.arena(bucket) for bucket in (one, two)]
    for value, bucket in enumerate((one, two)):
        arenas[value].fill_(value)
        sender.publish(bucket)
    seen = receiver.arena(one)
    arenas[1].fill_(9)  # a late read would see this
    assert seen.eq(0).all()
    receiver.release(one)
    assert receiver.arena(two).eq(1).all()
    receiver.close()


def test_a_near_arena_is_used_where_it_lies(tmp_path):
    sent = weights(count=1)
    plan = plan_of(sent)
    channel = channel_of(tmp_path, "memory")
    sender, receiver = open_sender(channel, plan, 0, CPU), open_receiver(channel, plan, 0, CPU)
    arena = sender.arena(plan.buckets[0])
    sender.publish(plan.buckets[0])
    arena.fill_(7)
    seen = receiver.arena(plan.buckets[0])
    arena.fill_(9)
    assert seen.eq(9).all()
