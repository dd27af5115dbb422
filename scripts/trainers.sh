#!/usr/bin/env bash
# Puts LLaMA-Factory and TRL, without what they need, into .trainers, and Inspect into .trainers/inspect: tests of exports
# load these with the programs' own loaders (make test-traces). They would replace packages of .venv, whose versions are
# verl's; their loaders do not need to.
#
# Does nothing when nothing changed: .trainers/.setup holds a hash of all that the result depends on, and is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

place=.trainers
key=$(cat constraints/trainers.txt constraints/inspect.txt scripts/trainers.sh | sha256sum)
[ "$(cat $place/.setup 2>/dev/null)" != "$key" ] || exit 0

rm -rf $place
put() { # $1: the constraints, $2: where
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$2" -r "$1" ||
    { echo "trainers: cannot install (pip's message is above); the same command tries again" >&2; exit 1; }
}
put constraints/trainers.txt $place
put constraints/inspect.txt $place/inspect
echo '"""LLaMA-Factory imports it; the CPU torch has none."""' >$place/torchaudio.py
echo "$key" >$place/.setup
