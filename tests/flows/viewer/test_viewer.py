"""The viewer over stored runs of small workers: what its pages show, and what it refuses."""

import json
import math
import re
import shutil
import statistics
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from flows.cli.app import execute
from flows.viewer.charts import number
from flows.viewer.pages import application
from flows.viewer.server import HEADERS, Guard, listening
from flows.views.samples import Choice, read_chosen
from flows.views.status import read_status
from storage.backends.root import Root, open_root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import commit, need
from storage.parts import PartWriter
from storage.schema import REWARD, ROLLOUT
from tasks.config.stored import record_config
from tasks.stages.names import Stage
from tests.small.config import PROMPTS, SAMPLES, small_config
from tests.small.driving import RUN, Killed, driver, killing
from tests.storage.tables import manifest, read_stored_table, rollout_table, scored_table

PORT, TOKEN = 4321, "right-token"
HERE = f"http://127.0.0.1:{PORT}"
MARKUP = "</pre><script>alert(1)</script>"


@pytest.fixture
def browser(root: Root) -> Iterator[TestClient]:
    """A browser that has opened the printed address."""
    with TestClient(Guard(application(root), PORT, TOKEN), HERE, raise_server_exceptions=True) as browser:
        assert browser.get(f"/?token={TOKEN}").status_code == 200
        yield browser


def sample_of(root: Root, iteration: int = 1) -> tuple[str, int]:
    """The sample with the most tokens."""
    return max(rows_of(root, iteration), key=lambda key: len(rows_of(root, iteration)[key]["response_tokens"]))


def rows_of(root: Root, iteration: int) -> dict[tuple[str, int], dict]:
    table = read_stored_table(root, need(root, RUN, iteration, Stage.ROLLOUT))
    return {(row["prompt_id"], row["sample_id"]): row for row in table.to_pylist()}


def paths(root: Root) -> list[str]:
    prompt, sample = sample_of(root)
    which = f"prompt={quote(prompt, safe='')}"
    return [
        "/", f"/run/{RUN}", f"/run/{RUN}?metric=train/loss", f"/compare?run={RUN}&run=two", f"/run/{RUN}/0",
        f"/run/{RUN}/1", f"/run/{RUN}/1/group?{which}", f"/run/{RUN}/1/sample?{which}&sample={sample}",
        f"/run/{RUN}/1/sample?{which}&sample={sample}&color=version",
        f"/run/{RUN}/1/sample?{which}&sample={sample}&color=advantage",
        f"/run/{RUN}/1/lineage?{which}&sample={sample}", f"/run/{RUN}/search", f"/run/{RUN}/curve",
        f"/run/{RUN}/search?where=reward+%3E+0&order=best", f"/run/{RUN}/search?where=nonsense",
    ]  # fmt: skip


def test_every_page_answers_and_none_writes(root: Root, browser: TestClient):
    assert root.folder is not None
    before = {path: path.stat().st_mtime_ns for path in sorted(root.folder.rglob("*"))}
    for path in paths(root):
        answer = browser.get(path)
        assert answer.status_code == 200, (path, answer.text)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert {path: path.stat().st_mtime_ns for path in sorted(root.folder.rglob("*"))} == before


def test_only_this_machine_s_browser_with_the_token_is_let_in(root: Root):
    strange = TestClient(Guard(application(root), PORT, TOKEN), HERE)
    for path in ("/", f"/run/{RUN}", "/static/viewer.js", "/?token=guessed", "/?token=", f"/?token={TOKEN}x"):
        answer = strange.get(path)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False), path
        assert "ratchet view" in answer.text
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert strange.post(f"/?token={TOKEN}").status_code == 403
    entered = strange.get(f"/run/{RUN}?token={TOKEN}&metric=train/loss", follow_redirects=False)
    assert (entered.status_code, entered.headers["location"]) == (303, f"{HERE}/run/{RUN}?metric=train%2Floss")
    assert {"httponly", "samesite=strict"} <= set(entered.headers["set-cookie"].lower().split("; "))
    assert strange.get("/").status_code == 200
    assert strange.get("/?token=guessed").status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": f"evil.example:{PORT}"}, 421),
        ({"host": "127.0.0.1:80"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": f"http://localhost:{PORT}"}, 403),
        ({"origin": HERE}, 200),
        ({"host": f"localhost:{PORT}"}, 200),
    ],
)
def test_foreign_hosts_and_origins_are_refused(browser: TestClient, headers: dict[str, str], status: int):
    cookie = f"ratchet-view-{PORT}={TOKEN}"
    assert browser.get("/", headers={"cookie": cookie, **headers}).status_code == status


def test_the_viewer_takes_no_orders(browser: TestClient):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert browser.request(method, f"/run/{RUN}").status_code == 405
    assert browser.head(f"/run/{RUN}").status_code == 200


def changed(table: pa.Table, schema: pa.Schema, **columns: list) -> pa.Table:
    """The table with other columns."""
    given = {name: pa.array(values, schema.field(name).type) for name, values in columns.items()}
    return pa.table([given.get(name, table[name]) for name in schema.names], schema=schema)


def test_no_markup_of_a_run_becomes_markup_of_a_page(tmp_path: Path):
    store = open_root(str(tmp_path / "runs"))
    digest = record_config(store, RUN, small_config())
    samples = rollout_table(groups=1, samples=2)
    words = {"role": MARKUP, "calls": json.dumps(MARKUP), "results": json.dumps([MARKUP])}
    turns = [[{**turn, **words} for turn in row] for row in samples["turns"].to_pylist()]
    scores = scored_table(samples, [1.0, 0.0])
    stored = {
        Stage.ROLLOUT: changed(samples, ROLLOUT, turns=turns, prompt_id=[MARKUP] * 2),
        Stage.REWARD: changed(
            scores, REWARD, prompt_id=[MARKUP] * 2, detail=[MARKUP] * 2, components=[[(MARKUP, 1.0)]] * 2
        ),
    }
    made = {}
    for stage, table in stored.items():
        part = PartWriter(store, RUN, 1, stage).write_table("table.arrow", table, table.schema)
        one = manifest(stage, parts=(part,), run=RUN, config_digest=digest, inputs=dict(made))
        made["rollout"] = commit(store, one).digest
    browser, which = TestClient(application(store), HERE), f"prompt={quote(MARKUP, safe='')}"
    pages = [f"/run/small/1{place}" for place in ("", f"/group?{which}", f"/sample?{which}&sample=0",
             f"/lineage?{which}&sample=0")] + ["/run/small/search"]  # fmt: skip
    for path in pages:
        answer = browser.get(path)
        assert answer.status_code == 200, (path, answer.text)
        assert "<script>alert" not in answer.text
        assert "&lt;script&gt;alert" in answer.text, path
    for path in (f"/run/{quote(MARKUP, safe='')}", f"/run/small/1/group?prompt=no{quote(MARKUP)}",
                 f"/run/small/search?where={quote(MARKUP)}", f"/compare?run={quote(MARKUP)}"):  # fmt: skip
        assert "<script>alert" not in browser.get(path).text


def test_a_sample_s_tokens_have_their_stored_values(root: Root, browser: TestClient):
    prompt, sample = sample_of(root)
    stored = rows_of(root, 1)[prompt, sample]
    group = read_chosen(root, RUN, 1, Choice(prompt=prompt)).samples
    shown = next(one for one in group if one.sample_id == sample)
    page = browser.get(f"/run/{RUN}/1/sample?prompt={quote(prompt, safe='')}&sample={sample}").text
    words = [unescape(one) for one in re.findall(r'<span class="token surprise-\d" title="([^"]+)"', page)]
    found = [
        re.search(
            r"id (\d+), log-probability (\S+) of the engine .*, (\S+) of the trainer, ratio (\S+), weights (\d+), "
            r"advantage (\S+)",
            one,
        )
        for one in words
    ]
    expected = zip(stored["response_tokens"], stored["logprobs"], stored["weight_version"], strict=True)
    assert [one.groups() for one in found if one] == [
        (
            str(token),
            f"{logprob:.4f}",
            f"{logprob + 0.25:.4f}",
            f"{math.exp(0.25):.4f}",
            str(version),
            f"{shown.advantage:+.4f}",
        )
        for token, logprob, version in expected
    ]
    assert shown.response is not None
    body = page.partition("data-tokens>")[2].partition("</pre>")[0]
    text = "".join(unescape(one) for one in re.findall(r">([^<]*)</span>", body))
    assert text.startswith(shown.response)
    assert page.count("<tr>") == 1 + len(stored["response_tokens"])


@pytest.mark.parametrize(("color", "shades"), [("ratio", {"surprise-5"}), ("trainer", None)])
def test_tokens_are_colored_by_the_trainer(root: Root, browser: TestClient, color: str, shades: set[str] | None):
    """The trainer of this run is a quarter of a nat from its engine."""
    prompt, sample = sample_of(root)
    stored = rows_of(root, 1)[prompt, sample]
    page = browser.get(f"/run/{RUN}/1/sample?prompt={quote(prompt, safe='')}&sample={sample}&color={color}").text
    found = re.findall(r'<span class="token (surprise-\d)" title=', page)
    assert len(found) == len(stored["response_tokens"])
    edges = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
    expected = [f"surprise-{sum(edge < -value - 0.25 for edge in edges)}" for value in stored["logprobs"]]
    assert set(found) == shades if shades else found == expected


def test_a_page_says_why_there_is_nothing_of_the_trainer(tmp_path: Path):
    (tmp_path / "half.py").write_text("def score(record, response, sample):\n    return 1 / (1 - sample.sample_id)\n")
    settings = [f"reward.function={tmp_path / 'half.py'}:score", "reward.max_failures=0.5", "run.iterations=4"]
    store = open_root(str(tmp_path / "runs"))
    driver(store, small_config([*settings, "storage.save_every=2", "storage.keep_newest=1"]), tmp_path).drive()
    browser = TestClient(application(store), HERE)
    reasons = {
        (1, 0): "the state of the iteration was not stored (storage.save_every)",
        (2, 0): "The ratio is the probability by the trainer",  # retention has deleted the state alone
        (4, 1): "the sample was not trained on",
        (4, 0): "The ratio is the probability by the trainer",
    }
    for (iteration, sample), words in reasons.items():
        prompt = next(name for name, number in rows_of(store, iteration) if number == sample)
        page = browser.get(f"/run/{RUN}/{iteration}/sample?prompt={quote(prompt, safe='')}&sample={sample}&color=ratio")
        assert words in page.text


def test_pages_of_curves_groups_and_comparisons_have_the_values(root: Root, browser: TestClient):
    history = read_status(root, RUN).history
    page = browser.get(f"/run/{RUN}").text
    for record in history[1:]:
        assert f"<td>{number(record.reward)}</td>" in page
        assert f'<a href="/run/{RUN}/{record.iteration}"' in page
    compared = browser.get(f"/compare?run={RUN}&run=two").text
    assert re.search(r"train.optimizer.learning_rate</th>\s*<td>0.001</td>\s*<td>0.01</td>", compared)
    rewards = read_chosen(root, RUN, 1, Choice(random=PROMPTS * SAMPLES)).samples
    lowest = min(
        (one.prompt_id for one in rewards),
        key=lambda name: statistics.mean(one.reward for one in rewards if one.prompt_id == name),
    )
    group = re.findall(r"group\?prompt=[^>]*>([^<]+)</a></th><td>(\d+)", browser.get(f"/run/{RUN}/1").text)
    assert len(group) == PROMPTS
    assert {int(count) for _, count in group} == {SAMPLES}
    assert statistics.mean(one.reward for one in rewards if one.prompt_id == group[0][0]) == pytest.approx(
        statistics.mean(one.reward for one in rewards if one.prompt_id == lowest)
    )


def test_lineage_leads_both_ways(root: Root, browser: TestClient):
    prompt, sample = sample_of(root, 2)
    page = browser.get(f"/run/{RUN}/2/lineage?prompt={quote(prompt, safe='')}&sample={sample}").text
    assert need(root, RUN, 1, Stage.WEIGHT_SYNC).digest in page
    assert need(root, RUN, 2, Stage.TRAIN).digest in page


@pytest.mark.parametrize(
    ("path", "status", "fact"),
    [
        ("/run/nobody", 404, "no run 'nobody'"),
        (f"/run/{RUN}/9", 404, "no iteration 9: it has iterations 0 to 2"),
        (f"/run/{RUN}/1/sample", 404, "it needs prompt=ID and sample=NUMBER"),
        (f"/run/{RUN}/1/sample?prompt=p&sample=x", 404, "sample='x' is not a number"),
        (f"/run/{RUN}/1/sample?prompt=p&sample=0&color=red", 404, "color='red' is none of logprob"),
        (f"/run/{RUN}/1/sample?prompt=p&sample=0", 404, "has not sampled this prompt"),
        (f"/run/{RUN}/1/group?prompt=p", 404, "prompt 'p' has no samples in this iteration"),
        (f"/run/{RUN}/search?order=none", 404, "order='none' is none of stored"),
        (f"/run/{RUN}/search?first=3&last=1", 404, "last='1' is not a number of at least 3"),
        (f"/run/{RUN}/search?where=reword+%3E+1", 200, "did you mean 'reward'?"),
        (f"/run/{RUN}/search?first=7", 200, "the run has no such rollouts"),
        ("/compare", 404, "0 runs are chosen"),
        ("/static/%2e%2e/pages.py", 404, "no such page"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_reason(browser: TestClient, path: str, status: int, fact: str):
    answer = browser.get(path)
    assert (answer.status_code, fact in unescape(answer.text)) == (status, True), answer.text


def test_damage_and_other_versions_are_named_and_leave_other_runs(root: Root, tmp_path: Path):
    assert root.folder is not None
    shutil.copytree(root.folder, tmp_path / "runs")
    store = open_root(str(tmp_path / "runs"))
    part = tmp_path / "runs" / need(root, RUN, 1, Stage.ROLLOUT).parts[0].key
    part.chmod(0o644)
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    record = tmp_path / "runs" / need(root, RUN, 2, Stage.TRAIN).key
    record.chmod(0o644)
    record.write_bytes(record.read_bytes().replace(b'"format_version": 1,', b'"format_version": 9,'))
    browser = TestClient(application(store), HERE)
    assert (answer := browser.get(f"/run/{RUN}/1")).status_code == 500
    assert "is damaged: xxh3-128" in answer.text
    assert browser.get(f"/run/{RUN}/search").status_code == 500
    assert (answer := browser.get(f"/run/{RUN}/2")).status_code == 500
    assert re.search(r"main.*" + re.escape(record.name), answer.text, re.DOTALL)
    listing = browser.get("/")
    assert (listing.status_code, listing.text.count('class="trouble"')) == (200, 1)
    assert browser.get("/run/two").status_code == 200


def test_a_page_is_sent_again_when_its_run_goes_on(tmp_path: Path):
    store, scratch = open_root(str(tmp_path / "runs")), tmp_path / "scratch"
    with pytest.raises(Killed):
        driver(store, small_config(), scratch, at=killing(Stage.REWARD, 1, Point.STARTED)).drive()
    browser, path = TestClient(application(store), HERE), f"/run/{RUN}/1"
    first = browser.get(path)
    assert "<h3>Rewards</h3>" not in first.text
    same = {"If-None-Match": first.headers["etag"]}
    assert browser.get(path, headers=same).status_code == 304
    driver(store, small_config(), scratch).drive()
    later = browser.get(path, headers=same)
    assert (later.status_code, "<h3>Rewards</h3>" in later.text) == (200, True)


def test_a_root_that_is_none_is_refused_and_an_empty_one_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert execute(["view", "--root", str(tmp_path / "nowhere")]) == 2
    assert "there is no storage root at" in capfd.readouterr().err
    (tmp_path / "file").write_text("")
    assert execute(["view", "--root", str(tmp_path / "file")]) == 2
    assert "There is no run in this root yet" in TestClient(application(open_root(str(tmp_path))), HERE).get("/").text
    with listening(0) as taken, pytest.raises(InputError, match="cannot be used"):
        listening(taken.getsockname()[1])
