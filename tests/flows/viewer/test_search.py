"""Search finds what a retraining would select."""

import re
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from flows.cli.app import app
from flows.viewer.search import SHOWN, Columns, Query, search
from storage.backends.root import Root, open_root
from storage.filters import parse_condition
from storage.manifest import need
from storage.parts import PartWriter, read_table
from storage.schema import REWARD
from storage.selection import OFFERED, offered, offered_columns
from tasks.config.retrain import RetrainSection
from tasks.stages.names import Stage
from tasks.stages.selecting import Selecting, rollouts
from tests.small.config import ITERATIONS, PROMPTS, SAMPLES
from tests.small.driving import RUN

ALL = ITERATIONS * PROMPTS * SAMPLES
CONDITIONS = (
    "", "reward > 0", "reward is null", "status = 'ok' and finish_reason = 'length'", "oldest_version >= 1",
    "length(response_tokens) > 3 or newest_version = 0", "sample_id = 1", "revision = 0", "components.none > 0",
)  # fmt: skip


@pytest.mark.parametrize("where", CONDITIONS)
def test_it_finds_what_a_retraining_selects(root: Root, where: str):
    section = RetrainSection(start=f"{RUN}@0", select=(f"{RUN}@1-",), where=where)
    selecting = Selecting(section)
    for rollout in rollouts(root, section):
        list(selecting.add(rollout))
    answer = search(root, Query(RUN, where), Columns())
    assert (answer.found, answer.examined) == (selecting.rows, ALL)
    assert len(answer.rows) == min(selecting.rows, SHOWN)
    assert sum(found for _, found in answer.counts) == answer.found


def test_the_order_and_the_iterations_choose_what_comes_first(root: Root):
    rewards = [row["reward"] for row in search(root, Query(RUN, order="best"), Columns()).rows]
    assert rewards == sorted(rewards, reverse=True)
    worst = search(root, Query(RUN, first=2, last=2, order="worst"), Columns())
    assert [row["reward"] for row in worst.rows] == sorted(row["reward"] for row in worst.rows)
    assert {row["iteration"] for row in worst.rows} == {2}


@pytest.mark.parametrize("limit", [0, 3000, 1 << 20])
def test_columns_that_stay_in_memory_change_no_answer(root: Root, limit: int):
    columns = Columns(limit)
    for where in (*CONDITIONS, *CONDITIONS):
        assert search(root, Query(RUN, where), columns) == search(root, Query(RUN, where), Columns())
        assert sum(table.nbytes for table in columns._kept.values()) == columns._bytes <= limit


def test_the_command_is_one_that_the_command_line_reads(root: Root):
    query = Query(RUN, "status = 'ok' and reward > 0", 1, 2)
    words = shlex.split(query.command(root.url))
    command, given, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    assert command.__name__ == "retrain_command"
    selection, common = given.arguments["selection"], given.arguments["common"]
    assert (selection.where, selection.select, selection.start) == (query.where, (f"{RUN}@1-2",), RUN)
    assert common.root == root.url


@pytest.mark.parametrize("most", [1, 1 << 23])
@pytest.mark.parametrize("name", OFFERED.names)
def test_a_column_alone_is_that_of_the_whole_table(root: Root, name: str, most: int):
    rollout, reward = need(root, RUN, 1, Stage.ROLLOUT), need(root, RUN, 1, Stage.REWARD)
    every = list(offered(root, rollout, reward))
    whole, tables = pa.concat_tables(every)[name], list(offered_columns(root, rollout, reward, [name], most))
    found = pa.concat_tables(tables)[name]
    assert len(tables) == (len(every) if most == 1 else 1) < 4
    if pa.types.is_list(whole.type):  # of lists there are the lengths
        found, whole = pc.list_value_length(found), pc.list_value_length(whole)
    assert found.equals(whole)


def test_scores_in_another_order_are_joined_by_sample(root: Root, tmp_path: Path):
    assert root.folder is not None
    shutil.copytree(root.folder, tmp_path / "runs")
    store = open_root(str(tmp_path / "runs"))
    rollout, reward = need(store, RUN, 1, Stage.ROLLOUT), need(store, RUN, 1, Stage.REWARD)
    scores = read_table(store, reward, REWARD)
    turned = scores.take(list(range(scores.num_rows))[::-1])
    part = PartWriter(store, RUN, 1, Stage.REWARD).write_table("turned.arrow", turned, REWARD)
    other = reward.model_copy(update={"parts": (part,)})
    expected, found = (pa.concat_tables(offered_columns(store, rollout, one, ["reward"])) for one in (reward, other))
    assert len(set(found["reward"].to_pylist())) > 1
    assert found.equals(expected)


def test_a_condition_names_its_columns():
    found = parse_condition("reward > 0 and length(response_tokens) > right", OFFERED, keys="components")
    assert found.columns == {"reward", "response_tokens", "components"}
    assert re.fullmatch("right", *found.keys)
