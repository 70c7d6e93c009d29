"""A long call tells how far it is, at a limited rate, only to those who listen."""

import logging

import pytest

from trainer_core.telling import logger, told, understood


def test_what_is_told_is_understood(caplog: pytest.LogCaptureFixture):
    assert list(told([1, 2, 3], "micro-batches")) == [1, 2, 3]
    assert not caplog.messages
    with caplog.at_level(logging.INFO, logger.name):
        assert list(told([1, 2, 3], "micro-batches")) == [1, 2, 3]
    assert [understood(line) for line in caplog.messages] == [(0, 3, "micro-batches")]
    assert understood("epoch 3 of 4 steps") is None
