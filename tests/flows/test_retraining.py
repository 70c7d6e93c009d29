"""Training on stored samples: the real loop and stages over small workers, from beginning to kills."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.cli.app import execute
from flows.views.status import read_status
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import need
from storage.parts import read_parts, read_table
from storage.schema import REWARD, ROLLOUT, SELECTION
from storage.upkeep.lineage import of_sample, of_weights
from storage.upkeep.verify import Problem, verify
from tasks.forking import begin_retraining, retrain_config, since_of, start_of
from tasks.importing.rows import ImportOrder
from tasks.importing.samples import import_samples
from tasks.stages.names import WORKFLOW, Stage
from tasks.stages.views import Selected, Trained
from tests.small.config import small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.small.here import WorkersHere

ITERATIONS = 3
START = {"start": f"{RUN}@2", "select": [RUN], "samples": 8}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A root with a run of three iterations, 12 samples each."""
    folder = tmp_path_factory.mktemp("sampled")
    root = open_root(str(folder / "runs"))
    driver(root, small_config([f"run.iterations={ITERATIONS}"]), folder / "scratch").drive()
    return root


def begun(root: Root, run: str, settings: tuple[str, ...] = (), **given: Any):
    config = retrain_config(root, run, {**START, **given}, None, settings)
    begin_retraining(root, run, config)
    return config


class Watched(WorkersHere):
    """Workers that record a start of everything at once, engines too."""

    def warm(self, model_dir: Path, config: Any) -> None:
        self.calls.append("warm")


def retrained(root: Root, tmp_path: Path, run: str, settings: tuple[str, ...] = (), at: Any = None, **given: Any):
    config = begun(root, run, settings, **given)
    process = driver(root, config, tmp_path / run, run=run, at=at, workers=Watched(config))
    process.drive()
    return process


def selection(root: Root, run: str) -> pa.Table:
    shares = Selected(need(root, run, 0, Stage.SELECT)).shares
    return read_parts(root, shares, SELECTION)


@pytest.mark.slow
def test_a_retraining_trains_on_stored_samples_without_an_engine(sampled: Root, tmp_path: Path):
    process = retrained(sampled, tmp_path, "plain", epochs=2)
    table = selection(sampled, "plain")
    stored = pa.concat_tables(read_table(sampled, need(sampled, RUN, n, Stage.ROLLOUT), ROLLOUT) for n in (1, 2, 3))
    assert table.num_rows == stored.num_rows == 36
    keys = ["iteration", "prompt_id", "sample_id"]
    order = [(name, "ascending") for name in keys]
    assert table.select(ROLLOUT.names).sort_by(order).equals(stored.sort_by(order))
    shares = len(Selected(need(sampled, "plain", 0, Stage.SELECT)).shares)
    assert process.done == [(0, Stage.SELECT, False)] + [(n, Stage.TRAIN, False) for n in range(1, 2 * shares + 1)]
    assert not {"warm", "generate", "enqueue", "prepare_update", "score"} & set(process.workers.calls)
    assert read_status(sampled, "plain").complete


def test_a_retraining_is_not_forked(sampled: Root, capfd):
    begun(sampled, "unforked")
    assert execute(["fork", "unforked@0", "--run=child", f"--root={sampled.url}"]) == 2
    assert "trains on stored samples and cannot be forked" in capfd.readouterr().err
    assert not sampled.exists("child/run.json")


@pytest.mark.parametrize(
    ("command", "instead"), [("check-sync", "nothing can be compared"), ("evaluate", "start a run that begins with")]
)
def test_the_weights_of_a_retraining_are_not_served(sampled: Root, tmp_path: Path, capfd, command, instead):
    retrained(sampled, tmp_path, command)
    assert execute([command, command, f"--root={sampled.url}"]) == 2
    said = capfd.readouterr().err
    assert "trains on stored samples and serves no weights" in said
    assert instead in said


def test_the_first_state_is_the_one_it_starts_from(sampled: Root):
    begun(sampled, "started")
    ours, theirs = need(sampled, "started", 0, Stage.TRAIN), need(sampled, RUN, 2, Stage.TRAIN)
    assert Trained(ours).identity == Trained(theirs).identity
    assert [(one.name, one.digest) for one in ours.parts] == [(one.name, one.digest) for one in theirs.parts]
    assert ours.origin is not None and ours.origin.digest == theirs.digest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "point"),
    [
        (Stage.SELECT, Point.MID_PART),
        (Stage.SELECT, Point.COMMITTED),
        (Stage.TRAIN, Point.STARTED),
        (Stage.TRAIN, Point.PARTS_DONE),
    ],
)
def test_a_killed_retraining_ends_in_the_same_bits(sampled: Root, tmp_path: Path, stage: Stage, point: Point):
    if not sampled.exists("whole/run.json"):
        retrained(sampled, tmp_path, "whole")
    run, iteration = f"killed-{stage}-{point}".lower(), 0 if stage == Stage.SELECT else 2
    with pytest.raises(Killed):
        retrained(sampled, tmp_path, run, at=killing(stage, iteration, point))
    retrained(sampled, tmp_path / "next", run)
    assert state(sampled, run) == state(sampled, "whole")


def state(root: Root, run: str) -> list[tuple[Any, ...]]:
    last = read_status(root, run).iterations
    found = [Trained(need(root, run, n, Stage.TRAIN)).identity for n in range(1, last + 1)]
    return [*found, [part.digest for part in need(root, run, 0, Stage.SELECT).parts]]


@pytest.fixture(scope="module")
def other_lengths(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward function in a file."""
    path = tmp_path_factory.mktemp("rewards") / "lengths.py"
    path.write_text("def score(record, response):\n    return float(len(response) + len(record['prompt']))\n")
    return str(path)


def rescored(root: Root, run: str) -> pa.Table:
    return read_parts(root, need(root, run, 0, Stage.RESCORE).parts, REWARD)


@pytest.mark.slow
def test_samples_are_scored_again_and_old_scores_stay(sampled: Root, tmp_path: Path, other_lengths: str):
    before = [need(sampled, RUN, n, Stage.REWARD).digest for n in (1, 2, 3)]
    settings = (f'reward.function="{other_lengths}:score"',)
    process = retrained(sampled, tmp_path, "rescored", settings, rescore=True)
    assert process.done[:2] == [(0, Stage.SELECT, False), (0, Stage.RESCORE, False)]
    new, old = rescored(sampled, "rescored"), selection(sampled, "rescored")
    assert new["reward"].to_pylist() != old["reward"].to_pylist()
    assert min(new["reward"].to_pylist()) >= 3  # a prompt alone has this length
    assert new.select(["prompt_id", "sample_id"]).equals(old.select(["prompt_id", "sample_id"]))
    assert [need(sampled, RUN, n, Stage.REWARD).digest for n in (1, 2, 3)] == before
    plain = retrained(sampled, tmp_path, "unscored")
    assert state(sampled, "rescored")[0] != state(sampled, "unscored")[0]
    assert (
        need(sampled, "rescored", 1, Stage.TRAIN).inputs["reward"] == need(sampled, "rescored", 0, Stage.RESCORE).digest
    )
    assert plain.workers.calls.count("train_policy") == len(plain.done) - 1


@pytest.mark.slow
def test_a_kill_while_it_scores_costs_one_share(sampled: Root, tmp_path: Path, other_lengths: str):
    settings = (f'reward.function="{other_lengths}:score"',)
    with pytest.raises(Killed):
        retrained(sampled, tmp_path, "halfway", settings, at=killing(Stage.RESCORE, 0, Point.MID_PART, 1), rescore=True)
    kept = len(sampled.keys("halfway/manifests/000000/rescore.r0.pieces"))
    assert kept >= 1
    retrained(sampled, tmp_path / "next", "halfway", settings, rescore=True)
    retrained(sampled, tmp_path / "whole", "inone", settings, rescore=True)
    assert state(sampled, "halfway") == state(sampled, "inone")
    ours, theirs = (need(sampled, run, 0, Stage.RESCORE).parts for run in ("halfway", "inone"))
    assert [part.digest for part in ours] == [part.digest for part in theirs]


@pytest.mark.slow
def test_a_reward_function_that_changes_meanwhile_scores_everything(sampled: Root, tmp_path: Path):
    file = tmp_path / "changing.py"
    file.write_text("def score(record, response):\n    return 1.0\n")
    settings = (f'reward.function="{file}:score"',)
    with pytest.raises(Killed):
        retrained(sampled, tmp_path, "changed", settings, at=killing(Stage.RESCORE, 0, Point.MID_PART, 1), rescore=True)
    file.write_text("def score(record, response):\n    return 2.0\n")
    retrained(sampled, tmp_path / "next", "changed", settings, rescore=True)
    assert set(rescored(sampled, "changed")["reward"].to_pylist()) == {2.0}


def test_lineage_crosses_runs(sampled: Root, tmp_path: Path):
    retrained(sampled, tmp_path, "lined", where="sample_id = 0", select=[f"{RUN}@3"])
    found = of_weights(sampled, WORKFLOW, "lined", 1)
    assert [(one.run, one.iteration, one.selected, one.rows) for one in found.selected] == [(RUN, 3, 6, 12)]
    steps = [(step.run, step.iteration, step.stage) for step in found.steps]
    assert (RUN, 2, Stage.ROLLOUT) in steps  # the first state was trained on it
    assert steps[-2:] == [("lined", 0, Stage.SELECT), ("lined", 1, Stage.TRAIN)]
    row = read_table(sampled, need(sampled, RUN, 3, Stage.ROLLOUT), ROLLOUT).slice(0, 2).to_pylist()
    users = [
        {(step.run, step.iteration) for step in of_sample(sampled, WORKFLOW, RUN, 3, one["prompt_id"], n).used_by}
        for n, one in enumerate(row)
    ]
    assert ("lined", 1) in users[0]
    assert all(run != "lined" for run, _ in users[1])


@pytest.mark.slow
def test_verify_knows_what_was_selected_from(tmp_path: Path):
    root = open_root(str(tmp_path / "runs"))
    other = open_root(str(tmp_path / "other"))
    for one in (root, other):
        driver(one, small_config(["run.iterations=1"]), tmp_path / "scratch").drive()
    retrained(root, tmp_path, "mixed", select=[f"{other.url}//{RUN}"], start=f"{other.url}//{RUN}@1")
    assert verify(root, "mixed").findings == ()
    other.remove(need(other, RUN, 1, Stage.ROLLOUT).key)
    report = verify(root, "mixed")
    assert report.sound
    assert [one.fault for one in report.findings] == [Problem.SOURCE_GONE]
    retrained(root, tmp_path / "again", "mixed")  # it has its own copy


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        ((), {"where": "reward > 1000"}, "nothing is selected: 36 samples were examined"),
        ((), {"where": " "}, "the condition `where` is empty"),
        ((), {"where": "rewad > 1"}, "did you mean 'reward'"),
        ((), {"select": ["nothing"]}, "no run 'nothing'"),
        ((), {"start": "nothing@1"}, "no run 'nothing'"),
        ((), {"start": f"{RUN}@9"}, "no train state of iteration 9"),
        (("train.max_length=5",), {}, "train.max_length is 5"),
        (("rollout.stop_tokens=[3]",), {}, "cannot be changed in a run that begins from it"),
        (("retrain.epoch=3",), {}, "did you mean 'retrain.epochs'"),
    ],
)
def test_what_cannot_be_retrained_is_refused(sampled: Root, tmp_path: Path, settings, given, words):
    name = f"refused-{abs(hash(words)) % 10**6}"
    with pytest.raises(InputError, match=words):
        retrained(sampled, tmp_path, name, settings, **given)


def test_stored_samples_are_corrected_unless_the_objective_says_otherwise(sampled: Root):
    def policy(*settings: str):
        return retrain_config(sampled, "fresh", START, None, settings).train.policy

    assert policy().correction.type == "truncate"
    assert policy('train.policy.correction.type="mask"').correction.type == "mask"
    assert policy('train.policy.correction.type="none"').correction.type == "none"
    assert policy('train.policy.loss.type="sft"').correction.type == "none"
    assert policy('train.policy.old_policy="behaviour"').correction.type == "none"


def test_what_is_relative_is_fixed_when_the_run_begins(sampled: Root):
    now = datetime(2020, 1, 2, tzinfo=UTC)
    assert start_of(sampled, "relative", RUN) == f"{RUN}@{ITERATIONS}"
    begun(sampled, "relative", start=f"{RUN}@1", since=since_of(sampled, "relative", "24h", now))
    assert start_of(sampled, "relative", RUN) == f"{RUN}@1"
    assert since_of(sampled, "relative", "24h", now + timedelta(days=7)) == "2020-01-01T00:00:00+00:00"


def test_a_retraining_is_continued_as_it_was_begun(sampled: Root, tmp_path: Path):
    retrained(sampled, tmp_path, "same", epochs=1)
    config = retrain_config(sampled, "same", {}, None, [])
    assert config.retrain is not None
    assert config.retrain.start == START["start"]
    with pytest.raises(InputError, match=r"retrain\.epochs: the run was started with 1"):
        retrained(sampled, tmp_path, "same", epochs=2)
    with pytest.raises(InputError, match="is no retraining"):
        retrain_config(sampled, RUN, START)


def test_retention_keeps_the_newest_states_of_a_retraining(sampled: Root, tmp_path: Path):
    retrained(sampled, tmp_path, "thinned", ("storage.keep_newest=1",))
    states = {key.split("/")[2] for key in sampled.keys("thinned/parts") if "/train/" in key and "/trainer-" not in key}
    assert states == {"000000", f"{read_status(sampled, 'thinned').iterations:06d}"}  # the first is its own too
    assert verify(sampled, "thinned").sound


def imported(root: Root, tmp_path: Path, run: str, logprobs: bool) -> None:
    rows = [
        {"prompt_tokens": [3, 4], "response_tokens": [5, 6 + n % 3], "reward": n % 2, "logprobs": [-1.0, -0.5]}
        for n in range(8)
    ]
    given = [{key: value for key, value in row.items() if logprobs or key != "logprobs"} for row in rows]
    (tmp_path / "ext.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in given))
    import_samples(root, ImportOrder((str(tmp_path / "ext.jsonl"),), run, {}, 1.0, logprobs))


def test_imported_samples_are_trained_on(sampled: Root, tmp_path: Path):
    imported(sampled, tmp_path, "ext", logprobs=True)
    retrained(sampled, tmp_path, "extended", select=["ext", RUN], where="reward >= 0")
    assert set(selection(sampled, "extended")["run"].to_pylist()) == {"ext", RUN}
    with pytest.raises(InputError, match="cannot be scored again"):
        retrained(sampled, tmp_path, "never", select=["ext"], rescore=True)


def test_samples_without_logprobs_serve_only_what_needs_none(sampled: Root, tmp_path: Path):
    imported(sampled, tmp_path, "bare", logprobs=False)
    with pytest.raises(InputError, match="8 selected samples were imported without log-probabilities"):
        retrained(sampled, tmp_path, "uncorrected", select=["bare"])
    with pytest.raises(InputError, match="without which only"):
        compared = ('train.policy.old_policy="trainer"', 'train.policy.correction={type="none"}')
        retrained(sampled, tmp_path, "compared", compared, select=["bare"])
    settings = ('train.policy.loss.type="sft"', "train.policy.kl_coefficient=0")
    retrained(sampled, tmp_path, "likely", settings, select=["bare"])
    assert read_status(sampled, "likely").complete
