# What the batch scripts of this directory have in common. They source it in the clone's directory, because SLURM runs a
# copy of them somewhere else, with $script set to their name. It sets python, container and needs.

say() { echo "$script: $1" >&2; }
refuse() { say "$1" && exit 2; }

# What is special about this site: modules, proxies, HF_HOME, limits. srun takes all of it to every node. The files of
# others, such as the one of modules, may use variables that are not set.
site=${RL_SITE:-scripts/slurm/site.sh}
if [ -e "$site" ]; then
  set +u
  . "$site"
  set -u
elif [ -n "${RL_SITE:-}" ]; then
  refuse "RL_SITE: no file $RL_SITE"
fi

# How Python is started on a node: the one place to change. RL_ENV chooses.
container=()
case ${RL_ENV:-venv} in
  venv) # scripts/setup.sh, on a disk that all nodes share
    python=("$PWD/.venv/bin/python") needs="run scripts/setup.sh, on a disk that all nodes share" ;;
  packed) # RL_IMAGE: a file of scripts/slurm/packed_env.sh
    [ -e "${RL_IMAGE:-}" ] || refuse "RL_ENV=packed: no file RL_IMAGE=${RL_IMAGE:-}; scripts/slurm/packed_env.sh makes one"
    python=(scripts/slurm/packed_env.sh run "$RL_IMAGE") needs="the clone must have it" ;;
  apptainer) # RL_IMAGE: a .sif file; RL_BIND: more paths, SRC[:DST],...
    [ -e "${RL_IMAGE:-}" ] || refuse "RL_ENV=apptainer: no file RL_IMAGE=${RL_IMAGE:-}; give a .sif file"
    python=(apptainer exec --nv --bind "$PWD${RL_BIND:+,$RL_BIND}" --pwd "$PWD" "$RL_IMAGE" python3)
    needs="RL_ENV=apptainer needs apptainer: load its module before sbatch" ;;
  pyxis) # RL_IMAGE: an image's name or a .sqsh file; RL_BIND: more mounts, SRC:DST,...
    [ -n "${RL_IMAGE:-}" ] || refuse "RL_ENV=pyxis: RL_IMAGE is not set; give an image"
    srun --help 2>&1 | grep -q -- --container-image || refuse "RL_ENV=pyxis, but srun here has no pyxis plugin"
    container=(--container-image="$RL_IMAGE" --container-workdir="$PWD"
      --container-mounts="$PWD:$PWD,/tmp:/tmp${RL_BIND:+,$RL_BIND}")
    python=(python3) needs="RL_IMAGE must have it" ;;
  *) refuse "RL_ENV is '$RL_ENV'; it must be venv, packed, apptainer or pyxis" ;;
esac

# Run Python on the node of a job that has one. srun passes SIGTERM on (end of time, scancel). --export: also after
# sbatch --export=NONE the task needs what is exported here.
run_alone() {
  [ -n "${container[*]}" ] || command -v "${python[0]}" >/dev/null || {
    say "node $SLURMD_NODENAME: no ${python[0]}; $needs"
    exit 69
  }
  exec srun --export=ALL --nodes=1 --ntasks=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    --cpu-bind=none "${container[@]}" "${python[@]}" "$@"
}
