#!/usr/bin/env bash
# Makes .llamafactory, an environment with LLaMA-Factory and what it wants in other versions (constraints/llamafactory.txt,
# 60 MB). What is not there it takes from .venv: torch, and all that both agree on.
#
#   scripts/llamafactory.sh
#   .llamafactory/bin/llamafactory-cli train DIR/train.yaml      # of `python -m rl.export llamafactory RUN --out DIR`
#
# rl.sft trainer=llamafactory uses it. Does nothing when nothing changed: .llamafactory/.setup holds a hash of
# all that the result depends on, and is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

made=.llamafactory
fail() { echo "llamafactory: $*" >&2; exit 1; }
say() { printf '[%6d s] llamafactory: %s\n' $SECONDS "$*"; }

[ -x .venv/bin/python ] || fail "no .venv here; run scripts/setup.sh first"
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
key=$({ echo "$packages"; cat constraints/llamafactory.txt scripts/llamafactory.sh; } | sha256sum)
[ "$(cat $made/.setup 2>/dev/null)" != "$key" ] || exit 0

exec 9>.setup.lock
flock 9
[ "$(cat $made/.setup 2>/dev/null)" != "$key" ] || exit 0
say "making $made"
rm -rf $made
.venv/bin/python -m venv --without-pip $made
.venv/bin/python -m pip --python $made/bin/python install --quiet --quiet --disable-pip-version-check --no-deps \
  -r constraints/llamafactory.txt || fail "pip's message is above; the same command tries again"
own=$($made/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$packages" >"$own/zz-project.pth" # behind its own
# LLaMA-Factory imports torchaudio at its start, and uses it for audio only. PyPI's build needs CUDA's torch.
$made/bin/python -c 'import torchaudio' 2>/dev/null || : >"$own/torchaudio.py"
$made/bin/python -c 'import llamafactory.train.tuner' 2>$made/import.log || fail "cannot be imported: $(tail -n 1 $made/import.log)"
echo "$key" >$made/.setup
say done
