#!/bin/sh
# Install what bench.py plays beside this project, each in an environment of its own in the cache. It needs Python 3.12.
#   sh scripts/exactness/setup.sh [PYTHON]
set -eu
place="${XDG_CACHE_HOME:-$HOME/.cache}/claude-code-rl/exactness"
python="${1:-python3.12}"

install() {
    "$python" -m venv "$place/$1"
    into="$place/$1/bin/python"
    shift
    "$into" -m pip install --quiet "$@"
}

install verifiers verifiers==0.4.0
install lightning1 agentlightning==1.0.2
# What makes its rows wants this project's torch and verl, beside which another version is installed.
"$into" -m pip install --quiet --no-deps --target "$place/functions" agentlightning==1.0.2 httpx-retries
# With OpenTelemetry's newest exporter it stores no spans. LiteLLM's newer versions have no proxy to install.
install lightning0 agentlightning==0.3.0 "litellm[proxy]==1.103.7" "opentelemetry-exporter-otlp-proto-http<1.45"
