"""Functions of the user: their names, their places, and the digest of their source."""

import sys

import pytest

from storage.digest import bytes_digest
from storage.errors import InputError
from trainer_core.user_code import find_function, in_a_file, located_function, source_digest, without_folder

GROUP = "ratchet.rewards"


@pytest.fixture
def modules():
    """Forget modules and folders that a test imports after it."""
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
        ("__main__:f", "is of a script or a notebook, .*: write it to a file"),
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


def digests(name, folder, changes):
    """Digest of a source, and the number of different ones after each change of a file."""
    first = source_digest(find_function(name, "reward.function", GROUP))
    found = {}
    for file, text in changes.items():
        before = (folder / file).read_bytes()
        (folder / file).write_text(text)
        found[file] = source_digest(find_function(name, "reward.function", GROUP)) != first
        (folder / file).write_bytes(before)
    assert source_digest(find_function(name, "reward.function", GROUP)) == first
    return found


FILES = {
    "mine.py": "import helper, json\nfrom own import part\ndef f(): ...\n",
    "helper.py": "from own.deep import more as less\n",
    "own/__init__.py": "",
    "own/part.py": "from . import beside\nfrom ..top import x\n",
    "own/beside.py": "",
    "own/deep.py": "more = 1\n",
    "top.py": "x = 1\n",
    "json.txt": "",
    "other.py": "",
}


def test_the_digest_of_a_file_is_also_that_of_the_files_beside_it_that_it_imports(tmp_path, modules):
    (tmp_path / "own").mkdir()
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    before = set(sys.modules)
    found = digests(f"{tmp_path}/mine.py:f", tmp_path, dict.fromkeys(FILES, "changed = 1"))
    assert [file for file, changed in found.items() if not changed] == ["json.txt", "other.py"]
    assert set(sys.modules) == before


def test_the_digest_of_a_module_is_that_of_its_package(tmp_path, modules):
    files = {"pack/__init__.py": "", "pack/sub.py": "import pack.more, alone", "pack/more.py": "", "alone.py": ""}
    (tmp_path / "pack").mkdir()
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    sys.path.insert(0, str(tmp_path))
    found = digests("pack.sub:f", tmp_path, dict.fromkeys(files, "changed = 1"))
    assert found == {"pack/__init__.py": True, "pack/sub.py": True, "pack/more.py": True, "alone.py": False}
    with pytest.raises(InputError, match=r"'pack.none:f': there is no module pack.none"):
        source_digest(find_function("pack.none:f", "reward.function", GROUP))


def test_a_file_with_a_syntax_error_has_a_digest(tmp_path):
    (tmp_path / "mine.py").write_text("def f(:")
    found = source_digest(find_function(f"{tmp_path}/mine.py:f", "reward.function", GROUP))
    assert found == bytes_digest(b"def f(:")
