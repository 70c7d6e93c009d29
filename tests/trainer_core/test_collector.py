import gc

import pytest

from trainer_core.collector import paused


def test_nothing_is_collected_in_the_block_and_then_again():
    with paused():
        assert not gc.isenabled()
        with paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_lets_the_collector_go_on():
    with pytest.raises(ModuleNotFoundError), paused():
        raise ModuleNotFoundError
    assert gc.isenabled()
