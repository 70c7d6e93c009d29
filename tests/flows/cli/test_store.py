"""The commands of the store: their output, their JSON, and their exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.app import app
from storage import layout
from storage.backends.root import Root, open_root
from storage.errors import InputError, LeaseHeld, LeaseLost
from storage.manifest import commit, need
from storage.ownership.lease import acquire, unlock
from storage.ownership.process import this_process
from storage.upkeep import retention
from tasks.config.run import RunConfig
from tasks.config.stored import read_config, record_config, stored_config
from tasks.stages.names import Stage
from tests.storage.clocks import elsewhere
from tests.storage.runs import age, make_run
from tests.storage.tables import manifest

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(tmp_path: Path, config: RunConfig) -> Root:
    store = open_root(str(tmp_path / "runs"))
    record_config(store, "run", config)
    make_run(store)
    return store


@pytest.fixture
def call(root: Root, capfd: pytest.CaptureFixture[str]):
    """Run a command; returns its exit code, its JSON and its output for people."""

    def carry_out(*words: str):
        code = app([*words, "--root", root.url])
        said = capfd.readouterr().out
        read_only = words[0] not in ("fork", "unlock") and "--apply" not in words
        document = {}
        if read_only:
            assert app([*words, "--root", root.url, "--json"]) == code
            out = capfd.readouterr().out
            assert out.count("\n") == 1
            document = json.loads(out)
        return code, document, said

    return carry_out


def test_ls_lists_the_runs(call):
    code, document, said = call("ls")
    assert code == 0
    assert [run["run"] for run in document["runs"]] == ["run"]
    assert re.search(r"^run +3 +weight-sync +2026-01-01 00:00:00 +- +-$", said, re.MULTILINE)


def test_ls_lists_a_damaged_run_among_the_others(call, root: Root):
    make_run(root, "other", 1)
    key = layout.manifest_key("run", 3, Stage.TRAIN, 0)
    root.replace(key, b"{}")
    code, document, said = call("ls")
    assert (code, [run["damaged"] is None for run in document["runs"]]) == (0, [True, False])
    assert re.search(r"^other +1 +weight-sync", said, re.MULTILINE)
    assert re.search(r"^run +3 +DAMAGED", said, re.MULTILINE)
    assert re.search(rf"^run: .*{key} is damaged", said, re.MULTILINE)


def test_ls_of_nothing_says_so(call, root: Root):
    for key in root.keys(""):
        root.remove(key)
    assert call("ls")[2] == f"no runs in {root.url}\n"


def test_show_goes_from_the_run_to_the_part(call, root: Root):
    _, document, said = call("show", "run")
    assert len(document["stages"]) == said.count("\n") - 1 == 15
    _, document, said = call("show", "run@2")
    assert {one["manifest"]["iteration"] for one in document["stages"]} == {2}
    _, document, said = call("show", "run@2:rollout")
    (shown,) = document["stages"]
    stored = need(root, "run", 2, Stage.ROLLOUT)
    assert shown["digest"] == stored.digest
    assert shown["manifest"]["parts"][0]["key"] == stored.parts[0].key
    for value in (stored.digest, stored.parts[0].key, stored.parts[0].digest, stored.inputs["weights"]):
        assert value in said


@pytest.mark.parametrize("words", [("show", "run@9"), ("show", "run@1:prepare"), ("show", "nobody")])
def test_what_is_not_there_is_said(call, words):
    with pytest.raises(InputError, match=r"run '(run|nobody)'"):
        call(*words)


def test_lineage_of_weights_and_samples(call):
    _, document, said = call("lineage", "run@2")
    assert len(document["steps"]) == 10
    assert "learned from        samples of version 1, mean reward 0.2500" in said
    _, document, said = call("lineage", "run@2", "--sample", "p1/2")
    assert (document["weight_versions"], document["used_by"][0]["iteration"]) == ([1], 2)
    assert "prompt              'text of p1'" in said
    with pytest.raises(InputError, match="'run' lacks @ITERATION: write it as RUN@ITERATION, as in my-run@6"):
        call("lineage", "run", "--sample", "p1/2")


def test_verify_ends_with_1_when_something_is_wrong(call, root: Root):
    code, document, said = call("verify", "run")
    assert (code, document["sound"]) == (0, True)
    assert "run run is sound: 15 manifests and" in said
    key = need(root, "run", 2, Stage.ROLLOUT).parts[0].key
    root.replace(key, root.read_bytes(key)[:-1])
    code, document, said = call("verify", "run")
    assert (code, document["sound"], document["findings"][0]["fault"]) == (1, False, "damaged")
    assert f"damaged       {key}" in said
    assert "NOT SOUND" in said


def test_verify_of_all_runs_has_a_line_for_each(call, root: Root):
    make_run(root, "other", 1)
    code, document, said = call("verify", "--all")
    assert (code, document["sound"], [one["run"] for one in document["runs"]]) == (0, True, ["other", "run"])
    assert said.splitlines()[-1] == f"2 runs in {root.url}, all sound"
    root.replace(layout.manifest_key("other", 1, Stage.TRAIN, 0), b"{}")
    code, document, said = call("verify", "--all")
    assert (code, [one["sound"] for one in document["runs"]]) == (1, [False, True])
    assert "run other is NOT SOUND" in said
    assert "run run is sound" in said
    for words in (("verify",), ("verify", "run", "--all")):
        with pytest.raises(InputError, match="give the id of a run, or --all"):
            call(*words)


def test_gc_sums_up_each_state(call, root: Root):
    said = call("gc", "run", "--keep-newest", "1")[2]
    rows = [line.split("  ")[0] for line in said.splitlines()]
    assert rows[:2] == ["train of iteration 1", "train of iteration 2"]
    assert "1 object " in said.splitlines()[0]
    assert "run/parts/000001/train/state/0" in call("gc", "run", "--keep-newest", "1", "--objects")[2]


def test_gc_touches_nothing_until_it_is_told(call, root: Root):
    code, document, said = call("gc", "run", "--keep-newest", "1")
    states = [need(root, "run", n, Stage.TRAIN).parts[0].key for n in range(4)]
    assert (code, {one["key"] for one in document["garbage"]}, document["bytes"]) == (0, set(states[1:3]), 2000)
    assert "2 objects of run run can be removed, which would free 2.0 KiB: --apply does it" in said
    assert all(root.exists(key) for key in states)
    assert "removed" in call("gc", "run", "--keep-newest", "1", "--apply")[2]
    assert [root.exists(key) for key in states] == [True, False, False, True]
    assert "parts deleted" in call("show", "run")[2]


def test_gc_names_a_record_that_keeps_it_from_telling(call, root: Root):
    key = layout.manifest_key("run", 0, Stage.TRAIN, 0)
    root.replace(key, b"{}")
    code, document, said = call("gc", "run", "--keep-newest", "1")
    assert (code, document["garbage"]) == (1, [])
    assert [(one["run"], one["key"]) for one in document["unreadable"]] == [("run", key)]
    assert re.search(rf"^unreadable, of run run: .*{key} is damaged", said, re.MULTILINE)
    assert call("gc", "run", "--keep-newest", "1", "--apply")[0] == 1
    assert root.exists(need(root, "run", 1, Stage.TRAIN).parts[0].key)


def test_gc_stops_when_it_is_no_longer_the_one_that_drives_the_run(call, root: Root, monkeypatch):
    orphan = "run/parts/000009/rollout/groups-0123456789abcdef.arrow"
    root.put_if_absent(orphan, b"old")
    age(root, orphan)
    survey = retention.survey

    def overtaken(*arguments):
        unlock(root, "run", this_process("another"), force=True)
        return survey(*arguments)

    monkeypatch.setattr(retention, "survey", overtaken)
    with pytest.raises(LeaseLost):
        call("gc", "run", "--apply")
    assert root.exists(orphan)


@pytest.mark.parametrize("words", [("--keep-every", "2"), ("--keep-newest", "0")])
def test_gc_refuses_what_means_nothing(call, words):
    with pytest.raises(InputError, match="--keep-newest"):
        call("gc", "run", *words)


def test_gc_does_not_remove_under_a_process_that_drives_the_run(call, root: Root):
    orphan = "run/parts/000009/rollout/groups-0123456789abcdef.arrow"
    root.put_if_absent(orphan, b"old")
    age(root, orphan)
    acquire(root, "run", this_process("ratchet run"))
    with pytest.raises(LeaseHeld, match="driven by ratchet run"):
        call("gc", "run", "--apply")
    assert root.exists(orphan)
    assert "no manifest names it" in call("gc", "run")[2]


def test_fork_makes_a_run_with_settings_of_its_own(call, root: Root, config: RunConfig):
    code, _, said = call("fork", "run@2", "--run", "child", "--set", "train.optimizer.learning_rate=1e-4")
    assert code == 0
    assert "has iterations 0 to 2 of" in said
    stored = stored_config(root, "child")
    assert (stored.run.name, stored.train.optimizer.learning_rate) == ("child", 1e-4)
    digests = {run: read_config(root, run).digest for run in ("run", "child")}
    assert need(root, "child", 2, Stage.TRAIN).config_digest == digests["child"] != digests["run"]
    assert re.search(r"^child +2 .* run +-$", call("ls")[2], re.MULTILINE)
    assert "taken from run" in call("show", "child@2")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["model.generate.layers=3", "data.shuffle=false", "warmup.steps=3", "rollout.stop_tokens=[1]"]
)
def test_what_iteration_0_decided_is_not_changed_by_a_fork(call, setting):
    with pytest.raises(InputError, match=setting.partition("=")[0]):
        call("fork", "run@2", "--run", "child", "--set", setting)


def test_unlock_tells_who_drives_the_run(call, root: Root):
    assert call("unlock", "run")[2].startswith("run run is not driven by any process\nrun run is free")
    lease = acquire(root, "run", elsewhere("ratchet run"))
    code, _, said = call("unlock", "run")
    assert code == 1
    assert "driven by ratchet run (host elsewhere, process 7)" in said
    lease.check()
    assert call("unlock", "run", "--force")[0] == 0
    assert "not driven by any process" in call("unlock", "run")[2]


def test_compact_writes_one_file(call, root: Root):
    code, document, said = call("compact", "run")
    assert (code, document["rows"]) == (0, 36)
    assert root.exists(document["key"])
    assert "36 samples of iterations 1 to 3" in said


@pytest.mark.slow
def test_the_commands_load_nothing_heavy():
    code = "import sys, flows.cli.store; sys.stdout.write(' '.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert not {"torch", "ray", "vllm", "prefect", "transformers", "botocore"} & set(found.stdout.split())


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infra.bench.storage", "--json", "--repeats=1", "--samples=256", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)


@pytest.mark.slow
def test_the_bench_of_the_store_runs(root: Root):
    # the command works and has these figures; their values depend on the machine
    stages = {
        Stage.ROLLOUT: {"seconds": 4.0, "storage_seconds": 0.1},
        Stage.TRAIN: {
            "seconds": 6.0,
            "storage_seconds": 0.1,
            "save_seconds": 0.2,
            "upload_seconds": 0.5,
            "process_to_gradient_s": 30.0,
        },
    }
    for stage, metrics in stages.items():
        for iteration in (4, 5):
            commit(root, manifest(stage, iteration, metrics=metrics))
    commit(root, manifest(Stage.ROLLOUT, 6, metrics={"seconds": 400.0, "storage_seconds": 0.0}))  # of a resume
    ended = bench("--run=run", f"--root={root.url}")
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    for name in (
        "write_zstd_mb_per_cpu_s",
        "read_views_mb_per_cpu_s",
        "read_vs_jsonl",
        "read_vs_torch_save_lists",
        "commit_ms",
    ):
        assert figures[name] > 0
    assert figures["durability_share"] == pytest.approx(0.04)
    assert figures["durability_behind_share"] == pytest.approx(0.05)
    assert figures["resume_to_first_gradient_s"] == 30.0


@pytest.mark.slow
def test_the_bench_says_so_if_a_run_does_not_tell(root: Root):
    ended = bench("--run=run", f"--root={root.url}")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no RL iteration of run 'run'" in ended.stderr
