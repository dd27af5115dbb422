#!/usr/bin/env bash
# One file in place of the fifty thousand that Python reads from .venv, for nodes whose shared disk is slow with them.
#
#   scripts/slurm/packed_env.sh pack DIR             on the login node: .venv and its Python to DIR/env-<digest>.tar.zst
#   scripts/slurm/packed_env.sh run FILE ARGUMENTS   on a node: unpack it once below RL_LOCAL (/tmp), and run its python
#
# The digest is that of names, sizes and times of all files: what has not changed is not packed again. The batch
# scripts run it with RL_ENV=packed RL_IMAGE=FILE.
set -euo pipefail

command -v zstd >/dev/null ||
  { echo "$(hostname): no zstd, which packs and unpacks the environment; install it (Debian: zstd)" >&2 && exit 69; }
case ${1:-} in
  pack)
    venv=$(realpath .venv)
    python=$(realpath "$venv/bin/python")
    base=$(dirname "$(dirname "$python")")
    parts=("$venv")
    # A Python of the system is on every node; one in a home directory is packed too.
    case $base in /usr | /usr/local) ;; *) parts+=("$base") ;; esac
    digest=$(find "${parts[@]}" -type f ! -name '*.pyc' -printf '%P %s %T@\n' | sort | sha256sum | cut -c1-12)
    file=$(realpath "$2")/env-$digest.tar.zst
    if [ ! -e "$file" ]; then
      trap 'rm -f "$file.$$"' EXIT
      tar --create --directory=/ --transform="s,^${venv#/},venv,S" --transform="s,^${base#/},base,S" \
        "${parts[@]#/}" | zstd -q -T0 -3 -o "$file.$$"
      sync "$file.$$"
      mv "$file.$$" "$file"
    fi
    echo "$file" ;;
  run)
    file=$2
    shift 2
    place=${RL_LOCAL:-/tmp}/claude-code-rl-$(id -u)
    mkdir -p -m 700 "$place"
    [ -O "$place" ] || { echo "$place belongs to another user; set RL_LOCAL to another directory" >&2 && exit 69; }
    env=$place/$(basename "$file" .tar.zst)
    if [ ! -e "$env" ]; then
      building=$(mktemp -d "$env.XXXXXX")
      trap 'rm -rf "$building"' EXIT
      zstd -q -d -c "$file" | tar --extract --directory="$building" ||
        { echo "$(hostname): cannot unpack $file below $place (RL_LOCAL)" >&2 && exit 69; }
      if [ -d "$building/base" ]; then
        ln -sf "../../base/bin/$(basename "$(readlink "$building/venv/bin/python")")" "$building/venv/bin/python"
        sed -i "s,^home = .*,home = $env/base/bin," "$building/venv/pyvenv.cfg"
      fi
      mv -T "$building" "$env" 2>/dev/null || [ -e "$env" ] # another process was faster
    fi
    exec "$env/venv/bin/python" "$@" ;;
  *) echo "packed_env.sh pack DIR | run FILE ARGUMENTS" >&2 && exit 2 ;;
esac
