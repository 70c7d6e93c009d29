"""Memory of cards while other processes use them."""

import shutil
import subprocess
import threading


class CardMemory:
    """Largest memory of each card in use during a block, as nvidia-smi tells; nothing without it."""

    def __init__(self, period_s: float = 2.0) -> None:
        self._period_s = period_s
        self._most: list[int] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="card-memory", daemon=True)

    @property
    def peak_gib(self) -> dict[str, float]:
        """By card, GiB."""
        return {f"card {number}: peak_gib": most / 1024 for number, most in enumerate(self._most)}

    def __enter__(self) -> "CardMemory":
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._end.wait(self._period_s):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                used = [int(line) for line in done.stdout.split()]
                self._most = [max(pair) for pair in zip(used, self._most or used, strict=True)]
