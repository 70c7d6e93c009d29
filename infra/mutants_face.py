"""Faults in the public module, the packaging and the door of environments that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_FACE, _WHEEL = ("tests/test_ratchet.py",), ("tests/test_packaging.py",)
_ENVIRONMENTS = ("tests/tasks/environments/test_environments.py",)
_PLAYING = "tasks/environments/playing.py"

FACE = (
    Mutant(
        "face-lets-be-shadowed",
        "a user's file with the name of one of our packages is imported in its place",
        "ratchet.py",
        "if (_flaw := _shadowed()) is None:",
        "if (_flaw := None) is None:",
        _FACE,
    ),
    Mutant(
        "form-without-an-option",
        "the form of a fork lacks an option of the command",
        "flows/deployments/stored.py",
        "    revision: Count | None = None,\n) -> State[Any]:",
        ") -> State[Any]:",
        ("tests/test_faces.py",),
    ),
    Mutant(
        "command-with-an-option-of-its-own",
        "the command that exports has an option that scripts and forms lack",
        "flows/cli/weights.py",
        "] = _AS_TRAINED,\n",
        "] = _AS_TRAINED,\n    dry: bool = False,\n",
        ("tests/test_faces.py",),
    ),
    Mutant(
        "form-drops-a-setting",
        "an export that a form asks for writes the policy in place of the critic",
        "flows/deployments/stored.py",
        '"adapter": adapter, "critic": critic}',
        '"adapter": adapter}',
        ("tests/flows/deployments/test_stored.py",),
    ),
    Mutant(
        "token-in-prefect",
        "a viewer's address is stored in the run and in Prefect with its token",
        "tasks/config/report.py",
        "    if _ADDRESS.fullmatch(address) is None:\n",
        "    if _ADDRESS.match(address) is None:\n",
        ("tests/bad_input/test_commands.py",),
    ),
    Mutant(
        "face-in-the-event-loop",
        "a call from a notebook runs within the notebook's event loop, where Prefect's functions return coroutines",
        "ratchet.py",
        "    asyncio._set_running_loop(None)\n",
        "",
        _FACE,
    ),
    Mutant(
        "face-imports-prefect",
        "`import ratchet` imports Prefect",
        "ratchet.py",
        "    prepare_process(offline=False)\n",
        "    prepare_process(offline=False)\n    import flows.run\n",
        ("tests/test_house.py",),
    ),
    Mutant(
        "face-offline",
        "`import ratchet` keeps a user's process from contacting a hub",
        "ratchet.py",
        "prepare_process(offline=False)",
        "prepare_process()",
        _FACE,
    ),
    Mutant(
        "face-credentials",
        "a script's storage root may have credentials in its URL, which messages then show",
        "ratchet.py",
        "    check_root_url(os.fspath(root))\n",
        "",
        _FACE,
    ),
    Mutant(
        "face-missing-extra",
        "a command that lacks its extra ends with a traceback",
        "flows/cli/mistakes.py",
        "if not name or name in _OURS:",
        "if name:",
        _WHEEL,
    ),
    Mutant(
        "face-base-lacks",
        "the base does not require a package that looking at runs imports",
        "pyproject.toml",
        '    "xxhash>=3.5",                        # xxh3-128 of every part\n',
        "",
        _WHEEL,
    ),
    Mutant(
        "face-wheel-lacks",
        "the wheel lacks the deployments that `ratchet up` registers",
        "pyproject.toml",
        ', "infra/prefect.yaml",',
        ",",
        _WHEEL,
    ),
    Mutant(
        "environment-any-reward",
        "an environment may give a reward that is not finite",
        _PLAYING,
        " and math.isfinite(reward)",
        "",
        _ENVIRONMENTS,
    ),
    Mutant(
        "environment-not-async",
        "an environment whose calls are not async is accepted when it is loaded",
        _PLAYING,
        "if not inspect.iscoroutinefunction(function):",
        "if function is None:",
        _ENVIRONMENTS,
    ),
)
