import pytest

from tests.trainer_core.models import ODD_VOCABULARY, make_model
from tests.trainer_core.ranks import run_ranks


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    """Hugging Face directories by whether the output layer shares the embedding's weights."""
    folder = tmp_path_factory.mktemp("models")
    for tied in (True, False):
        run_ranks(1, make_model, str(folder / str(tied)), tied)
    return {tied: str(folder / str(tied)) for tied in (True, False)}


@pytest.fixture(scope="session")
def odd_model_dirs(tmp_path_factory):
    """The same with a vocabulary that two ranks cannot divide."""
    folder = tmp_path_factory.mktemp("odd-models")
    for tied in (True, False):
        run_ranks(1, make_model, str(folder / str(tied)), tied, ODD_VOCABULARY)
    return {tied: str(folder / str(tied)) for tied in (True, False)}


@pytest.fixture(scope="session")
def model_dir(model_dirs):
    return model_dirs[True]
