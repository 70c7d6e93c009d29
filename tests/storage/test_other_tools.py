"""The examples of docs/storage.md: pandas, polars and DuckDB read a run, with the same result as our reader."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage.backends.root import Root, open_root
from storage.manifest import need
from storage.parts import row_views
from storage.upkeep.archive import compact
from tasks.stages.names import WORKFLOW, Stage
from tests.storage.runs import GROUPS, SAMPLES, make_run
from tests.storage.tables import read_stored_table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "storage.md"
COLUMNS = ("prompt_tokens", "response_tokens", "logprobs", "prompt_id", "sample_id", "seed", "turns")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Root:
    """A run with the name and place of the examples."""
    monkeypatch.chdir(tmp_path)
    store = open_root("runs")
    make_run(store, "demo", iterations=2)
    compact(store, WORKFLOW, "demo")
    return store


@pytest.fixture
def rollout(root) -> pa.Table:
    """The table of the examples, read by our own reader."""
    manifest = need(root, "demo", 1, Stage.ROLLOUT)
    assert len(manifest.parts) > 1
    return read_stored_table(root, manifest)


def carried_out(tool: str) -> dict[str, Any]:
    """The variables after the example of a tool: the Python block behind the line that begins with its name."""
    names: dict[str, Any] = {}
    for heading in ("The parts are plain files.", tool):
        found = re.search(rf"^{heading}.*?\n```python\n(.*?)```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
        assert found, f"docs/storage.md has no example behind {heading!r}"
        exec(compile(found.group(1), str(DOCUMENT), "exec"), names)
    return names


def mean_lengths(table: pa.Table) -> dict[str, float]:
    lengths = np.array([len(view) for view in row_views(table["response_tokens"])])
    names = np.array(table["prompt_id"].to_pylist())
    return {str(name): float(lengths[names == name].mean()) for name in np.unique(names)}


def test_every_example_is_run_here():
    assert re.findall(r"^(\w+)[^\n]*:\n+```python", DOCUMENT.read_text(), re.MULTILINE) == [
        "The", "pandas", "polars", "DuckDB", "DuckDB",
    ]  # fmt: skip


def test_pandas_reads_the_parts(rollout, capsys):
    names = carried_out("pandas:")
    assert len(names["samples"]) == GROUPS * SAMPLES
    for column in COLUMNS:
        theirs, ours = names["samples"][column].tolist(), rollout[column].to_pylist()
        assert [list(one) if isinstance(one, np.ndarray) else one for one in theirs] == ours
    assert names["lengths"].to_dict() == pytest.approx(mean_lengths(rollout))
    assert "p3" in capsys.readouterr().out


def test_polars_reads_the_parts(rollout):
    names = carried_out("polars:")
    assert {column: names["samples"][column].to_list() for column in COLUMNS} == {
        column: rollout[column].to_pylist() for column in COLUMNS
    }
    mean = np.mean([view.mean() for view in row_views(rollout["logprobs"])])
    ((reason, count, logprob),) = names["reasons"].rows()
    assert (reason, count) == ("stop", GROUPS * SAMPLES)
    assert logprob == pytest.approx(mean, rel=1e-6)


def test_duckdb_reads_samples_joined_with_their_rewards(root, rollout):
    rows = carried_out("DuckDB, on samples joined with their rewards")["lengths"].fetchall()
    first = {prompt: length for iteration, prompt, length, _ in rows if iteration == 1}
    assert first == pytest.approx(mean_lengths(rollout))
    rewards = read_stored_table(root, need(root, "demo", 1, Stage.REWARD))
    for prompt in first:
        own = [row["reward"] for row in rewards.to_pylist() if row["prompt_id"] == prompt and row["reward"] is not None]
        (mean,) = (reward for iteration, name, _, reward in rows if (iteration, name) == (1, prompt))
        assert mean == (pytest.approx(np.mean(own)) if own else None)
    assert {iteration for iteration, *_ in rows} == {1, 2}


def test_duckdb_reads_the_archive(root):
    rewards = carried_out("DuckDB, on the archive")["rewards"].fetchall()
    for iteration, mean, count in rewards:
        ours = read_stored_table(root, need(root, "demo", iteration, Stage.REWARD), ["reward"])["reward"].drop_null()
        assert (mean, count) == (pytest.approx(np.mean(ours.to_numpy())), GROUPS * SAMPLES)
    assert [iteration for iteration, _, _ in rewards] == [1, 2]
