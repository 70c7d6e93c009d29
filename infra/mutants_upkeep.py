"""Faults in the upkeep of a root, in messages to a site, and in costs, that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_BESIDE = ("tests/storage/upkeep/test_beside.py",)
_CHUNKS = ("tests/storage/upkeep/test_chunks.py",)
_ALL = ("tests/flows/test_maintenance.py",)
_COST = ("tests/flows/test_overhead.py",)
_ENTRIES = ("tests/flows/site/test_entries.py",)

UPKEEP = (
    Mutant(
        "gc-beside-a-stage-in-progress",
        "beside a run, what a stage in progress may find again is deleted",
        "storage/upkeep/beside.py",
        "if committed and begun <= committed and not unreadable",
        "if not unreadable",
        _BESIDE,
    ),
    Mutant(
        "gc-beside-another-driver",
        "beside a run, deleting goes on when another process drives it",
        "storage/upkeep/beside.py",
        "            if _epoch(self.root, self.run) != self.epoch:\n",
        "            if False:\n",
        _BESIDE,
    ),
    Mutant(
        "gc-beside-takes-the-lease-apart",
        "beside a run, entries of its lease are deleted",
        "storage/upkeep/beside.py",
        'leased = one.key.startswith(f"{layout.lease_folder(self.run)}/")',
        "leased = False",
        _BESIDE,
    ),
    Mutant(
        "retired-is-missing",
        "a state that retention deletes during a verification is reported as lost",
        "storage/upkeep/beside.py",
        "if one.fault is not Problem.MISSING or not _is_retired(root, one.key)",
        "if one.fault is not Problem.MISSING or True",
        _BESIDE,
    ),
    Mutant(
        "lost-is-retired",
        "a part that is really lost is not reported",
        "storage/upkeep/beside.py",
        "if one.fault is not Problem.MISSING or not _is_retired(root, one.key)",
        "if one.fault is not Problem.MISSING",
        _BESIDE,
    ),
    Mutant(
        "archive-of-the-past",
        "of two archivers the slower one removes what the other has written",
        "storage/upkeep/archive.py",
        "    recorded = names(root, run)\n",
        "    recorded = names(root, run)\n"
        "    there = [one for one in root.stored(layout.archive_folder(run)) if _span(one)]\n",
        _CHUNKS,
    ),
    Mutant(
        "archive-is-never-behind",
        "a stage that is committed again is not archived again",
        "storage/upkeep/archive.py",
        " and one.modified > changed",
        "",
        _CHUNKS,
    ),
    Mutant(
        "one-damaged-run-ends-the-upkeep",
        "a damaged run stops the upkeep of the others",
        "flows/maintenance.py",
        "        except RatchetError as error:\n",
        "        except NotImplementedError as error:\n",
        _ALL,
    ),
    Mutant(
        "maintain-without-the-lease",
        "a run that is driven is cleaned as if it were not",
        "flows/maintenance.py",
        "        found = collect_beside(root, WORKFLOW, run)\n",
        "        found = collect(root, WORKFLOW, run, apply=True)\n",
        _ALL,
    ),
    Mutant(
        "status-reads-everything",
        "the status of a long run reads all of it",
        "flows/views/status.py",
        "    if whole or begun <= SHORT or",
        "    if whole or begun > -1 or",
        _COST,
    ),
    Mutant(
        "status-trusts-the-newest-folder",
        "the status of a long run does not see a gap",
        "flows/views/status.py",
        "    return ended_iterations(root, run, begun)\n",
        "    return begun - 1\n",
        _COST,
    ),
    Mutant(
        "form-for-secrets",
        "the form of a flow run asks for a secret, which the server would store",
        "tasks/config/reference.py",
        "or key.mark.secret or",
        "or",
        ("tests/flows/deployments/test_new_run.py",),
    ),
    Mutant(
        "untouched-switches",
        "a switch of the form that nobody has touched turns a setting off",
        "tasks/config/reference.py",
        "        found = _CHOICE\n",
        "        pass\n",
        ("tests/flows/deployments/test_new_run.py",),
    ),
    Mutant(
        "empty-fields-count",
        "a field of the form that is left empty replaces a setting",
        "tasks/config/document.py",
        "if value not in (None, {})}",
        "if value != {}}",
        ("tests/flows/deployments/test_new_run.py",),
    ),
    Mutant(
        "schedule-without-a-rule",
        "a schedule without cron and interval is registered",
        "flows/site/entries.py",
        "        if (self.cron is None) == (self.interval is None):\n",
        "        if self.cron and self.interval:\n",
        _ENTRIES,
    ),
    Mutant(
        "sound-without-runs",
        "the upkeep of a root that is named wrongly ends well",
        "storage/upkeep/catalog.py",
        "    if not (found := runs(root)):\n",
        "    if (found := runs(root)) is None:\n",
        ("tests/flows/test_maintenance.py",),
    ),
    Mutant(
        "misspelled-parameters",
        "a parameter that no flow has is ignored",
        "flows/site/entries.py",
        "            if name not in known:\n",
        "            if False:\n",
        _ENTRIES,
    ),
    Mutant(
        "secrets-in-a-webhook",
        "a webhook's URL may hold a password",
        "flows/site/registration.py",
        "    if has_credentials(given):\n",
        "    if False:\n",
        ("tests/flows/site/test_notification.py",),
    ),
    Mutant(
        "retention-deletes-tables",
        "with a train state, what is stored beside it is deleted",
        "storage/manifest.py",
        "lasting = tuple(part for part in self.parts if not part.name.startswith(layout.STATE))",
        "lasting = ()",
        ("tests/flows/test_save_every.py",),
    ),
    Mutant(
        "fork-without-tables",
        "a fork names tables of retired states and does not have them",
        "storage/upkeep/fork.py",
        "self._has_parts(original.lasted(), copy.lasted(), there)",
        "self._has_parts(original.lasted(), original.lasted(), there)",
        ("tests/flows/test_save_every.py",),
    ),
)
"""Faults, each of which breaks a promise of docs/operations.md."""
