#!/usr/bin/env bash
# Installs the programs of the agents that tests play (make test-agents), where they are missing. They are in the user's
# cache, as with the command itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v npm >/dev/null || .ci/install npm
.venv/bin/python -m rl.agents install codex opencode qwen_code mini_swe_agent gemini_cli >/dev/null
.venv/bin/python -m rl.agents install openhands >/dev/null || true # its tests are skipped where it finds no Python
