#!/usr/bin/env bash
# Starts the proxy before a vLLM server; README.md beside this file says more.
#
#   examples/proxy_alone/start.sh MODEL TOOL_PARSER [ENGINE_URL]
set -euo pipefail
model=${1:?usage: start.sh MODEL TOOL_PARSER [ENGINE_URL]} parser=${2:?usage: start.sh MODEL TOOL_PARSER [ENGINE_URL]}
engine=${3:-}
python=${PYTHON:-.venv/bin/python}
port=${PORT:-8080}

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 143' TERM

if [ -z "$engine" ]; then
  engine=http://127.0.0.1:8000
  "$python" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port 8000 &
fi
"$python" -m rollout.proxy --engine "$engine" --model "$model" --tool-parser "$parser" --port "$port" &
wait -n # if one of them ends, so does the other
