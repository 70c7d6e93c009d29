"""Faults in a run's use of its machine: proxies, folders, other users."""

from infra.mutants_known import Mutant

MACHINE = (
    Mutant(
        "proxy-for-loopback",
        "our own server is asked through the user's proxy",
        "tasks/config/environment.py",
        '        exceptions = ",".join(dict.fromkeys((*hosts, *_NO_PROXY)))\n',
        '        exceptions = ",".join(dict.fromkeys(hosts))\n',
        ("tests/tasks/config/test_environment.py",),
    ),
    Mutant(
        "home-not-looked-at",
        "a home folder that cannot be written is met after minutes",
        "tasks/workers/folders.py",
        "    if not os.access(home, os.W_OK | os.X_OK):\n",
        "    if False:\n",
        ("tests/tasks/test_checks.py",),
    ),
    Mutant(
        "sockets-below-a-long-path",
        "Ray's sockets are below the temporary folder, however long its path is",
        "storage/ownership/scratch.py",
        "        if len(str(place)) + _OWN <= _LONGEST and os.access(place, os.W_OK | os.X_OK):\n",
        "        if os.access(place, os.W_OK | os.X_OK):\n",
        ("tests/tasks/test_checks.py",),
    ),
    Mutant(
        "sockets-for-everybody",
        "other users can put their own sockets in place of Ray's",
        "storage/ownership/scratch.py",
        "    folder.mkdir(mode=0o700)\n",
        "    folder.mkdir(mode=0o755)\n",
        ("tests/tasks/test_checks.py",),
    ),
    Mutant(
        "folder-of-a-dead-ray-stays",
        "what a killed process's Ray has left stays for ever",
        "storage/ownership/scratch.py",
        "    for names, digits, base in ((_NAME, 6, 10), (_SHORT_NAME, 3, 16)):\n",
        "    for names, digits, base in ((_NAME, 6, 10),):\n",
        ("tests/tasks/workers/test_scratch.py",),
    ),
    Mutant(
        "root-for-everybody",
        "a storage root that is made here can be read by every user",
        "storage/backends/local.py",
        "mode=0o777 if inside else 0o700",
        "mode=0o777",
        (
            "tests/storage/backends/test_root.py::test_a_root_that_is_made_here_is_this_users_alone_and_one_that_is_there_keeps_its_mode",
        ),
    ),
)
