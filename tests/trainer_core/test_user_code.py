"""Functions of the user's: their names, their places, and what the digest of their source follows from."""

import sys

import pytest

from storage.digest import bytes_digest
from storage.errors import InputError
from trainer_core.user_code import find_function, in_a_file, located_function, without_folder

GROUP = "ratchet.rewards"


@pytest.fixture
def modules():
    """Modules and folders that a test imports are forgotten after it."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("my.py:score", ("my.py", "score")),
        ("../a b/my.py:score", ("../a b/my.py", "score")),
        ("exact_match", None),
        ("package.module:score", None),
        ("my.py", None),
        ("py:score", None),
    ],
)
def test_what_is_in_a_file(name, parts):
    assert in_a_file(name) == parts


@pytest.mark.parametrize("name", ["/abs/my.py:score", "package.module:score", "exact_match"])
def test_what_needs_no_looking_for_is_left_alone(tmp_path, name):
    assert located_function(name, tmp_path, "reward.function") == name


def test_only_of_a_file_the_folder_does_not_count():
    assert [without_folder(name) for name in ("/a/b.py:f", "b.py:f", "a.b:f", "regex")] == [
        "b.py:f", "b.py:f", "a.b:f", "regex",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my.py", "names no function in the file: give my.py:FUNCTION"),
        ("my.py:a b", "'a b' is not the name of a function"),
        ("nowhere.py:f", "nowhere.py cannot be read"),
        ("exact_math", "is unknown: installed are .*exact_match"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_its_key(name, said):
    with pytest.raises(InputError, match=f"reward.function .*{said}"):
        find_function(name, "reward.function", GROUP)


def test_a_file_is_loaded_as_it_was_when_it_was_found(tmp_path, modules):
    file = tmp_path / "mine.py"
    file.write_text("def f():\n    return 1\n")
    found = find_function(f"{file}:f", "key", GROUP)
    file.write_text("def f():\n    return 2\n")
    assert (found.name, found.load().function()) == ("mine.py:f", 1)
    assert found.load().digest == bytes_digest(b"def f():\n    return 1\n")
    with pytest.raises(AttributeError, match=r"mine\.py has no 'g'"):
        find_function(f"{file}:g", "key", GROUP).load()


def test_the_digest_follows_the_files_that_the_import_reads(tmp_path, modules):
    (tmp_path / "beside_it.py").write_text("VALUE = 1\n")
    (tmp_path / "mine.py").write_text("import beside_it\n\ndef f():\n    return beside_it.VALUE\n")
    digests = []
    for value in (1, 2, 1):
        (tmp_path / "beside_it.py").write_text(f"VALUE = {value}\n# {len(digests)}\n"[:10])
        sys.modules.pop("beside_it", None)
        digests.append(find_function(f"{tmp_path / 'mine.py'}:f", "key", GROUP).load().digest)
    assert digests[0] == digests[2] != digests[1]


def test_an_entry_point_is_a_function_of_its_module():
    found = find_function("exact_match", "key", GROUP)
    assert (found.place, found.attribute, found.text) == ("tasks.rewards.match", "exact_match", None)
