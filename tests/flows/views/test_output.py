"""Standard output holds only the JSON with --json, whatever else writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]

NOISY = """
import os, subprocess, sys
from pydantic import BaseModel
from rich.text import Text
from flows.views.output import Output

class Result(BaseModel):
    value: float

with Output(json={json}) as output:
    os.write(1, b"library\\n")
    subprocess.run(["echo", "child"], check=True)
    output.result(Result(value={value}), ["three", Text("\\u00e9\\U0001f600\\ud800", "red")])
    output.say("\\u00e9")
os.write(1, b"after\\n")
"""


def run(json: bool, value: str = "3") -> "subprocess.CompletedProcess[str]":
    code = NOISY.format(json=json, value=value)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=True)


def test_as_json_only_the_result_is_on_standard_output():
    done = run(json=True)
    assert done.stdout == '{"value": 3.0}\nafter\n'
    assert done.stderr.splitlines() == ["library", "child", "é"]


def test_for_people_lines_are_printed():
    assert run(json=False).stdout.splitlines() == ["library", "child", "three", "é😀\\ud800", "after"]


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "\\xe9\\U0001f600\\ud800"), ("cp437", "é\\U0001f600\\ud800")]
)
def test_a_sign_that_the_encoding_lacks_is_spelled_out(encoding: str, shown: str):
    code = NOISY.format(json=False, value=3)
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=PROJECT, check=True, env=environment)
    assert done.stdout.decode(encoding).splitlines()[3] == shown


def test_a_number_that_is_not_finite_is_null():
    assert run(json=True, value="float('nan')").stdout == '{"value": null}\nafter\n'
