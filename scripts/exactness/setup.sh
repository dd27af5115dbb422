#!/bin/sh
# Install what bench.py plays beside this project, each in an environment of its own in the cache. It needs Python 3.12.
#   sh scripts/exactness/setup.sh [PYTHON]
set -eu
for one in verifiers==0.4.0 agentlightning==1.0.2; do
    place="${XDG_CACHE_HOME:-$HOME/.cache}/claude-code-rl/exactness/${one%%=*}"
    "${1:-python3.12}" -m venv "$place"
    "$place/bin/python" -m pip install --quiet "$one"
done
# What makes agentlightning's rows wants this project's torch and verl, beside which its other version is installed.
"$place/bin/python" -m pip install --quiet --no-deps --target "${place%/*}/functions" "$one" httpx-retries
