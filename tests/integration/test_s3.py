"""The whole loop on an object store: interrupted and killed on S3, a run ends with the manifests of one on files."""

import json
import signal
import subprocess
import time

import pytest

from flows.cli.app import execute
from flows.proof.compare import Pair
from storage import layout
from storage.backends.root import Root, open_root
from storage.manifest import find, need
from storage.parts import read_table
from storage.schema import ROLLOUT
from tasks.stages.names import LOOP, Stage
from tests.integration.command import PIECES, TINY, descendants, finish, ratchet, start, still_running
from tests.storage.s3 import BUCKET, s3_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = "tiny"
URL = f"s3://{BUCKET}/runs"
ARGUMENTS = ["run", str(TINY), "--root", URL, "--run", RUN, "--json", *PIECES]
STAGES = [(iteration, stage) for iteration in range(3) for stage in LOOP]


@pytest.fixture(scope="module")
def server():
    """A server that new processes find in their environment."""
    with s3_server() as server, pytest.MonkeyPatch.context() as environment:
        client = server.options["client_kwargs"]
        environment.setenv("AWS_ENDPOINT_URL", client["endpoint_url"])
        environment.setenv("AWS_DEFAULT_REGION", client["region_name"])
        environment.setenv("AWS_ACCESS_KEY_ID", server.options["key"])
        environment.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret"])
        yield server


@pytest.fixture(scope="module")
def bucket(server):
    return server.root("runs")


@pytest.fixture(scope="module")
def interrupted(default_signals, server, bucket, home):
    """The same run on S3, interrupted by Ctrl-C in the middle of iteration 1, and which of its processes are left."""
    process = start(*ARGUMENTS, home=home)
    wait_for(bucket, layout.manifest_key(RUN, 1, Stage.ROLLOUT, 0), process)
    started = descendants(process)
    process.send_signal(signal.SIGINT)
    return finish(process), still_running(started)


@pytest.fixture(scope="module")
def continued(interrupted, server, bucket, home):
    """That run continued, killed in the middle of the rollout of iteration 2 and continued again, and what it read."""
    process = start(*ARGUMENTS, home=home)
    wait_for(bucket, layout.manifest_key(RUN, 1, Stage.TRAIN, 0), process)
    wait_for(bucket, layout.piece_key(RUN, 2, Stage.ROLLOUT, 0, "").rpartition("/")[0], process)
    started = descendants(process)
    process.kill()
    finish(process)
    assert not still_running(started)
    assert find(bucket, RUN, 2, Stage.ROLLOUT) is None
    before = len(server.faults.requests)
    done = ratchet(*ARGUMENTS, home=home)
    return done, [request for request in server.faults.requests[before:] if request.startswith("GET ")]


@pytest.fixture(scope="module")
def on_s3(continued):
    return continued[0]


def wait_for(root: Root, prefix: str, process: subprocess.Popen[str]) -> None:
    """Wait until something appears. The deadline only ends a test that hangs."""
    deadline = time.monotonic() + 240
    while not (root.exists(prefix) or root.keys(prefix)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"nothing appeared at {prefix}"
        time.sleep(0.02)


def test_ctrl_c_leaves_nothing_running_and_says_how_to_go_on(interrupted):
    done, left = interrupted
    assert done.code == 130
    assert "continue with: " in done.err
    assert "Traceback" not in done.err
    assert not left


def test_it_ends_as_on_files(whole, on_s3):
    assert on_s3.code == 0, on_s3.err
    assert "Traceback" not in on_s3.err
    for name in ("iterations", "changes"):
        assert on_s3.json[name] == whole[1].json[name]


def test_every_manifest_is_the_one_of_the_run_on_files(bucket, whole, on_s3):
    found = [
        {(iteration, stage): one.digest for iteration, stage in STAGES if (one := find(root, RUN, iteration, stage))}
        for root in (open_root(str(whole[0])), bucket)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 4 + 5 * 2
    comparison = Pair(open_root(str(whole[0])), bucket, RUN).compare(2, 1)
    assert comparison.differences == ()
    assert min(comparison.weights, comparison.optimizer, comparison.rng, comparison.rows, comparison.metrics) > 0


def test_no_group_is_there_twice(bucket, on_s3):
    manifest = need(bucket, RUN, 2, Stage.ROLLOUT)
    table = read_table(bucket, manifest, ROLLOUT, ["prompt_id", "sample_id"])
    assert len(set(zip(table["prompt_id"].to_pylist(), table["sample_id"].to_pylist(), strict=True))) == 16 * 8
    assert table.num_rows == 16 * 8
    assert manifest.attempt == 1


def test_of_the_reference_and_for_a_new_engine_the_weights_alone_were_fetched(bucket, continued):
    _, fetched = continued
    states = [need(bucket, RUN, iteration, Stage.TRAIN) for iteration in (0, 1)]
    found = [[part.name for part in state.parts if any(part.key in one for one in fetched)] for state in states]
    others = ("state/optimizer", "state/generators", "state/effective.json")
    weights = [[part.name for part in state.parts if not part.name.startswith(others)] for state in states]
    assert found[0] == weights[0]
    # the ranks continue from shared memory, unless another run of this host has started in between
    assert found[1] in (weights[1], [part.name for part in states[1].parts])


def test_a_process_of_its_own_reads_it(bucket, on_s3, home):
    verified = ratchet("verify", RUN, "--root", URL, "--json", home=home)
    assert verified.code == 0, verified.err + verified.out
    status = ratchet("status", RUN, "--root", URL, "--json", home=home)
    assert status.code == 0, status.err
    assert status.json["changes"] == on_s3.json["changes"]


COMMANDS = {
    "ls": ["ls", "--json"],
    "show": ["show", RUN, "2", "train", "--json"],
    "lineage": ["lineage", RUN, "--weights", "2", "--json"],
    "compact": ["compact", RUN, "--json"],
    "unlock": ["unlock", RUN],
    "gc": ["gc", RUN, "--keep-newest", "1", "--json"],
    "fork": ["fork", RUN, "--at", "1", "--run", "fork"],
    "verify": ["verify", RUN, "--json"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_every_command_works_on_it(bucket, on_s3, words, capfd):
    assert execute([*words, "--root", URL]) == 0
    out = capfd.readouterr().out
    assert json.loads(out) if "--json" in words else out
