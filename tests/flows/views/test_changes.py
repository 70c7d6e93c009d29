"""Values of different reward functions are never compared, nor joined in a curve."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from flows.views.curves import changes_of_reward, draw_curves, pieces
from flows.views.history import IterationRecord, record_of
from flows.views.progress import closing_lines, iteration_line
from flows.views.status import Change, apart_lines, changes_of, read_status
from flows.views.table import Series, decode, encode
from storage import layout
from storage.backends.root import Root, open_root
from storage.manifest import Manifest
from tasks.stages.names import Stage
from tests.flows.runs import MakeRun, make_manifest
from tests.flows.views.events import encoded, parsed

ASKED = {"prompts": 8, "max_tokens": 4}


def evaluated(iteration: int, by: str, reward: float, rate: float | None = None, **facts: Any) -> IterationRecord:
    return record_of([_evaluation(iteration, by, reward, rate, **facts)], None)


def _evaluation(iteration: int, by: str, reward: float, rate: float | None = None, **facts: Any) -> Manifest:
    made = {"scored_by": by, "asked": ASKED, **({} if rate is None else {"pass": "right >= 1"}), **facts}
    metrics = {"reward_mean": reward, "seconds": 1.0, **({} if rate is None else {"pass_rate": rate})}
    return make_manifest("a", iteration, Stage.EVALUATE).model_copy(update={"facts": made, "metrics": metrics})


def rows_of(records: Sequence[IterationRecord]) -> Any:
    return [one.row for one in records]


def test_the_mean_reward_and_the_pass_rate_are_two_numbers():
    records = [evaluated(0, "one", 0.29, 0.05), evaluated(1, "one", 1.023, 0.07)]
    found = changes_of(records)
    assert found.held_out_reward == Change(first=0.29, last=1.023, since=0)
    assert found.pass_rate == Change(first=0.05, last=0.07, since=0)
    assert "held-out reward 1.023 | held-out pass rate 0.070" in iteration_line(records[1], 2)


def test_where_the_reward_is_0_or_1_its_mean_is_the_pass_rate_and_said_once():
    line = iteration_line(evaluated(1, "one", 0.5, 0.5, **{"pass": "reward == 1"}), 2)
    assert "| held-out pass rate 0.500 |" in line
    assert "held-out reward" not in line


@pytest.mark.parametrize("other", [{"by": "two"}, {"asked": {"prompts": 9, "max_tokens": 4}}])
def test_a_change_begins_with_the_function_that_gave_the_last_value(other: dict[str, Any]):
    changed = {"by": "one", **other}
    records = [evaluated(0, "one", 0.2, 0.1), evaluated(1, reward=0.9, rate=0.2, **changed)]
    records.append(evaluated(2, reward=0.95, rate=0.3, **changed))
    found = changes_of(records)
    assert found.held_out_reward == Change(first=0.9, last=0.95, since=1, apart=True)
    assert found.pass_rate == Change(first=0.2, last=0.3, since=1, apart=True)
    (said,) = apart_lines(found)
    assert "values before iteration 1 are of another reward function" in said


def test_another_condition_ends_the_pass_rate_and_not_the_mean_reward():
    records = [evaluated(0, "one", 0.2, 0.1), evaluated(1, "one", 0.9, 0.2, **{"pass": "reward >= 1"})]
    found = changes_of(records)
    assert found.held_out_reward == Change(first=0.2, last=0.9, since=0)
    assert found.pass_rate == Change(first=0.2, last=0.2, since=1, apart=True)


@pytest.mark.parametrize("rates", [(0.5, None, 0.5), (None, 0.5), (0.5, None)])
def test_a_reward_that_was_0_or_1_by_chance_has_no_pass_rate(rates: tuple[float | None, ...]):
    exact = {"pass": "reward == 1"}
    records = [evaluated(at, "one", 0.5, rate, **(exact if rate else {})) for at, rate in enumerate(rates)]
    assert changes_of(records).pass_rate == Change()


def test_the_csv_says_by_which_function_and_a_reader_gets_it_back():
    rows = rows_of([evaluated(0, "one", 0.2, 0.1), evaluated(1, "two", 0.9)])
    assert decode(encode(rows)) == rows
    assert encode(rows).splitlines()[0] == (
        b"iteration,finished,evaluated_by,pass,seconds,evaluate/pass_rate,evaluate/reward_mean,evaluate/seconds"
    )
    assert b",two prompts 8 max_tokens 4,," in encode(rows).splitlines()[2]


def test_a_curve_is_not_joined_over_another_function_and_has_a_mark():
    rows = rows_of([evaluated(at, "one" if at < 2 else "two", at / 10, at / 20) for at in range(4)])
    assert pieces(rows, "evaluate/reward_mean", "evaluated_by") == [[(0, 0.0), (1, 0.1)], [(2, 0.2), (3, 0.3)]]
    assert changes_of_reward(rows) == [(2, "another evaluation")]
    assert draw_curves(rows, "run") != draw_curves([row.model_copy(update={"texts": {}}) for row in rows], "run")


def test_a_panel_without_a_curve_is_left_out():
    """The plot has one panel of full height when nothing of the training was measured."""
    alone = draw_curves(rows_of([evaluated(0, "one", 0.2)]), "run")
    trained = record_of([make_manifest("a", 1, stage) for stage in (Stage.REWARD, Stage.TRAIN)], None)
    assert alone != draw_curves(rows_of([evaluated(0, "one", 0.2), trained]), "run")


@pytest.mark.slow
@pytest.mark.parametrize("changed", [1, 7, 13, 29, 30])
def test_a_long_run_begins_its_comparison_where_all_of_it_does(make_run: MakeRun, root: Root, changed: int):

    def more(one: Manifest) -> dict[str, Any]:
        facts = {"scored_by": "one" if one.iteration < changed else "two", "asked": ASKED, "pass": "right >= 1"}
        return {"facts": facts, "metrics": {**one.metrics, "pass_rate": one.iteration / 1000}}

    make_run("a", 30, more=more)
    short, whole = read_status(root, "a"), read_status(root, "a", whole=True)
    assert len(short.history) < len(whole.history)
    assert short.changes == whole.changes
    assert short.changes.pass_rate == Change(first=changed / 1000, last=0.03, since=changed, apart=True)
    assert (short.changes.reward.since, short.changes.reward.apart) == (changed, changed > 1)
    assert f"0.030 since iteration {changed}  (right >= 1)" in "\n".join(closing_lines(short))


def test_each_function_has_curves_of_its_own_in_tensorboard(tmp_path: Any):
    """The event file has no name with values of two functions; a name that no function decides stays the same."""
    sources = {"one": {"reward_source": {"my reward.py:score": "1"}}, "two": {"reward_source": {"math_verify": "2"}}}
    by = ["one", "one", "two", "two", "one"]
    rows = rows_of([evaluated(at, name, at / 10, at / 20, **sources[name]) for at, name in enumerate(by)])
    root, tags = open_root(str(tmp_path)), dict[str, list[int]]()
    root.replace(layout.report_key("a", layout.EVENTS), encoded(rows))
    for event in parsed(root.read_bytes(layout.report_key("a", layout.EVENTS)))[1:]:
        for one in event.summary.value:
            tags.setdefault(one.tag, []).append(event.step)
    (suffix,) = {tag.partition("reward_mean ")[2] for tag in tags if "reward_mean " in tag}
    assert re.fullmatch(r"math_verify-[0-9a-f]{6}", suffix)
    assert tags["evaluate/reward_mean"] == tags["evaluate/pass_rate"] == [0, 1, 4]
    assert tags[f"evaluate/reward_mean {suffix}"] == [2, 3]
    assert tags["seconds"] == tags["evaluate/seconds"] == [0, 1, 2, 3, 4]


def test_other_limits_and_another_condition_are_other_curves():
    series = Series()
    limits, condition = {"asked": {"prompts": 9, "max_tokens": 4}}, {"pass": "right >= 2"}
    names = [
        {name for name in series.named(one) if name.startswith("evaluate/") and "seconds" not in name}
        for one in rows_of([evaluated(at, "one", 0.1, 0.1, **more) for at, more in enumerate(({}, limits, condition))])
    ]
    assert names[0] == {"evaluate/reward_mean", "evaluate/pass_rate"}
    assert not names[1] & names[0]
    assert names[2] & names[0] == {"evaluate/reward_mean"}
    assert len(names[1] | names[2]) == 4
