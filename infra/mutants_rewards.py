"""Faults in rewards that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_POOL = ("tests/tasks/rewards",)
_LOOP = ("tests/flows/test_rewards_in_the_loop.py",)
_SANDBOX = ("tests/tasks/rewards/test_sandbox.py",)
_FOUND = ("tests/tasks/config/test_functions.py",)

REWARDS = (
    Mutant(
        "reward-library-imported-late",
        "the first sample of a process has the import of a library in its deadline",
        "tasks/rewards/answers.py",
        "from math_verify import LatexExtractionConfig, parse, verify",
        "def parse(*given, **how):\n    import math_verify\n\n    return math_verify.parse(*given, **how)\n\n\n"
        "def verify(*given, **how):\n    import math_verify\n\n    return math_verify.verify(*given, **how)\n\n\n"
        "def LatexExtractionConfig(**how):\n    import math_verify\n\n"
        "    return math_verify.LatexExtractionConfig(**how)\n"
        "\n\n",
        ("tests/tasks/rewards/test_rewards.py::test_the_first_sample_is_not_charged_with_the_import_of_a_library",),
    ),
    Mutant(
        "reward-not-finite",
        "a reward that is not finite is a score",
        "tasks/rewards/calling.py",
        "    if not abs(number) <= LARGEST:\n",
        "    if False:\n",
        _POOL,
    ),
    Mutant(
        "reward-survives-its-owner",
        "what a reward function has started stays when the run is killed",
        "tasks/rewards/worker.py",
        "    killed_with_descendants(None)\n",
        "",
        _POOL,
    ),
    Mutant(
        "reward-daemons-escape",
        "a daemon that a reward function starts is nobody's child",
        "tasks/rewards/worker.py",
        "    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)",
        "    pass",
        _POOL,
    ),
    Mutant(
        "reward-fork-answers-too",
        "a forked copy of a scoring process answers",
        "tasks/rewards/worker.py",
        "    if os.getpid() != pid:  # the function forked, and this is the other one\n",
        "    if False:\n",
        _POOL,
    ),
    Mutant(
        "death-of-an-earlier-sample",
        "a sample has no score because an earlier one ended the process late",
        "tasks/rewards/worker.py",
        "                if fresh:\n",
        "                if True:\n",
        _POOL,
    ),
    Mutant(
        "exit-ends-the-scorer",
        "sys.exit in a reward is not recorded as what it is",
        "tasks/rewards/worker.py",
        "caught=BaseException",
        "caught=Exception",
        _POOL,
    ),
    Mutant(
        "reward-in-our-process",
        "a function that may hang runs in the process that drives the run",
        "tasks/rewards/scoring.py",
        "    if section.processes or order.target.traits.needs_process:\n",
        "    if section.processes or (order.target.traits.needs_process and order.target.version is None):\n",
        _POOL,
    ),
    Mutant(
        "secret-cut-in-two",
        "a text is shortened before secrets are taken out",
        "tasks/rewards/words.py",
        "        text = text.replace(secret, _MASK)\n",
        "        text = text[:LONGEST].replace(secret, _MASK)\n",
        _POOL,
    ),
    Mutant(
        "mixed-sources",
        "processes of one stage score by different versions of a file",
        "tasks/rewards/worker.py",
        '        if self._source not in (None, said["source"]):\n',
        "        if False:\n",
        _POOL,
    ),
    Mutant(
        "too-many-failures-are-trained-on",
        "an iteration that is mostly unscored is trained on",
        "tasks/stages/scored.py",
        "    return unscored == len(scores) or unscored > failures_allowed(limit, len(scores))\n",
        "    return unscored == len(scores)\n",
        _LOOP,
    ),
    Mutant(
        "failed-answers-are-wrong",
        "an answer that could not be scored counts as wrong",
        "tasks/stages/evaluate.py",
        "    return sum(rewards) / len(rewards)\n",
        "    return sum(rewards) / len(scores)\n",
        _LOOP,
    ),
    Mutant(
        "changed-reward-is-silent",
        "a reward function that has changed is not announced",
        "tasks/stages/reward.py",
        "if name in known and known[name] != sources[name]",
        "if name not in known",
        _LOOP,
    ),
    Mutant(
        "folder-is-meaning",
        "a run is another one when its reward file is moved",
        "trainer_core/user_code.py",
        'f"{Path(parts[0]).name}:{parts[1]}"',
        "name",
        _FOUND,
    ),
    Mutant(
        "either-file-will-do",
        "of two different reward files of one name one is taken silently",
        "trainer_core/user_code.py",
        "    if any(other.read_bytes() != found[0].read_bytes() for other in found[1:]):\n",
        "    if False:\n",
        _FOUND,
    ),
    Mutant(
        "metrics-of-any-kind",
        "a metric that is not finite is written",
        "storage/manifest.py",
        "    if (name := _not_finite(manifest.metrics)) is not None:",
        "    if (name := None) is not None:",
        ("tests/storage/test_manifest.py",),
    ),
    Mutant(
        "sandbox-with-a-network",
        "a program of the policy reaches the network",
        "tasks/rewards/sandbox.py",
        '"--unshare-net", ',
        "",
        _SANDBOX,
    ),
    Mutant(
        "sandbox-without-a-limit-of-memory",
        "a program of the policy may use all memory",
        "tasks/rewards/sandbox.py",
        'zip(("AS", ',
        'zip(("CORE", ',
        _SANDBOX,
    ),
    Mutant(
        "sandbox-sees-the-secrets",
        "a program of the policy has the environment of the run",
        "tasks/rewards/sandbox.py",
        "            env={},\n",
        "",
        _SANDBOX,
    ),
    Mutant(
        "sandbox-left-before-it-ended",
        "a program goes on behind its score",
        "tasks/rewards/sandbox.py",
        "    if first is not None and not select.select([first], [], [], _GONE_S)[0]:\n",
        "    if False:\n",
        _SANDBOX,
    ),
    Mutant(
        "sandbox-failure-scores-zero",
        "a sandbox that fails is a wrong program",
        "tasks/rewards/sandbox.py",
        "        if not began:\n",
        "        if False:\n",
        _SANDBOX,
    ),
    Mutant(
        "program-leaves-early",
        "a program that leaves before its tests passes them",
        "tasks/rewards/code.py",
        "lambda output: output.splitlines()[-1:] == [word]",
        "lambda _: True",
        _SANDBOX,
    ),
)
"""Faults, each of which breaks a promise of docs/rewards.md or docs/durability.md."""
