"""Commands on an object store, over a run of the real stack that was killed and continued there."""

import json

import pytest

from flows.cli.app import execute
from storage.backends.root import open_root
from storage.manifest import need
from storage.parts import read_table
from storage.schema import ROLLOUT
from tasks.stages.names import Stage
from tests.integration.command import RUN, ratchet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def url(proof) -> str:
    """The root of the run that was killed."""
    assert proof.done.code == 0, proof.done.err
    return f"{proof.url}/interrupted"


def test_no_group_is_there_twice(url):
    bucket = open_root(url)
    manifest = need(bucket, RUN, 1, Stage.ROLLOUT)
    table = read_table(bucket, manifest, ROLLOUT, ["prompt_id", "sample_id"])
    assert len(set(zip(table["prompt_id"].to_pylist(), table["sample_id"].to_pylist(), strict=True))) == 16 * 8
    assert table.num_rows == 16 * 8
    assert manifest.attempt == 1


def test_a_process_of_its_own_reads_it(url, proof, home):
    verified = ratchet("verify", RUN, "--root", url, "--json", home=home)
    assert verified.code == 0, verified.err + verified.out
    killed, undisturbed = (
        ratchet("status", RUN, "--root", root, "--json", home=home) for root in (url, f"{proof.url}/whole")
    )
    assert killed.code == 0, killed.err
    assert killed.json["changes"] == undisturbed.json["changes"]


COMMANDS = {
    "ls": ["ls", "--json"],
    "show": ["show", f"{RUN}@2:train", "--json"],
    "lineage": ["lineage", f"{RUN}@2", "--json"],
    "compact": ["compact", RUN, "--json"],
    "unlock": ["unlock", RUN],
    "gc": ["gc", RUN, "--keep-newest", "1", "--json"],
    "fork": ["fork", f"{RUN}@1", "--run", "fork"],
    "verify": ["verify", RUN, "--json"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_every_command_works_on_it(url, words, capfd):
    assert execute([*words, "--root", url]) == 0
    out = capfd.readouterr().out
    assert json.loads(out) if "--json" in words else out
