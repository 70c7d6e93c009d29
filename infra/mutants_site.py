"""Faults in sites, flow runs and retries that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_OUTBOX = ("tests/storage/test_write_behind.py", "tests/tasks/stages/test_retrying.py")

SITE = (
    Mutant(
        "site-late-lock",
        "a transaction of the server's SQLite reads before it has the write lock",
        "flows/server/sqlite.py",
        "(_EARLY if statement == _LATE else statement)",
        "statement",
        ("tests/flows/server/test_sqlite.py",),
    ),
    Mutant(
        "site-forgets-strays",
        "what an interrupted `up` has started stays after `down`",
        "flows/site/up.py",
        "        for process in strays(folder.path, ()):\n            end_tree(process)\n",
        "        for _ in strays(folder.path, ()):\n",
        ("tests/flows/site/test_processes.py",),
    ),
    Mutant(
        "site-asks-the-worker",
        "`down` asks the worker to end, which may start a flow run again meanwhile",
        "flows/site/up.py",
        "end(one, starts=one.role == _WORKER)",
        "end(one)",
        ("tests/flows/site/test_processes.py",),
    ),
    Mutant(
        "site-counts-reports",
        "two reports of one crash count as two crashes",
        "flows/site/reconciling.py",
        "not before.is_crashed() and state.is_crashed()",
        "state.is_crashed()",
        ("tests/flows/site/test_reconciling.py",),
    ),
    Mutant(
        "site-recorded-is-stray",
        "descendants of a recorded process count as unrecorded",
        "flows/site/processes.py",
        "if process.pid in known or above & (known | marked.keys())",
        "if above & (known | marked.keys())",
        ("tests/flows/site/test_processes.py",),
    ),
    Mutant(
        "site-stop-is-tried-again",
        "a flow run that `ratchet stop` ends is tried again",
        "storage/ownership/lease.py",
        "STOP_SIGNAL if owner.name.startswith(ASKED_FOR) else signal.SIGTERM",
        "signal.SIGTERM",
        ("tests/flows/deployments/test_stopping.py",),
    ),
    Mutant(
        "outbox-fails-at-once",
        "what fails behind the stages is not stored again",
        "tasks/stages/context.py",
        "    context.outbox.repeat(partial(_stored_again, context.config.run.retries, say))\n",
        "",
        _OUTBOX,
    ),
    Mutant(
        "outbox-never-fails",
        "what fails behind the stages is stored again for ever",
        "tasks/stages/context.py",
        "attempts > retries or not isinstance",
        "not isinstance",
        _OUTBOX,
    ),
    Mutant(
        "outbox-hides-the-stage",
        "an error behind the stages hides that of the stage",
        "storage/write_behind.py",
        "        if error is None:\n            raise failure\n",
        "        raise failure\n",
        _OUTBOX,
    ),
    Mutant(
        "outbox-without-context",
        "Prefect starts a second server for what an iteration logs at its end",
        "storage/write_behind.py",
        "contextvars.copy_context().run",
        "contextvars.Context().run",
        _OUTBOX,
    ),
    Mutant(
        "doctor-clock-of-the-store",
        "a store's clock that differs is not noticed",
        "storage/backends/root.py",
        "            return (written.modified - before).total_seconds()\n",
        "            return 0.0\n",
        ("tests/flows/site/test_doctor.py",),
    ),
    Mutant(
        "red-without-a-stage",
        "a red flow run does not say which stage failed",
        "flows/deployments/attempt.py",
        'f"{place}{self.cause}"',
        "self.cause",
        ("tests/flows/deployments/test_train.py",),
    ),
)
