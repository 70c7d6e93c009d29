import signal

import pytest


@pytest.fixture
def default_signals():
    """The signals that end a command do so for this test and for what it starts.

    A shell starts a background job with SIGINT ignored, and nohup does so with SIGHUP; children inherit that.
    """
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
