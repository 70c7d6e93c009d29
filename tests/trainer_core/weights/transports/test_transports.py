"""Bytes from senders to receivers over each transport, and the effects of an end that is slow, fails or dies."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from storage.errors import StorageUnavailable, SyncMismatch
from tests.tasks.engine_update import ARENA, CPU, Sending, plan_of
from trainer_core.weights.channel import Channel, Signals, fail
from trainer_core.weights.digest import PlannedDigests
from trainer_core.weights.packing import tensors_of, views
from trainer_core.weights.sending import BucketSender
from trainer_core.weights.transports import card
from trainer_core.weights.transports.collective import BroadcastGroup
from trainer_core.weights.transports.ends import open_receiver, open_sender

TRANSPORTS = ["memory", "collective", "files"]
WAITING = ["memory", "collective"]  # the sender of files never waits
COUNT = 60  # tensors; several times as many buckets as there are arenas


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def weights(count=COUNT, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    sizes = torch.randint(1, ARENA // 4, (count,), generator=generator).tolist()
    return {
        f"layers.{place}.weight": torch.randn(size, generator=generator).to(kinds[place % 3])
        for place, size in enumerate(sizes)
    }


def channel_of(folder, transport, receivers=1, deadline_s=30.0, arenas=2):
    return Channel(transport=transport, folder=str(folder), receivers=receivers, arenas=arenas, deadline_s=deadline_s)


class Receiving(threading.Thread):
    """Reads all buckets; keeps their content, or the reason of its failure. `at(bucket)` is called before a release."""

    def __init__(self, channel, plan, number=0, at=lambda bucket: None, opened=None):
        super().__init__(daemon=True)
        self.channel, self.plan, self.number, self.at = channel, plan, number, at
        self.opened = opened or (lambda *given: open_receiver(*given, CPU))
        self.found, self.error = {}, None
        self.start()

    def run(self):
        receiver = self.opened(self.channel, self.plan, self.number)
        planned = tensors_of(self.plan)
        try:
            for bucket in self.plan.buckets:
                arena = receiver.arena(bucket)
                self.at(bucket)
                self.found |= {name: tensor.clone() for name, tensor in views(planned[bucket.number], arena)}
                receiver.release(bucket)
        except (SyncMismatch, OSError) as error:
            self.error = error
            receiver.fail(str(error))
        finally:
            receiver.close()

    def result(self):
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.found


def assert_same(found, sent):
    assert found.keys() == sent.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("senders", "receivers", "arenas"), [(1, 1, 1), (1, 1, 2), (3, 2, 2), (2, 3, 3)])
def test_everything_arrives_as_it_was_sent(tmp_path, transport, senders, receivers, arenas):
    sent = weights()
    plan = plan_of(sent, senders=senders)
    assert len(plan.buckets) > 2 * senders * arenas
    channel = channel_of(tmp_path, transport, receivers, arenas=arenas)
    reading = [Receiving(channel, plan, number) for number in range(receivers)]
    sending = [Sending(channel, plan, sent, rank) for rank in range(senders)]
    for one in sending:
        one.result()
    for one in reading:
        assert_same(one.result(), sent)


@pytest.mark.parametrize("transport", WAITING)
def test_an_arena_is_not_written_before_every_receiver_has_read_it(tmp_path, transport):
    sent = weights()
    plan = plan_of(sent)
    channel = channel_of(tmp_path, transport, receivers=2)
    reading = [Receiving(channel, plan, 0), Receiving(channel, plan, 1, lambda bucket: time.sleep(0.02))]
    Sending(channel, plan, sent).result()
    for one in reading:
        assert_same(one.result(), sent)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_that_fails_stops_the_receivers_with_its_reason(tmp_path, transport):
    sent = weights()
    plan = plan_of(sent)

    def fail(bucket, packed):
        if bucket.number == 2:
            raise ValueError("the model has changed")

    channel = channel_of(tmp_path, transport, receivers=2)
    reading = [Receiving(channel, plan, number) for number in range(2)]
    with pytest.raises(ValueError, match="the model has changed"):
        Sending(channel, plan, sent, before=fail).result()
    for one in reading:
        with pytest.raises(SyncMismatch, match="the model has changed"):
            one.result()


@pytest.mark.parametrize("transport", WAITING)
def test_a_receiver_that_fails_stops_everybody_with_its_reason(tmp_path, transport):
    sent = weights()
    plan = plan_of(sent, senders=2)

    def fail(bucket):
        if bucket.number == 3:
            raise OSError("no memory left")

    channel = channel_of(tmp_path, transport, receivers=2)
    reading = [Receiving(channel, plan, 0), Receiving(channel, plan, 1, fail)]
    sending = [Sending(channel, plan, sent, rank) for rank in range(2)]
    with pytest.raises(OSError, match="no memory left"):
        reading[1].result()
    for one in (*sending, reading[0]):
        with pytest.raises(SyncMismatch, match="no memory left"):
            one.result()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_marker_of_the_driver_stops_who_waits(tmp_path, transport):
    plan = plan_of(weights())
    reading = Receiving(channel_of(tmp_path, transport), plan)
    time.sleep(0.1)
    fail(tmp_path, "another engine died")
    fail(tmp_path, "and then this one")
    with pytest.raises(SyncMismatch, match="another engine died"):
        reading.result()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_gives_up_at_the_deadline(tmp_path, transport):
    plan = plan_of(weights())
    with pytest.raises(SyncMismatch, match=r"0\.3 s"):
        Receiving(channel_of(tmp_path, transport, deadline_s=0.3), plan).result()


@pytest.mark.parametrize("transport", WAITING)
def test_a_sender_gives_up_at_the_deadline(tmp_path, transport):
    sent = weights()
    plan = plan_of(sent)
    with pytest.raises(SyncMismatch, match=r"waited 0\.3 s"):
        Sending(channel_of(tmp_path, transport, deadline_s=0.3), plan, sent).result()


def _receive_two_and_hang(channel, plan):
    receiver = open_receiver(channel, plan, 0, CPU)
    for bucket in plan.buckets[:2]:
        receiver.arena(bucket)
        receiver.release(bucket)
    receiver.arena(plan.buckets[2])
    time.sleep(60)


def _send_two_and_hang(channel, plan, sent):
    sender = open_sender(channel, plan, 0, CPU)
    for bucket in plan.buckets[:2]:
        sender.arena(bucket)
        sender.publish(bucket)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("transport", WAITING)
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_the_death_of_one_end_is_a_typed_error_of_the_other(tmp_path, transport, victim):
    sent = weights()
    plan = plan_of(sent)
    channel = channel_of(tmp_path, transport, deadline_s=2.0)
    bodies = {
        "sender": (_send_two_and_hang, (channel, plan, sent)),
        "receiver": (_receive_two_and_hang, (channel, plan)),
    }
    body, arguments = bodies[victim]
    process = multiprocessing.get_context("fork").Process(target=body, args=arguments)
    process.start()
    other = Receiving(channel, plan) if victim == "sender" else Sending(channel, plan, sent)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(SyncMismatch, match=r"waited 2 s"):
        other.result()


def test_a_folder_that_is_removed_ends_the_wait(tmp_path):
    plan = plan_of(weights())
    folder = tmp_path / "channel"
    folder.mkdir()
    reading = Receiving(channel_of(folder, "memory"), plan)
    while not (folder / "counters").exists():
        time.sleep(0.01)
    (folder / "counters").unlink()
    folder.rmdir()
    with pytest.raises(SyncMismatch, match="was removed"):
        reading.result()
    fail(folder, "nobody is there")


def test_arenas_that_do_not_fit_are_refused(tmp_path):
    sent = weights()
    plan = plan_of(sent).model_copy(update={"arena_bytes": 1 << 60})
    channel = channel_of(tmp_path, "memory")
    with pytest.raises(StorageUnavailable, match=r"sync\.arena_mib"):
        open_sender(channel, plan, 0, CPU)
    (tmp_path / "arenas-0").unlink()
    reading = Receiving(channel, plan)
    rank = SimpleNamespace(rank=0, device=CPU)
    sender = BucketSender(channel, plan, rank, PlannedDigests({}, CPU))  # of a rank that continues with the others
    with pytest.raises(SyncMismatch, match=r"sync\.arena_mib"):
        reading.result()
    with pytest.raises(StorageUnavailable, match=r"sync\.arena_mib"):
        sender.finish()


def full(*_given):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_fails_on_a_full_disk_still_stops_everybody(tmp_path, monkeypatch, transport):
    def half(path, text, encoding):
        path.write_bytes(text.encode(encoding)[: len(text) // 2])
        full()

    reading = Receiving(channel_of(tmp_path, transport), plan_of(weights()))
    monkeypatch.setattr(Path, "write_text", half)
    fail(tmp_path, "a reason")
    with pytest.raises(SyncMismatch, match="no space left to say why"):
        reading.result()


def test_counters_that_do_not_fit_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageUnavailable, match="counters of a weight update do not fit"):
        open_receiver(channel_of(tmp_path, "memory"), plan_of(weights(5)), 0, CPU)


def test_a_broadcast_may_wait_until_all_take_part(tmp_path, monkeypatch):
    """The first broadcast of NCCL does."""
    together, broadcast = threading.Barrier(2, timeout=60), BroadcastGroup.broadcast

    def waiting(group, arena):
        together.wait()
        return broadcast(group, arena)

    monkeypatch.setattr(BroadcastGroup, "broadcast", waiting)
    sent = weights(10)
    plan = plan_of(sent)
    channel = channel_of(tmp_path, "collective")
    sending, reading = Sending(channel, plan, sent), Receiving(channel, plan)
    assert_same(reading.result(), sent)
    sending.result()


def test_files_go_through_any_store(tmp_path):
    sent = weights(5)
    plan = plan_of(sent)
    channel = channel_of("memory://weights/of/an/update", "files")
    Sending(channel, plan, sent).result()
    assert_same(Receiving(channel, plan).result(), sent)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"layers.7.weight": torch.ones(4)}, r"\['layers\.7\.weight'\] missing, \['layers\.3\.weight'\] was sent"),
        ({"layers.3.weight": torch.ones(5)}, r"tensor layers\.3\.weight was sent as float32 \[4\], but .* \[5\]"),
        ({"layers.3.weight": torch.ones(4).half()}, r"tensor layers\.3\.weight was sent as float32 .* as float16"),
    ],
    ids=["name", "shape", "type"],
)
def test_a_file_with_other_tensors_is_refused(tmp_path, other, match):
    sent = {"layers.2.weight": torch.ones(3), "layers.3.weight": torch.ones(4)}
    channel = channel_of(tmp_path, "files")
    Sending(channel, plan_of(sent), sent).result()
    with pytest.raises(SyncMismatch, match=match):
        Receiving(channel, plan_of({"layers.2.weight": torch.ones(3)} | other)).result()


@pytest.mark.parametrize(("failed", "left"), [(False, {b"a"}), (True, set())])
def test_only_arenas_of_a_complete_update_stay_open(tmp_path, monkeypatch, failed, left):
    closed = []
    monkeypatch.setattr(card, "runtime", SimpleNamespace(cudaIpcCloseMemHandle=closed.append))
    monkeypatch.setattr(card, "_opened", {b"a": 1, b"of a sender that is gone": 2})
    opener = card.CardOpener(channel_of(tmp_path, "cuda"), plan_of(weights()), CPU)
    opener._handles = {b"a"}
    opener.close(failed)
    assert card._opened.keys() == left
    assert sorted(closed) == ([1, 2] if failed else [2])


def test_a_process_that_dies_before_all_are_connected_stops_the_others(tmp_path):
    """The receiver has come, and does not connect."""
    sent = weights()
    plan = plan_of(sent)
    channel = channel_of(tmp_path, "collective", deadline_s=20)
    sending = Sending(channel, plan, sent)
    seen = Signals(channel, plan)
    seen.met[0, 1] = 1
    seen.wait(lambda: any(thread.name == "ratchet-process-group" for thread in threading.enumerate()), "the sender")
    fail(tmp_path, "engine 0 has died")
    with pytest.raises(SyncMismatch, match="engine 0 has died"):
        sending.result()


def test_a_process_that_cannot_connect_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    sent = weights()
    plan = plan_of(sent)
    channel = channel_of(tmp_path, "collective", deadline_s=20)
    reading, sending = Receiving(channel, plan), Sending(channel, plan, sent)
    with pytest.raises(SyncMismatch, match=r"cannot connect to the others: .*no-such-interface.*set sync\.transport"):
        sending.result()
    with pytest.raises(SyncMismatch, match="cannot connect"):
        reading.result()
