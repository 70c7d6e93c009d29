"""Reward functions that misbehave, found by dotted name."""

import os
import sys
import time


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


def judged(record, response, *, api_key, headers):
    if response == "raise":
        raise ValueError(f"401 for {api_key} with {headers['Authorization']}")
    return float(api_key == record["key"] and headers["Authorization"] == record["key"])


NOT_A_FUNCTION = 3
