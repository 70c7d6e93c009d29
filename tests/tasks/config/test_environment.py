"""The environment of the processes that compute."""

import http.server
import os
import socketserver
import threading
import urllib.error
import urllib.request

import httpx
import pytest

from tasks.config.environment import engine_environment, prepare_process, trainer_environment, use_first_runner
from tasks.workers.ranks import rank_specs


@pytest.mark.parametrize("cards", [("0",), ("0", "1")])
def test_trainer_ranks_on_cards_share_the_cores(monkeypatch, cards):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = trainer_environment("cuda", cards, local=True)
    assert int(environment["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // len(cards))
    assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(cards)


def test_a_classifier_on_a_card_has_the_runner_that_knows_classifiers(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", engine_environment("cuda", ("0",), True)["VLLM_USE_V2_MODEL_RUNNER"])
    use_first_runner()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == engine_environment("cpu", (), True)["VLLM_USE_V2_MODEL_RUNNER"]


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
    ranks = rank_specs(2, str(tmp_path / "store"), "cuda", deterministic)
    assert [rank.deterministic for rank in ranks] == [deterministic] * 2
    assert [(rank.rank, rank.local_rank, rank.world_size) for rank in ranks] == [(0, 0, 2), (1, 1, 2)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "example.org, 127.0.0.1"}, "example.org,127.0.0.1,localhost,::1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,localhost,127.0.0.1,::1"),  # Python's libraries choose it so
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_no_proxy_is_asked_for_this_host(given, expected, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**given, "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    prepare_process()
    assert os.environ["NO_PROXY"] == expected
    with socketserver.TCPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert httpx.get(url).status_code == httpx.codes.NOT_IMPLEMENTED  # of the server itself: a proxy would refuse
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(url)
        server.shutdown()
