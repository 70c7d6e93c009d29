"""`ratchet check-sync`: whether engines hold the weights that a run has stored."""

from typing import TYPE_CHECKING

from flows.cli.options import DEFAULT_ROOT, Json, RootUrl
from flows.views.output import Output
from storage.errors import StageFailed
from tasks.config.environment import prepare_process

if TYPE_CHECKING:
    from tasks.sync_check import CheckedEngine, CheckedSync

_SHOWN = 8  # names of a long list


def check_sync_command(which: str, /, *, root: RootUrl = DEFAULT_ROOT, json: Json = False) -> int:
    """Compare the engines of a run with the stored weights of an iteration, tensor by tensor.

    The engines that the run has on the cluster of RAY_ADDRESS are only asked what they hold. Where there are none, a
    new one gets the stored weights as it does after a restart. Exit code 1 if an engine holds anything else.

    Parameters
    ----------
    which
        RUN for its last iteration, RUN@ITERATION, or RUN@best for the kept one with the highest held-out pass rate;
        RUN@best.reward takes the mean reward instead, and RUN@best.NAME a component of it.
    """
    prepare_process()
    with Output(json=json) as output:
        from flows.sync_check import check_engines  # imports Ray

        found = check_engines(root, which, output.say)
        output.result(found, _lines(found))
    return 0 if found.equal else StageFailed.exit_code


def _lines(found: "CheckedSync") -> list[str]:
    stored = {
        "equal": "the stored state gives them",
        "different": "THE STORED STATE GIVES OTHERS: `ratchet verify` shows what is damaged",
        "not compared": "the stored state was not converted here",
    }[found.stored]
    first = f"run {found.run}, iteration {found.iteration}: weights {found.weights_digest}; {stored}"
    return [first, *(line for engine in found.engines for line in _engine(engine))]


def _engine(engine: "CheckedEngine") -> list[str]:
    if engine.problem is None:
        return [f"{engine.name}: serves them"]
    names = ", ".join(engine.differing[:_SHOWN])
    more = f" and {len(engine.differing) - _SHOWN} more" if len(engine.differing) > _SHOWN else ""
    return [f"{engine.name}: {engine.problem}", *([f"  differing: {names}{more}"] if names else [])]
