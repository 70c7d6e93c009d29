"""Sources of a retraining are compared by digest: other runs may come and go, and functions may change."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.cli.app import execute
from storage import records
from storage.backends.root import Root, open_root
from storage.errors import InputError, StageFailed
from storage.kill_points import Point
from storage.manifest import need
from storage.ownership.lease import hold
from storage.parts import read_parts, read_table
from storage.schema import REWARD, SELECTION
from storage.selection import read_prompts, read_sources
from storage.upkeep.removal import forget, remove
from tasks.config.model import EnginesSection, JudgeEngine
from tasks.forking import begin_retraining, retrain_config
from tasks.importing.rows import ImportOrder
from tasks.importing.samples import import_samples
from tasks.stages.names import Stage
from tasks.stages.select import check_routes, examine
from tasks.stages.selecting import Ranges
from tasks.stages.views import Prepared, Selected
from tests.flows.test_given_prompts import config_of
from tests.small.driving import RUN, Killed, driver, killing


def prompts(path: Path, shift: int) -> str:
    """Eight prompts, whose answers are shifted."""
    lines = [f'{{"id": "s{n}", "prompt": "{n:04d}+1=", "answer": "{n + shift}"}}\n' for n in range(8)]
    path.write_text("".join(lines))
    return str(path)


def sample(root: Root, run: str, file: str, *settings: str) -> None:
    driver(root, config_of({"train": file}, "run.iterations=1", *settings), Path(file).parent / run, run=run).drive()


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reward function that returns answers, and a root with two runs over the same prompts."""
    folder = tmp_path_factory.mktemp("sampled")
    (folder / "my.py").write_text("def score(record, response):\n    return float(record['answer'])\n")
    file = prompts(folder / "a.jsonl", 1)
    for run in (RUN, "other"):
        sample(open_root(str(folder / "runs")), run, file)
    return folder


@pytest.fixture
def root(sampled: Path, tmp_path: Path) -> Root:
    """A copy of that root."""
    shutil.copytree(sampled / "runs", tmp_path / "runs")
    return open_root(str(tmp_path / "runs"))


@pytest.fixture
def function(sampled: Path) -> str:
    return f"{sampled}/my.py:score"


def retrain(root: Root, run: str, function: str, at: Any = None, settings: tuple[str, ...] = (), **given: Any) -> None:
    table = {"start": "other@1", "select": [RUN], "samples": 4, "rescore": True, **given}
    config = retrain_config(root, run, table, None, (f"reward.function={function}", *settings))
    begin_retraining(root, run, config)
    driver(root, config, Path(f"{root.folder}-scratch") / run, run=run, at=at).drive()


def rewards(root: Root, run: str) -> list[float]:
    return read_table(root, need(root, run, 0, Stage.RESCORE), REWARD)["reward"].to_pylist()


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_rescore_needs_no_other_run(root: Root, tmp_path: Path, function: str, replaced: bool):
    retrain(root, "plain", function)
    with pytest.raises(Killed):
        retrain(root, "killed", function, killing(Stage.RESCORE, 0, Point.STARTED))
    with hold(root, RUN, "test") as lease:
        remove(root, RUN, lease)
    forget(root, RUN)
    if replaced:
        sample(root, RUN, prompts(tmp_path / "b.jsonl", 1000), "run.seed=7")
    retrain(root, "killed", function)
    assert rewards(root, "killed") == rewards(root, "plain")
    assert all(1 <= one <= 8 for one in rewards(root, "killed"))


def test_a_selection_holds_the_prompts_that_a_rescore_needs(root: Root, function: str):
    retrain(root, "few", function, limit=2)
    selection, prepared = need(root, "few", 0, Stage.SELECT), need(root, RUN, 0, Stage.PREPARE)
    (source,) = read_sources(root, selection)
    assert (source.prepare, list(source.stop_tokens or ())) == (prepared.digest, prepared.facts["stop_tokens"])
    samples = read_parts(root, Selected(selection).shares, SELECTION)
    assert samples.num_rows == 2
    copied = read_prompts(root, selection, prepared.digest)["prompt_id"].to_pylist()
    assert copied == samples["prompt_id"].unique().to_pylist()
    retrain(root, "as-scored", function, rescore=False)
    names = need(root, "as-scored", 0, Stage.SELECT).part_names
    assert not any(name.startswith("prompts") for name in names)


@pytest.mark.parametrize("there", [False, True], ids=["lost", "replaced"])
def test_rollouts_whose_prompts_are_not_there_are_not_selected(root: Root, tmp_path: Path, function: str, there: bool):
    prepared = need(root, RUN, 0, Stage.PREPARE)
    root.remove(prepared.key)
    if there:
        sample(root, "third", prompts(tmp_path / "b.jsonl", 1000))
        other = need(root, "third", 0, Stage.PREPARE).model_copy(update={"run": RUN, "origin": prepared.origin})
        records.publish(root, prepared.key, other.model_copy(update={"parts": prepared.parts}))
    before = root.keys("")
    said = rf"answers the prompts of prepare {prepared.digest}, but {'[0-9a-f]+' if there else 'none'} is there now"
    with pytest.raises(InputError, match=said):
        retrain(root, "never", function, rescore=False)
    assert root.keys("") == before


@pytest.mark.slow
@pytest.mark.parametrize("point", [Point.STARTED, Point.MID_PART, Point.PARTS_DONE, Point.COMMITTED])
def test_a_killed_rescore_ends_in_the_same_digest(root: Root, tmp_path: Path, function: str, point: Point):
    """Facts, and batches trained on them, have the same digests: they do not name the process that scored."""
    shutil.copytree(root.folder, tmp_path / "twin")
    twin = open_root(str(tmp_path / "twin"))
    retrain(root, "re", function)
    with pytest.raises(Killed):
        retrain(twin, "re", function, killing(Stage.RESCORE, 0, point))
    retrain(twin, "re", function)
    for place in ((0, Stage.SELECT), (0, Stage.RESCORE), (1, Stage.TRAIN), (2, Stage.TRAIN)):
        assert need(twin, "re", *place).digest == need(root, "re", *place).digest
    assert list(need(twin, "re", 0, Stage.RESCORE).facts["reward_source"]) == ["my.py:score"]


@pytest.mark.slow
def test_a_batch_is_the_same_after_a_kill(root: Root, tmp_path: Path):
    """The result of a function may depend on all arguments of its call."""
    (tmp_path / "whole.py").write_text("def score(records, responses):\n    return [len(responses)] * len(responses)\n")
    function = f"{tmp_path}/whole.py:score"
    with pytest.raises(Killed):
        retrain(root, "re", function, killing(Stage.RESCORE, 0, Point.MID_PART, 1), settings=("reward.batch=true",))
    retrain(root, "re", function, settings=("reward.batch=true",))
    assert rewards(root, "re") == [8.0] * 8


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that a scoring process can import; its name does not change with its content."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "scoring_package.py"


def version(package: Path, number: int) -> None:
    """Give each version another size: Python's cache cannot tell apart two of one size within a second."""
    package.write_text(f"def score(record, response):\n    return {number}.0\n{'#' * number}")


@pytest.mark.slow
@pytest.mark.parametrize("imported", [False, True], ids=["package", "imported by a file"])
def test_two_versions_of_a_package_never_score_one_selection(root: Root, package: Path, monkeypatch, imported: bool):
    """Each attempt may score only what the previous one has left; even then, versions do not mix."""
    function = "scoring_package:score"
    if imported:
        (package.parent / "mine.py").write_text("from scoring_package import score\n")
        function = f"{package.parent}/mine.py:score"
    monkeypatch.setattr("tasks.stages.reward._TOGETHER", 1)  # a process for each share
    version(package, 1)
    for number in (1, 2):
        version(package, number)
        with pytest.raises(Killed):
            retrain(root, "re", function, killing(Stage.RESCORE, 0, Point.MID_PART, 1))
    retrain(root, "re", function)
    assert set(rewards(root, "re")) == {2.0}
    assert len(root.keys("re/manifests/000000/rescore.r0.pieces")) == 1 + 2


@pytest.mark.slow
def test_a_package_that_changes_between_two_shares_is_refused(root: Root, package: Path, monkeypatch):
    monkeypatch.setattr("tasks.stages.reward._TOGETHER", 1)
    version(package, 1)

    def change(_context: Any, point: Point, key: str) -> None:
        if point is Point.MID_PART and "/rescore/" in key:
            version(package, 2)

    with pytest.raises(StageFailed, match=r"scoring_package:score has changed while it scored.*start again"):
        retrain(root, "re", "scoring_package:score", change)
    retrain(root, "re", "scoring_package:score")
    assert set(rewards(root, "re")) == {2.0}


def test_a_relative_root_is_resolved_once(root: Root, tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch):
    for place in ("a", "b"):
        shutil.copytree(root.folder, tmp_path / place / "old")
    shutil.rmtree(tmp_path / "b" / "old" / RUN / "manifests" / "000001")
    given = {"start": "old//other@1", "select": [f"old//{RUN}", f"file://./old//{RUN}@1"], "rescore": False}
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(Killed):
        retrain(root, "re", function, killing(Stage.SELECT, 0, Point.STARTED), **given)
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(InputError, match=r"retrain\.select: the run was started with \['file://\S*/a/old//"):
        retrain(root, "re", function, **given)
    config = retrain_config(root, "re", {})
    assert config.retrain is not None
    assert config.retrain.start == f"file://{tmp_path}/a/old//other@1"
    driver(root, config, tmp_path / "re", run="re").drive()
    assert {one.root for one in read_sources(root, need(root, "re", 0, Stage.SELECT))} == {f"file://{tmp_path}/a/old"}


def imported(root: Root, **changes: Any) -> str:
    row = {"prompt_tokens": [3, 4], "response_tokens": [5], "logprobs": [-1.0], "reward": 1, **changes}
    file = root.folder.parent / "rows.jsonl"
    file.write_text(json.dumps({key: value for key, value in row.items() if value is not None}))
    import_samples(root, ImportOrder((str(file),), "theirs", {}, None, logprobs="logprobs" not in changes))
    return "theirs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "given", "settings", "words"),
    [
        ({}, {"where": "reward > 1000"}, (), "nothing is selected: 8 samples were examined"),
        ({}, {"where": "rewad > 1"}, (), "did you mean 'reward'"),
        ({}, {"where": "reward >"}, (), "filter 'reward >'"),
        ({}, {"since": "2190-01-01T00:00:00Z"}, (), "examined, and retrain.since = 2190-01-01 00:00:00.00:00 leaves"),
        ({}, {"limit": 1}, (), "were examined, and retrain.limit = 1 leaves none: change that"),
        ({}, {"select": [RUN, "nobody"]}, (), "no run 'nobody'"),
        ({}, {"select": [f"{RUN}@7-9"]}, (), "only those of iterations 1 to 1"),
        ({}, {"start": f"{RUN}@9"}, (), "no train state of iteration 9"),
        ({}, {"start": "nobody@1"}, (), "no run 'nobody'"),
        ({}, {"start": "/nowhere//nobody@1"}, (), "no run 'nobody' in file:///nowhere"),
        ({}, {}, ("train.max_length=7",), "train.max_length"),
        ({}, {"samples": 2}, ("train.policy.mini_batches=3",), "mini_batches = 3"),
        ({}, {}, ("reward.function=nothing.py:score",), "nothing.py"),
        ({"temperature": 1.0, "response_tokens": [99999]}, {}, (), "token id 99999"),
        ({"temperature": 0.0}, {}, (), "chosen greedily"),
        ({"temperature": 1.0, "top_p": 0.5}, {}, (), "top_p of the selected samples"),
        ({"temperature": 1.0, "logprobs": None}, {}, (), "without log-probabilities"),
        ({"temperature": 1.0}, {"rescore": True}, (), "cannot be scored again"),
        (
            {"temperature": 1.0, "reward": None},
            {},
            (),
            "rollouts without scores, which were left out: 1",
        ),
        ({"temperature": 0.5}, {"select": ["theirs", RUN]}, (), "at the temperatures 0.5, 1"),
    ],
)
def test_what_cannot_be_trained_on_leaves_nothing(root: Root, rows, given, settings, words):
    select = [imported(root, **rows)] if rows else [RUN]
    before = root.keys("")
    table = {"start": "other@1", "select": select, "samples": 4, **given}
    with pytest.raises(InputError, match=words):
        begin_retraining(root, "new", retrain_config(root, "new", table, None, settings))
    assert root.keys("") == before


def test_samples_without_the_routes_that_are_to_be_replayed_begin_no_run(root: Root):
    config = retrain_config(root, "new", {"start": "other@1", "select": [RUN]})
    experts = config.train.experts.model_copy(update={"replay": True})
    asked = config.model_copy(update={"train": config.train.model_copy(update={"experts": experts})})
    prepared = Prepared(need(root, "other", 0, Stage.PREPARE))
    examine(config, root, prepared, root, lambda _: None)
    with pytest.raises(InputError, match=r"train.experts.replay = true needs the routes of every sample, .* set it to"):
        examine(asked, root, prepared, root, lambda _: None)


def test_samples_that_a_reward_model_cannot_read_begin_no_run(root: Root):
    table = {"start": "other@1", "select": [RUN], "rescore": True}
    config = retrain_config(root, "new", table, None, ["reward.function=reward_model"])
    prepared = Prepared(need(root, "other", 0, Stage.PREPARE))
    for most, refused in ((64, False), (8, True)):
        judge = EnginesSection(judge=JudgeEngine(source="scores", max_model_len=most))
        with pytest.raises(InputError, match=r"reads 8 at most .* <= 8' to retrain") if refused else nullcontext():
            examine(config.model_copy(update={"engines": judge}), root, prepared, root, lambda _: None)


def test_routes_of_another_model_are_refused(root: Root):
    table = selected_share(root)
    model = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 300, "num_experts_per_tok": 2}
    for size, odd in ((12, False), (16, True), (6, True)):  # bytes of a token's routes; 3 layers, 2 experts, 2 bytes
        ranges = Ranges()
        ranges.add(with_routes(table, size))
        with pytest.raises(InputError, match=f"have {size} bytes, and those of the model 12") if odd else nullcontext():
            check_routes(model, ranges)
        check_routes(model, ranges, exactly=False)


def selected_share(root: Root) -> pa.Table:
    """A share of selected samples."""
    found: list[pa.Table] = []
    config = retrain_config(root, "new", {"start": "other@1", "select": [RUN]})
    examine(config, root, Prepared(need(root, "other", 0, Stage.PREPARE)), root, found.append)
    return found[0]


def with_routes(table: pa.Table, size: int) -> pa.Table:
    """The samples with routes of so many bytes for a token."""
    columns = zip(table["prompt_tokens"].to_pylist(), table["response_tokens"].to_pylist(), strict=True)
    routes = [bytes(size * (len(prompt) + len(response) - 1)) for prompt, response in columns]
    place = table.column_names.index("routes")
    return table.set_column(place, table.schema.field(place), pa.array(routes, pa.large_binary()))


def test_a_reward_that_scores_nothing_of_the_selection_begins_no_run(root: Root, tmp_path: Path):
    """The check calls it on the selected records."""
    (tmp_path / "wrong.py").write_text("def score(record, response):\n    return record['solution']\n")
    before = root.keys("")
    with pytest.raises(InputError, match=r"(?s)was called on \d records before the run.*KeyError: 'solution'"):
        retrain(root, "new", f"{tmp_path}/wrong.py:score")
    assert root.keys("") == before


@pytest.mark.slow
def test_a_selection_that_became_impossible_says_what_can_be_done(root: Root, function: str):
    with pytest.raises(Killed):
        retrain(root, "late", function, killing(Stage.SELECT, 0, Point.STARTED))
    manifest = need(root, RUN, 1, Stage.ROLLOUT)
    root.remove(manifest.key)
    said = r"(?s)has no such rollouts.*Nothing is trained yet: remove it with `ratchet rm late`, and begin it again"
    with pytest.raises(InputError, match=said):
        retrain(root, "late", function)
    assert execute(["rm", "late", "--yes", f"--root={root.url}"]) == 0
    retrain(root, "late", function, select=["other"])


def test_an_empty_selection_starts_nothing(root: Root, function: str, capfd: pytest.CaptureFixture[str]):
    """The command ends before Ray and Prefect are imported, and nothing binds the corrected one."""
    before = root.keys("")
    words = ["retrain", "new", "--from=other@1", f"--select={RUN}", "--where=reward > 1000", f"--root={root.url}"]
    assert execute(words) == 2
    assert "nothing is selected" in capfd.readouterr().err
    assert root.keys("") == before
    retrain(root, "new", function, rescore=False, where="reward >= 0")
