#!/usr/bin/env bash
# Sets up .venv: pinned versions with hashes, bytecode compiled, the project installed in place.
# Needs Python 3.12 (or pyenv with it), make, git and a compiler. A second run installs nothing.
#
#   infra/setup.sh [cpu|gpu]     the default is gpu where nvidia-smi finds a device, else cpu
set -euo pipefail
cd "$(dirname "$0")/.."
UV_VERSION=0.13.8
variant=${1:-auto}
if [ "$variant" = auto ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then variant=gpu; else variant=cpu; fi
fi
pins=infra/requirements/$variant.txt
[ -f "$pins" ] || { echo "setup: there are no pins for '$variant': give cpu or gpu" >&2; exit 2; }

stamp=.venv/.ratchet-setup
wanted=$(cat "$pins" infra/setup.sh pyproject.toml | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }
find_python() {
  local candidate
  for candidate in python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    if command -v "$candidate" >/dev/null 2>&1 && is_312 "$candidate"; then command -v "$candidate"; return; fi
  done
  echo "setup: Python 3.12 is required but was not found: install python3.12, or 'pyenv install 3.12'" >&2
  exit 2
}
# a virtual environment of the caller's may have no pip: the Python that it was made from is used
python=$("$(find_python)" -c 'import sys; print(sys._base_executable)')

# uv of a pinned version, kept in the project and out of any other Python
if command -v uv >/dev/null 2>&1 && [ "$(uv --version 2>/dev/null | cut -d' ' -f2)" = "$UV_VERSION" ]; then
  uv=uv
else
  uv=.tools/bin/uv
  [ -x "$uv" ] && [ "$($uv --version | cut -d' ' -f2)" = "$UV_VERSION" ] ||
    "$python" -m pip install --quiet --disable-pip-version-check --upgrade --target .tools "uv==$UV_VERSION"
fi

echo "setup: installing the $variant stack into .venv (6 GB; minutes the first time)" >&2
still_there() { while sleep 15; do echo "setup: still at it after $SECONDS s, $(du -sh .venv 2>/dev/null | cut -f1) so far" >&2; done; }
still_there &
trap 'kill %1 2>/dev/null' EXIT
[ -x .venv/bin/python ] && is_312 .venv/bin/python || "$uv" venv --quiet --allow-existing --python "$python" .venv
# hard links from uv's cache: a second checkout costs no disk; where links are impossible uv copies
export UV_LINK_MODE=hardlink UV_PYTHON=.venv/bin/python UV_PYTHON_DOWNLOADS=never
if [ "$variant" = gpu ]; then
  # the Transformer Engine extension is built against the installed torch, so torch comes first
  grep -v '^ ' "$pins" | grep -q '^transformer-engine-torch' &&
    "$uv" pip sync --quiet --require-hashes <(awk '/^[a-z]/{keep = !/^transformer-engine-torch/} keep' "$pins")
  "$uv" pip sync --quiet --require-hashes --no-build-isolation-package transformer-engine-torch "$pins"
else
  "$uv" pip sync --quiet --require-hashes "$pins"
fi
"$uv" pip install --quiet --no-deps --no-build-isolation --editable .
echo "setup: compiling bytecode" >&2
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -W ignore -m compileall -q -j 0 .venv/lib/python3.12/site-packages \
  ratchet.py flows tasks trainer_core storage >/dev/null 2>&1 || true   # some packages ship templates that are not Python
echo "$wanted" >"$stamp"
