"""Faults in a person's view of runs, and in evaluations, that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_SUBFLOWS = ("tests/flows/test_subflows.py",)
_PAGE = ("tests/flows/views/test_page.py",)
_EVALUATION = ("tests/tasks/stages/test_evaluation.py",)
_PASSES = ("tests/tasks/stages/test_passes.py",)
_LOGS = ("tests/tasks/workers/test_logs.py",)

PAGES = (
    Mutant(
        "page-suspended-stays-running",
        "the subflow run of an iteration in which a person suspended the flow run stays Running",
        "flows/subflows.py",
        "except (Pause, *_SERVER_ERRORS) as error:",
        "except _SERVER_ERRORS as error:",
        _SUBFLOWS,
    ),
    Mutant(
        "page-green-before-stored",
        "an iteration is green while its state is on its way",
        "tasks/stages/stage.py",
        "            context.page.storing(writer.iteration, self.stage, published)\n",
        "",
        _SUBFLOWS,
    ),
    Mutant(
        "page-wrong-one-red",
        "the stage that meets a failure of storing is red, too",
        "flows/subflows.py",
        "        if not elsewhere(error):\n            raise\n",
        "        raise\n",
        _SUBFLOWS,
    ),
    Mutant(
        "page-waits-for-the-server",
        "a subflow's end that the server did not hear is never told again",
        "flows/subflows.py",
        "                _report(identity, end)\n",
        "                continue\n",
        _SUBFLOWS,
    ),
    Mutant(
        "page-grows",
        "the table of iterations has a row for each",
        "flows/views/artifacts.py",
        "deque(maxlen=WINDOW)",
        "deque()",
        _PAGE,
    ),
    Mutant(
        "page-made-again",
        "each change of an artifact makes another one",
        "flows/views/artifacts.py",
        "            self._made = client.create_artifact(order).id\n",
        "            client.create_artifact(order)\n",
        _PAGE,
    ),
    Mutant(
        "page-silent-about-the-server",
        "a server that was away is not told what it missed",
        "flows/views/artifacts.py",
        "        if self._away is not None:\n            self._back(client, self._away)\n",
        "",
        _PAGE,
    ),
    Mutant(
        "page-revives-what-is-cancelled",
        "a flow run that is cancelled while its page is brought up to date becomes Running again",
        "flows/views/artifacts.py",
        "Running(message=message))",
        "Running(message=message), force=True)",
        _PAGE,
    ),
    Mutant(
        "evaluation-twice",
        "an evaluation that is stored is done again",
        "tasks/stages/evaluation.py",
        "        return Performed(Evaluated(done), reused=True)\n",
        "        pass\n",
        _EVALUATION,
    ),
    Mutant(
        "evaluation-starts-over",
        "an interrupted evaluation answers everything again",
        "tasks/stages/evaluation.py",
        "(kept := find_piece(self.writer, name))",
        "(kept := None)",
        _EVALUATION,
    ),
    Mutant(
        "evaluation-settings-forgotten",
        "what decides the answers is not in the name of an evaluation",
        "tasks/stages/evaluation.py",
        '[settings.model_dump(mode="json"), prepared,',
        "[prepared,",
        _EVALUATION,
    ),
    Mutant(
        "evaluation-biased",
        "pass@k is 1 - (1 - c/n)^k",
        "tasks/stages/evaluation.py",
        "    return 1.0 - float(np.prod(1.0 - k / np.arange(answers - passing + 1, answers + 1)))\n",
        "    return 1.0 - (1.0 - passing / answers) ** k\n",
        _PASSES,
    ),
    Mutant(
        "evaluation-counts-errors-as-wrong",
        "an answer without a score counts as one that does not pass",
        "tasks/stages/evaluation.py",
        "    scored = [passes[rows][np.isfinite(rewards[rows])] for rows in groups.values()]\n",
        "    scored = [passes[rows] for rows in groups.values()]\n",
        _PASSES,
    ),
    Mutant(
        "log-without-limit",
        "a process that prints without end fills the log",
        "tasks/workers/logs.py",
        "        if self._left < 1:\n",
        "        if self._left < -1e9:\n",
        _LOGS,
    ),
)
