"""Runs of the real stack that the tests of this folder share: each start of it costs 15 s of processor."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forked_python import forked_python
from tests.integration.command import PIECES, TINY, Finished, prove
from tests.prefect_home import prepared
from tests.storage.s3 import BUCKET, s3_server

KILLS = ["rollout@1:mid-part:engine-0", "train@1:started:trainer-0", "train@2:upload:flow"]
"""One of each kind of process; tests/faults/test_matrix.py covers every point of every stage."""
EVERY_POINT = [
    "prepare@0:parts-done:flow",
    "evaluate@0:started:engine-0",
    "rollout@1:parts-done:flow",  # with all pieces there, one of which the next process samples again
    "train@1:mid-part:trainer-0",
    "weight-sync@1:sent:engine-0",
    "weight-sync@1:served:flow",
    "reward@2:committed:node",
    "train@2:started:trainer-1",
    "train@2:upload:flow",
]
MID_RESPONSE = ["rollout@1:mid-response:flow", "rollout@2:mid-response:engine-0"]
LONG = (
    "model.generate.max_positions=256",
    "warmup.steps=1",  # or the model learns to end answers with the stop token
    "model.generate.vocabulary=128",
    "rollout.stop_tokens=[127]",
    "rollout.max_tokens=160",
    "rollout.increments.tokens=16",
    "engine.max_model_len=192",
    "train.max_length=192",
)
"""A stop token that is seldom sampled: a piece takes longer than a call that collects, so increments are stored."""
ITERATIONS = 2


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """Prefect's home folder for the commands of the tests, and in it the Python that executes them."""
    home = prepared(tmp_path_factory.mktemp("prefect"), tmp_path_factory)
    (home / "python").symlink_to(forked_python(tmp_path_factory))
    return home


@pytest.fixture(scope="session")
def server():
    """An object store that new processes find in their environment."""
    with s3_server() as server, pytest.MonkeyPatch.context() as environment:
        client = server.options["client_kwargs"]
        environment.setenv("AWS_ENDPOINT_URL", client["endpoint_url"])
        environment.setenv("AWS_DEFAULT_REGION", client["region_name"])
        environment.setenv("AWS_ACCESS_KEY_ID", server.options["key"])
        environment.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret"])
        yield server


@dataclass(frozen=True)
class Proof:
    """A finished `ratchet prove-resume`."""

    kills: list[str]
    settings: tuple[str, ...]
    url: str
    """The folder of both runs, `whole` and `interrupted`."""
    done: Finished


CRITIC = ("train.policy.advantage.type=gae", "train.critic.learning_rate=1e-3")
LIVE = ("train.lora.rank=8", "engine.adapter=live")


@pytest.fixture(scope="session")
def each_process(server, home) -> Proof:
    """The tiny run on the object store, at one rank, with one kill of each kind of process."""
    return _proved(f"s3://{BUCKET}/proof", KILLS, (), home)


@pytest.fixture(scope="session")
def whole(each_process: Proof) -> str:
    """Root of the run of that proof that nobody interrupts."""
    assert each_process.done.code == 0, each_process.done.err
    return f"{each_process.url}/whole"


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(None, id="each-process"),
        pytest.param((EVERY_POINT, ("train.parallel.pipeline=2",)), id="every-point", marks=pytest.mark.full),
        pytest.param((MID_RESPONSE, LONG), id="mid-response", marks=pytest.mark.full),
        pytest.param((KILLS, ("train.lora.rank=8",)), id="adapters", marks=pytest.mark.full),
        pytest.param((KILLS, LIVE), id="live-adapter", marks=pytest.mark.full),
        pytest.param((KILLS, CRITIC), id="critic", marks=pytest.mark.full),
    ],
)
def proof(request, home, tmp_path_factory) -> Proof:
    """That proof, or one on files with other kills or another layout."""
    if request.param is None:
        return request.getfixturevalue("each_process")
    return _proved(str(tmp_path_factory.mktemp("proof")), *request.param, home)


def _proved(url: str, kills: list[str], layout: tuple[str, ...], home: Path) -> Proof:
    """The tiny run with kills, in which each of the two runs samples for itself."""
    settings = (PIECES[1], *layout)
    return Proof(kills, settings, url, prove(TINY, url, ITERATIONS, kills, settings, home))
