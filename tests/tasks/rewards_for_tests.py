"""Reward functions that misbehave, found by dotted name."""

import math
import os
import sys
import time
from fractions import Fraction

import numpy as np


def sleepy(record, response):
    time.sleep(60 if response == "hang" else 0)
    return 1.0


def crashing(record, response):
    if response == "die":
        os._exit(3)
    if response == "raise":
        raise ValueError("no number in it")
    sys.stdout.write("to standard output, which must not disturb\n")
    return 0.5


RETURNED = {
    "nan": math.nan,
    "infinity": -math.inf,
    "numpy": np.float32("nan"),
    "too large": 3.5e38,
    "huge": 10**400,
    "text": "0.5",
    "nothing": None,
    "list": [0.5],
    "complex": 0.5j,
    "integer": 1,
    "truth": True,
    "fraction": Fraction(1, 4),
    "half": np.float16(0.5),
    "largest": -float(np.finfo(np.float32).max),
}


def returning(record, response):
    return RETURNED[response]


def complaining(record, response):
    raise ValueError(f"cannot read {response}\udc80")


def judged(record, response, *, api_key, headers):
    if response == "raise":
        raise ValueError(f"401 for {api_key} with {headers['Authorization']}")
    return float(api_key == record["key"] and headers["Authorization"] == record["key"])


NOT_A_FUNCTION = 3
