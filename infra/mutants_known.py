"""The faults that `infra.mutants` knows. A change that makes a promise adds the fault that would break it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    what: str
    """In words."""
    file: str
    before: str
    """Code that occurs once in the file."""
    after: str
    """Its replacement."""
    tests: tuple[str, ...]
    """Test files that should notice it."""


_FAULTS = ("tests/tasks/stages", "tests/faults/test_saving_behind.py", "tests/faults/test_matrix.py")
_UPKEEP = ("tests/storage/upkeep",)
_LEASE = ("tests/storage/ownership",)
_ROOT = ("tests/storage/backends",)
_STAGES = ("tests/tasks/stages", "tests/flows/test_iteration.py", "tests/flows/test_runtime_settings.py")

MUTANTS = (
    Mutant(
        "state-not-waited-for",
        "a state is loaded while it is still on its way to storage",
        "tasks/stages/held_state.py",
        "        context.outbox.settle()  # ranks that died may have left a state that is not stored yet\n",
        "",
        _FAULTS,
    ),
    Mutant(
        "served-state-not-waited-for",
        "weights are served again from a state that is still on its way to storage",
        "tasks/stages/served_weights.py",
        "    context.outbox.settle()  # the state to load may not be stored yet\n",
        "",
        _FAULTS,
    ),
    Mutant(
        "rollout-before-its-state",
        "samples are committed before the state that made them is durable",
        "tasks/stages/rollout.py",
        "    work.context.outbox.settle()  # samples count only once the state that made them is durable\n",
        "",
        _FAULTS,
    ),
    Mutant(
        "piece-of-other-weights",
        "a piece of a rollout is adopted whatever weights made it",
        "tasks/stages/rollout.py",
        "decides = [self.served.digest, self.work.config.engine.precision]",
        "decides = [self.work.config.engine.precision]",
        _FAULTS,
    ),
    Mutant(
        "piece-of-other-precision",
        "a piece of a rollout is adopted whatever precision the engine had",
        "tasks/stages/rollout.py",
        "decides = [self.served.digest, self.work.config.engine.precision]",
        "decides = [self.served.digest]",
        _STAGES,
    ),
    Mutant(
        "piece-by-number",
        "a piece of a rollout is named by its number, whatever groups are in it",
        "tasks/stages/rollout.py",
        'return f"{first:06d}-{first + groups.prompts.num_rows:06d}-{value_digest(decides)[:16]}"',
        'return f"{first // self.work.config.rollout.groups_per_part:05d}-{value_digest(decides)[:16]}"',
        _STAGES,
    ),
    Mutant(
        "ranks-hold-any-state",
        "trainer ranks are used whatever state they hold",
        "tasks/stages/held_state.py",
        "    if group.identity() != state.digest:\n",
        "    if group.identity() is None:\n",
        _FAULTS,
    ),
    Mutant(
        "reused-stage-adopts",
        "ranks take the identity of a train stage that was committed before",
        "tasks/stages/stage.py",
        "            return Performed(self.view(done), reused=True)\n",
        "            for group in [context.workers.trainers(context.scratch, context.config.train)]:\n"
        '                group.adopt(done.digest) if self.stage == "train" else None\n'
        "            return Performed(self.view(done), reused=True)\n",
        _FAULTS,
    ),
    Mutant(
        "receipts-not-compared",
        "what an engine says it received is not compared with what was sent",
        "tasks/stages/served_weights.py",
        "        if receipt.weights_digest != digest:\n",
        "        if not receipt.weights_digest:\n",
        ("tests/tasks/stages",),
    ),
    Mutant(
        "served-digest-not-compared",
        "weights that are served again are not compared with those recorded",
        "tasks/stages/served_weights.py",
        "    if delivery.weights_digest != served.weights_digest:\n",
        "    if not delivery.weights_digest:\n",
        ("tests/tasks/stages",),
    ),
    Mutant(
        "rows-not-compared",
        "a rollout is committed whatever rows its pieces hold",
        "tasks/stages/rollout.py",
        '    if not (same and np.array_equal(samples["sample_id"].to_numpy(), numbers)):\n',
        "    if samples.num_rows < 0:\n",
        ("tests/tasks/stages/test_rollout.py",),
    ),
    Mutant(
        "a-stage-ignores-its-inputs",
        "a committed stage is reused whatever it was made from",
        "tasks/stages/stage.py",
        "    if manifest.inputs == dict(inputs) and manifest.config_digest == config_digest:\n",
        "    if manifest.config_digest == config_digest:\n",
        ("tests/tasks/stages",),
    ),
    Mutant(
        "a-stage-ignores-its-configuration",
        "a committed stage is reused whatever configuration it was made under",
        "tasks/stages/stage.py",
        "    if manifest.inputs == dict(inputs) and manifest.config_digest == config_digest:\n",
        "    if manifest.inputs == dict(inputs):\n",
        ("tests/tasks/stages",),
    ),
    Mutant(
        "published-out-of-order",
        "a manifest is published at once while the state that it is made from is on its way",
        "tasks/stages/stage.py",
        "        pending = output.store is not None or not context.outbox.idle\n",
        "        pending = output.store is not None\n",
        _FAULTS,
    ),
    Mutant(
        "seeds-by-piece",
        "a sample's seed depends on the piece it is generated in",
        "tasks/stages/rollout.py",
        "        n, first = config.rollout.samples, groups.position\n",
        "        n, first = config.rollout.samples, 0\n",
        _STAGES,
    ),
    Mutant(
        "cursor-of-the-rollout",
        "prompts count as consumed once they are sampled, not once they are trained on",
        "tasks/stages/weight_sync.py",
        '            "cursor": trained.cursor,\n',
        '            "cursor": 0,\n',
        _STAGES,
    ),
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
        "killed-fork-is-a-past",
        "a new run continues from what a killed fork has left under its name",
        "tasks/config/stored.py",
        "        check_unused(root, run)\n",
        "        pass\n",
        ("tests/tasks/config/test_past.py",),
    ),
    Mutant(
        "past-not-compared",
        "a run continues from manifests of another configuration",
        "tasks/config/stored.py",
        "    check_past(root, run, stored.digest)\n",
        "",
        ("tests/tasks/config/test_past.py",),
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
        "        root.flush_newest(layout.manifest_folder(run))",
        "        pass",
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
        "bound-record-replaced",
        "the record of a run that has manifests gives way to another configuration",
        "tasks/config/stored.py",
        "    return not made or (",
        "    return True or (",
        ("tests/tasks/config/test_failed_start.py",),
    ),
    Mutant(
        "record-replaced-without-a-fence",
        "a process that lost its lease replaces the record of a run",
        "tasks/config/stored.py",
        "        fence.check()\n",
        "",
        ("tests/tasks/config/test_failed_start.py",),
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
        "    check_not_removed(root, parent)  # after the copies: a removal that begins later sees them\n",
        "",
        ("tests/storage/upkeep/test_removal.py",),
    ),
    Mutant(
        "rows-doubled",
        "rows of iterations that are done again stay in the table of metrics",
        "flows/views/table.py",
        "        if row.iteration != number or number >= complete:\n",
        "        if row.iteration < 0:\n",
        ("tests/flows/views/test_table.py", "tests/flows/views/test_reports.py"),
    ),
    Mutant(
        "a-report-ends-the-run",
        "a tracker that fails stops the thread that reports",
        "flows/views/lane.py",
        '            self._failed(f"{type(error).__name__}: {first}")\n        return True\n',
        '            self._failed(f"{type(error).__name__}: {first}")\n        return False\n',
        ("tests/flows/views/test_lane.py",),
    ),
    Mutant(
        "cluster-not-released",
        "the processes of a complete run stay on the cluster",
        "tasks/workers/fleet.py",
        "        elif error is None:\n            self._release()\n",
        "",
        ("tests/tasks/workers/test_release.py",),
    ),
)
