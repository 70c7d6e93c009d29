"""What the processes that compute are started with."""

import os

import pytest

from tasks.settings import trainer_environment


@pytest.mark.parametrize("cards", [("0",), ("0", "1")])
def test_trainer_ranks_on_cards_share_the_cores(monkeypatch, cards):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = trainer_environment("cuda", cards, local=True)
    assert int(environment["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // len(cards))
    assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(cards)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_number_of_threads_that_the_user_set_stays(monkeypatch, device):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert trainer_environment(device, ("0",), local=True)["OMP_NUM_THREADS"] == "3"
