"""Bring a model from the hub into its cache: `python -m tasks.data.download NAME REVISION FOLDER`, in its own process.

The token is in the environment. One JSON object on standard output: the folder, or the error.
"""

import json
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from tasks.data.model_files import TEXT_FILES, WEIGHTS_PATTERNS


def main(name: str, revision: str, folder: str) -> None:
    """Fetch what a run takes from a model's folder."""
    before = f"{folder}/" if folder else ""
    patterns = [before + pattern for pattern in (*TEXT_FILES, *WEIGHTS_PATTERNS)]
    try:
        found = snapshot_download(
            name, revision=revision or None, allow_patterns=patterns, ignore_patterns="consolidated*"
        )
        answer = {"folder": str(Path(found, folder))}
    except (HfHubHTTPError, OSError, ValueError) as error:
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
