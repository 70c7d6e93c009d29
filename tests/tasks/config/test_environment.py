"""The environment of the processes that compute."""

import os

import pytest

from tasks.config.environment import trainer_environment
from tasks.workers.ranks import rank_specs


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


def test_deterministic_kernels_are_asked_for_before_their_libraries_start():
    wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert wanted.items() <= trainer_environment("cuda", ("0",), local=True, deterministic=True).items()
    for environment in (
        trainer_environment("cuda", ("0",), local=True),
        trainer_environment("cpu", (), local=True, deterministic=True),
    ):
        assert not wanted.keys() & environment.keys()


@pytest.mark.parametrize("deterministic", [True, False])
def test_every_rank_knows_whether_to_be_deterministic(tmp_path, deterministic):
    ranks = rank_specs(2, tmp_path / "store", "cuda", deterministic)
    assert [rank.deterministic for rank in ranks] == [deterministic] * 2
    assert [(rank.rank, rank.local_rank, rank.world_size) for rank in ranks] == [(0, 0, 2), (1, 1, 2)]
