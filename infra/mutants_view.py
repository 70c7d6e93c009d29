"""Faults in the viewer that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_SERVER, _PAGES, _SELECTION = "flows/viewer/server.py", "flows/viewer/pages.py", "storage/selection.py"
_TESTS, _SEARCH = ("tests/flows/viewer/test_viewer.py",), ("tests/flows/viewer/test_search.py",)
_ACCESS = ("tests/flows/viewer/test_accessibility.py",)

VIEW = (
    Mutant(
        "view-any-host",
        "a page of another name that leads to this machine (DNS rebinding) reads runs",
        _SERVER,
        "if host not in self._hosts:",
        "if not host:",
        _TESTS,
    ),
    Mutant(
        "view-any-origin",
        "a page of another site may ask the viewer",
        _SERVER,
        "if origin is not None and",
        "if origin is None and",
        _TESTS,
    ),
    Mutant(
        "view-any-token",
        "the viewer lets in who has no token",
        _SERVER,
        "return None if allowed else",
        "return None if token is None else",
        _TESTS,
    ),
    Mutant(
        "view-readable-cookie",
        "a script may read the cookie that lets in",
        _SERVER,
        "httponly=True",
        "httponly=False",
        _TESTS,
    ),
    Mutant(
        "view-runs-markup",
        "markup in a sample becomes markup of the page",
        _PAGES,
        "autoescape=True",
        "autoescape=False",
        _TESTS,
    ),
    Mutant(
        "view-keeps-old-pages",
        "a page is not sent again when its run goes on",
        _PAGES,
        "return [found.manifests, ",
        "return [",
        _TESTS,
    ),
    Mutant(
        "view-scores-by-place",
        "search gives a sample the score of another one, if they were scored in another order",
        _SELECTION,
        "if scores and not own.select(_KEYS).equals(samples.select(_KEYS)):",
        "if scores and len(own) != len(samples):",
        _SEARCH,
    ),
    Mutant(
        "view-faint-text",
        "quiet text is too faint to be read",
        "flows/viewer/static/viewer.css",
        "--quiet: #545b64",
        "--quiet: #949ba4",
        _ACCESS,
    ),
    Mutant(
        "view-lengths-of-others",
        "search takes the length of a response for that of its prompt",
        _SELECTION,
        '_OF_TOKENS = ("response_tokens", "logprobs")',
        '_OF_TOKENS = ("prompt_tokens", "response_tokens", "logprobs")',
        _SEARCH,
    ),
    Mutant(
        "progress-raw-sample",
        "a sample on the live line controls the terminal",
        "flows/views/progress.py",
        "self._sample = printable(",
        "self._sample = str(",
        ("tests/flows/views/test_progress.py",),
    ),
    Mutant(
        "exit-code-of-storage",
        "the page of exit codes names another one than the command line gives",
        "docs/operations.md",
        "| 2 | the input, or what is stored, cannot be used: change something first | `InputError`,",
        "| 2 | the input, or what is stored, cannot be used: change something first | `InputError`, `LeaseLost`,",
        ("tests/flows/cli/test_app.py",),
    ),
    Mutant(
        "view-next-tokens-ratio",
        "a token is shown with the trainer's log-probability of the next one",
        "flows/viewer/reading.py",
        "trainer[counted[place] - 1 - counted[-1]]",
        "trainer[counted[place] - counted[-1]]",
        _TESTS,
    ),
)
