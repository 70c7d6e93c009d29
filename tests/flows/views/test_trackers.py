"""Trackers of a user: they get each row once, are refused with file and line, and never end a run."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from flows.views.reports import Reports
from flows.views.trackers import check_trackers
from storage.backends.root import Root
from storage.errors import InputError
from storage.kill_points import Point
from storage.manifest import need
from tasks.config.report import ReportSection
from tasks.config.run import RunConfig
from tasks.stages.names import Stage
from tests.small.config import ITERATIONS, small_config
from tests.small.driving import RUN, Killed, driver, killing

EXAMPLE = Path(__file__).resolve().parents[3] / "infra" / "examples" / "tracker.py"

WHOLE = """
from pathlib import Path
GIVEN = Path(__file__).with_name("given")


class Kept:
    def begin(self, run):
        return {first}

    def log(self, row):
        {log}

    def end(self, complete):
        pass
"""


def drive(root: Root, scratch: Path, config: RunConfig, said: list[str], at: Any = None) -> None:
    with Reports(root, RUN, config, said.append) as made:
        driver(root, config, scratch, listener=made.add, at=at).drive()


def tracked(file: Path, name: str) -> RunConfig:
    return small_config([f'report.trackers=["{file}:{name}"]'])


@pytest.mark.slow
def test_the_example_has_each_row_once_whatever_was_killed(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    config, said = tracked(EXAMPLE, "JsonLines"), list[str]()
    with pytest.raises(Killed):
        drive(root, tmp_path / "first", config, said, killing(Stage.REWARD, 2, Point.STARTED))
    (file,) = (tmp_path / "ratchet-metrics").glob("*.jsonl")
    file.write_text(file.read_text() + '{"iteration": 9')  # torn
    drive(root, tmp_path / "second", config, said)
    assert said == []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS + 1))
    assert lines[1]["reward/reward_mean"] == need(root, RUN, 1, Stage.REWARD).metrics["reward_mean"]
    assert file.with_suffix(".complete").exists()


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("import json\nraise KeyError('token')\n", r"cannot be imported: KeyError: 'token' \(mine.py, line 2\)"),
        ("class Kept:\n    def begin(self run): ...\n", r"cannot be imported: SyntaxError: .*\(mine.py, line 2\)"),
        ("import sys\nsys.exit('no')\n", r"cannot be imported: SystemExit: no \(mine.py, line 2\)"),
        ("Other = 1\n", "cannot be imported: AttributeError: mine.py has no 'Kept'"),
        ("Kept = 1\n", "cannot be called without arguments: name a class of a tracker"),
        ("class Kept:\n    def __init__(self, url): ...\n", "cannot be called without arguments"),
        (WHOLE.replace("def log", "def note"), r"a tracker needs a method log\(self, x\), which is given a row"),
        (
            WHOLE.replace("(self, complete)", "(self)"),
            r"line 13, has `def end\(self\)`: a tracker needs a method end\(self, x\)",
        ),
        (WHOLE.replace("def begin", "async def begin"), r"has `async def begin\(self, run\)`: a tracker needs"),
    ],
)
def test_what_cannot_be_a_tracker_is_refused_before_the_run(text: str, fact: str, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(text.replace("{first}", "0").replace("{log}", "pass"))
    with pytest.raises(InputError, match=fact) as refused:
        check_trackers(ReportSection(trackers=(f"{file}:Kept",)))
    assert "report.trackers" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("nowhere.py:Kept", "nowhere.py cannot be read"),
        ("no-such-tracker", "report.trackers 'no-such-tracker' is unknown"),
    ],
)
def test_a_tracker_that_is_not_there_is_refused(name: str, fact: str):
    with pytest.raises(InputError, match=fact):
        check_trackers(small_config([f'report.trackers=["{name}"]']).report)


@pytest.mark.parametrize(
    ("first", "log", "fact"),
    [
        ("0", "raise ValueError(f'no {row.iteration}')", "ValueError: no 0 (mine.py, line 11)"),
        ("0", "import sys; sys.exit(3)", "SystemExit: 3 (mine.py, line 11)"),
        ("None", "pass", "TypeError: begin must return the number of the first iteration"),
        pytest.param(
            "-1", "pass", "TypeError: begin must return the number of the first iteration", marks=pytest.mark.slow
        ),
    ],
)
def test_a_tracker_that_fails_is_said_once_and_ends_nothing(root, tmp_path, first, log, fact):
    file, said = tmp_path / "mine.py", list[str]()
    file.write_text(WHOLE.format(first=first, log=log))
    drive(root, tmp_path / "scratch", tracked(file, "Kept"), said)
    (line,) = said
    assert line.startswith(f"mine.py:Kept: {fact}")
    assert need(root, RUN, ITERATIONS, Stage.WEIGHT_SYNC)


def test_a_row_that_failed_is_sent_again_before_the_next(root: Root, tmp_path: Path):
    file, said = tmp_path / "mine.py", list[str]()
    fails_once = (
        "GIVEN.open('a').write(f'{row.iteration} '); row.iteration == 1 and GIVEN.read_text().count('1') == 1 and 1 / 0"
    )
    file.write_text(WHOLE.format(first=0, log=fails_once))
    drive(root, tmp_path / "scratch", tracked(file, "Kept"), said)
    assert said[0].startswith("mine.py:Kept: ZeroDivisionError")
    assert file.with_name("given").read_text().split() == ["0", "1", "1", "2"]


@pytest.mark.slow
def test_a_tracker_that_continues_names_curves_as_the_process_before(root: Root, tmp_path: Path):
    """The function changes in iteration 2: its curves have a suffix, also in a process that sends only these."""
    file, reward, said = tmp_path / "mine.py", tmp_path / "my_reward.py", list[str]()
    named = "GIVEN.open('a').write(''.join(f'{n}\\n' for n in row.values if 'reward_mean' in n and 'reward/' in n))"
    config = small_config([f'report.trackers=["{file}:Kept"]', f"reward.function={reward}:score"])
    for first, value in (("0", 1), ("2", 2)):
        reward.write_text(f"def score(record, response):\n    return {value} + len(response)\n")
        file.write_text(WHOLE.format(first=first, log=named))
        at = killing(Stage.REWARD, 2, Point.STARTED) if first == "0" else None
        with contextlib.suppress(Killed):
            drive(root, tmp_path / first, config, said, at)
    assert said == []
    one, two = file.with_name("given").read_text().splitlines()
    assert one == "reward/reward_mean"
    assert two.startswith("reward/reward_mean my_reward.py_score-")
