"""Faults of storage that `infra.mutants` knows."""

from infra.mutants_known import Mutant

_UPKEEP = ("tests/storage/upkeep",)
_LEASE = ("tests/storage/ownership",)
_ROOT = ("tests/storage/backends",)

STORAGE = (
    Mutant(
        "stored-file-not-flushed",
        "a file that becomes a part is not flushed to the disk",
        "storage/backends/local.py",
        "    kill_points.reached(Point.MID_PART, str(path))\n    _sync(path)\n",
        "    kill_points.reached(Point.MID_PART, str(path))\n",
        ("tests/storage",),
    ),
    Mutant(
        "written-part-not-flushed",
        "a part that is written is not flushed to the disk",
        "storage/backends/local.py",
        "                    os.fsync(file.fileno())\n",
        "",
        ("tests/storage",),
    ),
    Mutant(
        "retention-looks-first",
        "retention looks at forks before it writes its record",
        "storage/upkeep/retention.py",
        "        if self.apply:\n            self._retire(stored, pushed_out, retention)\n"
        "        found = list(self._unnamed(parts, stored, pushed_out))\n"
        "        if not found:\n            return [], []\n"
        "        # after the records: a fork that was made meanwhile is seen here, or it sees them\n"
        "        elsewhere = self.shared.named([one.key for one in found])\n",
        "        found = list(self._unnamed(parts, stored, pushed_out))\n"
        "        elsewhere = self.shared.named([one.key for one in found])\n"
        "        if self.apply:\n            self._retire(stored, pushed_out, retention)\n"
        "        if not found:\n            return [], []\n",
        _UPKEEP,
    ),
    Mutant(
        "retention-ignores-forks",
        "retention deletes parts that other runs name",
        "storage/upkeep/retention.py",
        "        needed = elsewhere.parts()\n",
        "        needed: set[str] = set()\n",
        _UPKEEP,
    ),
    Mutant(
        "forks-name-their-own-iteration-only",
        "a part is looked for in manifests of its own iteration only",
        "storage/upkeep/shared.py",
        "        own = frozenset(key for key in keys if layout.is_part_of(key, self._run))\n",
        "        own = frozenset(\n            key\n            for key in keys\n"
        "            if layout.is_part_of(key, self._run) and layout.place_of(key)[0] == layout.place_of(one.key)[0]\n"
        "        )\n",
        _UPKEEP,
    ),
    Mutant(
        "fork-looks-once",
        "a fork does not look again for states that its parent retires meanwhile",
        "storage/upkeep/fork.py",
        "        if retired:\n",
        "        if retired and key in past.retired:\n",
        _UPKEEP,
    ),
    Mutant(
        "adopted-part-stays-old",
        "a part that a stage finds under the taken key keeps its age",
        "storage/parts.py",
        "        return self.root.make_young(part.key) and is_intact(self.root, part)\n",
        "        return is_intact(self.root, part)\n",
        (*_UPKEEP, "tests/storage/test_continued.py"),
    ),
    Mutant(
        "orphans-not-looked-at-again",
        "an orphan is deleted although a stage has found it meanwhile",
        "storage/upkeep/retention.py",
        "                if one.reason != _ORPHAN or one.key in orphaned:\n",
        "                if one.reason:\n",
        _UPKEEP,
    ),
    Mutant(
        "cleaning-without-a-fence",
        "a process that lost its lease goes on deleting",
        "storage/upkeep/retention.py",
        "        if self.fence is not None:\n            self.fence.check()\n",
        "        return\n",
        _UPKEEP,
    ),
    Mutant(
        "unreadable-names-nothing",
        "a record of another run that cannot be read counts as naming nothing",
        "storage/upkeep/retention.py",
        "        if elsewhere.unreadable:\n            return [], list(elsewhere.unreadable)\n",
        "",
        _UPKEEP,
    ),
    Mutant(
        "names-per-record",
        "the names of a run are gathered once for each of its records",
        "storage/upkeep/catalog.py",
        "if layout.retired_key(key) in there)",
        "if layout.retired_key(key) in set(keys))",
        _UPKEEP,
    ),
    Mutant(
        "names-not-flushed-again",
        "a part that a killed process linked is named without its folder being flushed",
        "storage/backends/local.py",
        "            _flush_all_names(target.parent)\n",
        "            pass\n",
        _ROOT,
    ),
    Mutant(
        "past-not-flushed",
        "a run continues from a manifest whose name a killed process did not flush",
        "storage/ownership/lease.py",
        "            root.flush_recent(folder)",
        "            pass",
        _ROOT,
    ),
    Mutant(
        "failure-is-absence",
        "a folder that cannot be listed counts as empty",
        "storage/backends/local.py",
        "    except FileNotFoundError:  # removed since its name was read\n",
        "    except OSError:\n",
        (*_ROOT, *_LEASE),
    ),
    Mutant(
        "condition-of-amazon-only",
        "a refused conditional put is recognised by Amazon's body, not by its status",
        "storage/backends/objects.py",
        "        if _status(error) != http.HTTPStatus.PRECONDITION_FAILED:\n            raise\n        return False\n",
        "        raise\n",
        _ROOT,
    ),
    Mutant(
        "outage-is-an-input-error",
        "a store that is away for a while ends the run as if its address were wrong",
        "storage/backends/root.py",
        "        if _temporary(root)(error):\n",
        "        if False:\n",
        _ROOT,
    ),
    Mutant(
        "renewal-of-another",
        "a lease yields to another holder's renewal as its own",
        "storage/ownership/lease.py",
        '(last.token, last.kind) == (self._entry.token, "renewed")',
        'last.kind == "renewed"',
        _LEASE,
    ),
    Mutant(
        "fence-trusts-its-clock",
        "a commit is refused only if the holder's own clock says so",
        "storage/ownership/lease.py",
        "            elif log.newest_number(self.root, self.run) != self._entry.number:\n"
        "                self._follow(newest(self.root, self.run))\n",
        "",
        _LEASE,
    ),
    Mutant(
        "watched-for-half-a-period",
        "a run is taken over from a holder that may renew in time",
        "storage/ownership/lease.py",
        "asked - self.since >= self.entry.seconds",
        "asked - self.since >= self.entry.seconds / 2",
        _LEASE,
    ),
    Mutant(
        "pruned-numbers-count-again",
        "a number that was pruned is taken for the newest by a process that knows an old log",
        "storage/ownership/log.py",
        "    if published and number == entry.number:\n",
        "    if published:\n",
        _LEASE,
    ),
    Mutant(
        "hidden-process-is-dead",
        "a process that /proc hides counts as dead",
        "storage/ownership/process.py",
        "    return Life.ALIVE if None in (seen, owner.birth) or seen == owner.birth else Life.DEAD\n",
        "    return Life.ALIVE if seen == owner.birth else Life.DEAD\n",
        _LEASE,
    ),
    Mutant(
        "loss-is-not-told",
        "a block goes on working after its lease is lost",
        "storage/ownership/lease.py",
        "            lease.on_lost(block.end_with)\n",
        "",
        _LEASE,
    ),
    Mutant(
        "interrupt-publishes",
        "after an interrupt, what waits in the outbox is still published",
        "storage/write_behind.py",
        "            if self._dropped.is_set():\n",
        "            if False:\n",
        ("tests/storage/test_write_behind.py",),
    ),
    Mutant(
        "files-in-the-identity",
        "the identity of a state depends on the files that hold it",
        "storage/manifest.py",
        "        named = _IDENTITY if self.content is None else _IDENTITY_OF_CONTENT\n",
        "        named = _IDENTITY\n",
        ("tests/storage/test_manifest.py",),
    ),
    Mutant(
        "removal-not-recorded",
        "a removal that was killed cannot be told from a run",
        "storage/upkeep/removal.py",
        "    records.publish(root, key, Removal(time=datetime.now(UTC)))\n",
        "",
        ("tests/storage/upkeep/test_removal.py",),
    ),
    Mutant(
        "removal-of-what-forks-use",
        "a run is removed whose parts other runs name",
        "storage/upkeep/removal.py",
        "    if forks:\n",
        "    if not forks and elsewhere.manifests:\n",
        ("tests/storage/upkeep/test_removal.py",),
    ),
    Mutant(
        "fork-of-a-removed-run",
        "a fork does not look whether its parent is being removed",
        "storage/upkeep/fork.py",
        "    for one in (parent, run):  # after",
        "    for one in (run,):  # after",
        ("tests/storage/upkeep/test_removal.py",),
    ),
)
