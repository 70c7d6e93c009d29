import pytest

from tests.trainer_core.models import add_frequencies, make_family
from tests.trainer_core.ranks import run_ranks


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Hugging Face directories by family, each made once."""
    made = {}

    def folder(family):
        if family not in made:
            made[family] = str(tmp_path_factory.mktemp(family))
            run_ranks(1, make_family, made[family], family)
            if "llama" in family:
                run_ranks(1, add_frequencies, made[family])
        return made[family]

    return folder
