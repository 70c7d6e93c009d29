#!/usr/bin/env bash
# Rewrites infra/requirements/{cpu,gpu}.txt from pyproject.toml. The files hold versions and hashes, no addresses.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$([ -x .tools/bin/uv ] && echo .tools/bin/uv || echo uv)
for variant in cpu gpu; do
  "$uv" pip compile pyproject.toml --quiet --extra "$variant" --group dev --python-version 3.12 \
    --python-platform x86_64-manylinux_2_35 --generate-hashes --no-emit-index-url --no-header --no-annotate \
    --output-file "infra/requirements/$variant.txt" "$@"
done
