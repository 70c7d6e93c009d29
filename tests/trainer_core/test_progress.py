"""A long call reports its progress, at a limited rate, only to listeners."""

import logging

import pytest

from trainer_core.progress import logger, reported, told, told_whole, understood


def test_what_is_told_is_understood(caplog: pytest.LogCaptureFixture):
    assert list(told([1, 2, 3], "micro-batches")) == [1, 2, 3]
    assert not caplog.messages
    with caplog.at_level(logging.INFO, logger.name):
        assert list(told([1, 2, 3], "micro-batches")) == [1, 2, 3]
    assert [understood(line) for line in caplog.messages] == [(0, 3, "micro-batches", "")]
    assert understood("epoch 3 of 4 steps") is None


def test_a_step_is_told_with_its_loss_and_without_its_micro_batches(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger.name):
        for step in told_whole([1, 2], "steps", lambda: "loss 1.25e-05"):
            assert list(told([step], "micro-batches")) == [step]
        assert list(told([3], "micro-batches")) == [3]
    lines = [understood(line) for line in caplog.messages]
    assert lines == [(0, 2, "steps", "loss 1.25e-05"), (0, 1, "micro-batches", "")]
    assert understood("3 of 4 steps, as you see") is None


def test_losses_of_all_steps_are_reported_or_of_some_thousand_with_the_last():

    assert [reported(steps) for steps in (1, 3)] == [[0], [0, 1, 2]]
    many = reported(5001)
    assert many[-1] == 5000
    assert 1000 < len(many) <= 2001
