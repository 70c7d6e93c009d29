"""A run that was stored before is read, and continued with the same identities."""

import json
import tarfile
from pathlib import Path

import pytest

from storage.backends.root import Root, open_root
from storage.manifest import need
from storage.upkeep.catalog import contents
from storage.upkeep.verify import verify
from tasks.config.document import load_config
from tasks.config.stored import record_config
from tests.forked_python import Finished
from tests.integration.command import ratchet

GOLDEN = Path(__file__).parent / "golden"
CONFIG = GOLDEN / "golden.toml"
RUN = "golden"
WHOLE: dict[str, str] = json.loads((GOLDEN / "digests.json").read_text())
STORED = {place: digest for place, digest in WHOLE.items() if not place.endswith("@2")}


def unpacked(folder: Path) -> Root:
    with tarfile.open(GOLDEN / "run.tar.gz") as archive:
        archive.extractall(folder / "runs", filter="data")
    return open_root(str(folder / "runs"))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return unpacked(tmp_path)


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory, home: Path) -> tuple[Root, Finished]:
    root = unpacked(tmp_path_factory.mktemp("golden"))
    return root, ratchet("run", str(CONFIG), "--run", RUN, "--root", root.url, "--json", home=home)


def identities(root: Root) -> dict[str, str]:
    return {f"{one.stage}@{one.iteration}": one.digest for one in contents(root, RUN).newest}


def test_its_manifests_have_the_identities_they_had(root: Root):
    assert identities(root) == STORED
    assert verify(root, RUN).sound


def test_its_configuration_is_no_other_by_todays_rules(root: Root):
    recorded = {manifest.config_digest for manifest in contents(root, RUN).newest}
    assert recorded == {record_config(root, RUN, load_config(str(CONFIG)))}


@pytest.mark.slow
def test_it_is_continued(continued: tuple[Root, Finished], root: Root):
    pieces = contents(root, RUN).pieces
    root, done = continued
    assert done.code == 0, done.err
    after = identities(root)
    assert after.keys() == WHOLE.keys()
    assert {place: after[place] for place in STORED} == STORED
    rollout = need(root, RUN, 2, "rollout")
    assert rollout.attempt == 1
    assert sum("/000002/" in key for key in pieces) == 2
    assert need(root, RUN, 2, "train").inputs["state"] == STORED["train@1"]
    # a state is identified by its content, and its results by that state
    train, served, evaluated = (need(root, RUN, 2, stage) for stage in ("train", "weight-sync", "evaluate"))
    assert train.content == "state"
    assert (served.inputs["train"], evaluated.inputs["weights"]) == (train.digest, served.digest)
    # another processor may sample differently; if it does not, the scores are the same
    if after["rollout@2"] == WHOLE["rollout@2"]:
        assert after["reward@2"] == WHOLE["reward@2"]
    assert verify(root, RUN).sound


@pytest.mark.slow
def test_standard_output_is_the_result_alone_and_status_reads_it_from_storage(continued: tuple[Root, Finished], home):
    root, done = continued
    assert len(done.out.splitlines()) == 1
    assert done.json.keys() >= {
        "changes", "iterations", "seconds_total", "seconds_per_iteration", "peak_pss_gib", "run",
    }  # fmt: skip
    assert done.json["iterations"] == 2
    assert 0 < done.json["peak_pss_gib"] < 8
    status = ratchet("status", RUN, "--root", root.url, "--json", home=home)
    assert status.code == 0, status.err
    assert status.json["changes"] == done.json["changes"]
