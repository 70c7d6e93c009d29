"""With --json, standard output holds only the JSON, whatever else writes."""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]

NOISY = """
import os, subprocess, sys
from pydantic import BaseModel
from flows.views.output import Output

class Result(BaseModel):
    value: float

with Output(json={json}) as output:
    os.write(1, b"library\\n")
    subprocess.run(["echo", "child"], check=True)
    output.result(Result(value={value}), ["three"])
os.write(1, b"after\\n")
"""


def run(json: bool, value: str = "3") -> "subprocess.CompletedProcess[str]":
    code = NOISY.format(json=json, value=value)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=True)


def test_as_json_only_the_result_is_on_standard_output():
    done = run(json=True)
    assert done.stdout == '{"value": 3.0}\nafter\n'
    assert done.stderr.splitlines() == ["library", "child"]


def test_for_people_lines_are_printed():
    assert run(json=False).stdout.splitlines() == ["library", "child", "three", "after"]


def test_a_number_that_is_not_finite_is_null():
    assert run(json=True, value="float('nan')").stdout == '{"value": null}\nafter\n'
