"""Faults in conversations with environments that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_PLAYED = ("tests/tasks/stages/test_conversations.py",)
_STATE = "tasks/environments/conversation.py"

ENVIRONMENTS = (
    Mutant(
        "unknown-call-again",
        "a call whose outcome is not known is made again as if nothing had happened",
        _STATE,
        "        if conversation.open:\n",
        "        if False:\n",
        _PLAYED,
    ),
    Mutant(
        "judge-failure-is-zero",
        "an answer that the environment could not judge has the reward 0",
        _STATE,
        'if told["done"] and told["reward"] is None:',
        "if False:",
        _PLAYED,
    ),
    Mutant(
        "failure-is-zero",
        "a conversation that failed has the reward 0",
        "tasks/environments/scores.py",
        "        if self.failure is not None:",
        "        if False:",
        _PLAYED,
    ),
    Mutant(
        "failed-turn-stays",
        "the open turn of an environment that failed stays in the trajectory",
        _STATE,
        "self.events[: -1 if self.open else None] if event.goes_on",
        "self.events if event.goes_on",
        _PLAYED,
    ),
    Mutant(
        "world-of-each-sample",
        "samples of a prompt meet different worlds",
        "tasks/stages/rollout.py",
        "sample_seed(seed, place, WORLD, again) for place in groups.positions for _ in range(samples)",
        "sample_seed(seed, place, WORLD - one, again) for place in groups.positions for one in range(samples)",
        _PLAYED,
    ),
    Mutant(
        "hanging-environment-stays",
        "the process of an environment that hangs is not ended",
        "tasks/environments/host.py",
        "                one.kill()\n",
        "                pass\n",
        _PLAYED,
    ),
    Mutant(
        "observed-is-sampled",
        "tokens that the environment said count as sampled",
        "tasks/environments/trajectory.py",
        'np.full(count, piece.finish_reason != "")',
        "np.full(count, True)",
        ("tests/tasks/environments/test_trajectory.py", *_PLAYED),
    ),
    Mutant(
        "course-in-identity",
        "times and failures of conversations are in the identity of a rollout, so a killed run has others",
        "storage/manifest.py",
        "for part in self.parts if not part.measured",
        "for part in self.parts",
        ("tests/storage/test_manifest.py",),
    ),
    Mutant(
        "evaluation-in-other-worlds",
        "an evaluation meets other worlds in each iteration, so its figures cannot be compared",
        "tasks/stages/evaluate.py",
        "sample_seed(0, row, HELD_OUT_WORLD)",
        "sample_seed(work.iteration, row, HELD_OUT_WORLD)",
        _PLAYED,
    ),
    Mutant(
        "evaluation-failure-is-zero",
        "a conversation of an evaluation that failed has the score 0",
        "tasks/stages/evaluate.py",
        "[one.score.score for one in played]",
        "[one.score.model_copy(update={'failure': None}).score for one in played]",
        _PLAYED,
    ),
    Mutant(
        "programs-without-sandbox",
        "programs begin where there is no sandbox",
        "tasks/environments/programs.py",
        "        _checked()\n",
        "",
        ("tests/tasks/environments/test_programs.py",),
    ),
    Mutant(
        "maze-counts-no-blocked-moves",
        "answers that move nowhere cost nothing",
        "tasks/environments/maze.py",
        "        self._answers += 1\n        word",
        "        self._answers += _WORD.search(action.lower()) is not None\n        word",
        ("tests/tasks/environments/test_maze.py",),
    ),
    Mutant(
        "rewritten-turns-unmarked",
        "nothing says that the chat template would write earlier turns in another way",
        _STATE,
        "            self.rewritten += not kept\n",
        "",
        ("tests/tasks/environments/test_trajectory.py",),
    ),
)
