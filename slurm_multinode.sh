#!/usr/bin/env bash
# Train on several nodes, one torchrun a node. Submit it from the root of the checkout, which all nodes must see:
#
#   sbatch -N 4 --gpus-per-node 8 slurm_multinode.sh dlrm.py experiment=dlrm_criteo_t0 data.path=DIR
#
# Everything behind the name of this script goes to the recipe as it is. Without a run_dir among it the run is in
# runs/<recipe>/job_<id>, which a requeued job finds again and goes on in. Python is that of .venv if there is one, else
# the `python` of the submitting shell. What each log is, and what to do when something is wrong: docs/operations.md.
# Environment variables:
#
#   RANKS_PER_NODE     ranks of a node; default: one a GPU
#   NUMA_BINDING       torchrun's --numa-binding of each rank to the CPUs near its GPU, or none; default: node
#   MAX_RESTARTS       how often ranks that died are started again where they are; default: 3
#   MAX_REQUEUES       how often the job goes back to the queue after that; default: 10. A time limit does not count.
#   CONTAINER_IMAGE    image to run in (srun's --container-image, of the pyxis plug-in); default: none
#   CONTAINER_MOUNTS   what the image sees of the cluster, such as /scratch/criteo:/data,/scratch/runs:/recsys/runs
#   CONTAINER_WORKDIR  where the recipe lies in the image; default: /recsys, as in our Dockerfile
#
#SBATCH --job-name=recsys
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x_%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail

fail() {
    echo "slurm_multinode.sh: $*" >&2
    exit 2
}

[[ $# -gt 0 ]] || fail "no recipe; write sbatch -N 2 slurm_multinode.sh dlrm.py [options]"
[[ -n ${SLURM_JOB_ID:-} ]] || fail "not a job; submit it with sbatch -N 2 slurm_multinode.sh $1"

python=python
container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    container=(--container-image="$CONTAINER_IMAGE" --container-workdir="${CONTAINER_WORKDIR:-/recsys}")
    [[ -z ${CONTAINER_MOUNTS:-} ]] || container+=(--container-mounts="$CONTAINER_MOUNTS")
else
    [[ -f $1 ]] || fail "no file $1 in $PWD; submit from the root of the checkout"
    [[ ! -x .venv/bin/python ]] || python=$PWD/.venv/bin/python
fi

# The first node is the meeting point. Jobs that share it meet at different ports.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[[ ${#nodes[@]} -gt 0 ]] || fail "scontrol names no host in SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"
port=$((20000 + SLURM_JOB_ID % 20000))

# The job keeps its number when it is requeued, so the same directory is found again.
recipe=$(basename -- "$1" .py)
run_dir=runs/$recipe/job_$SLURM_JOB_ID
logs=$run_dir/logs/start_${SLURM_RESTART_COUNT:-0}
arguments=("$@")
named=false
for argument in "$@"; do
    [[ $argument != run_dir=* ]] || named=true
done
$named || arguments+=("run_dir=$run_dir")

# SLURM warns this script before the time limit. The signal ends `wait`, not the step, which is told and waited for.
step=
warned=false
cancelled=false
trap 'warned=true; [[ -z $step ]] || kill -s USR1 "$step" || true' USR1
trap 'cancelled=true' TERM

# When one node has ended the others have a minute to do so too. Python would otherwise write its logs in blocks.
export SLURM_WAIT=${SLURM_WAIT:-60} PYTHONUNBUFFERED=1

# nn/distributed/node_launcher.py is torchrun with a log a rank and an exit code that means something. It numbers the ranks and tells each of
# them LOCAL_WORLD_SIZE, which the sharding plan needs. Without --cpu-bind=none all ranks of a node would share the one
# core of srun's one task.
srun \
    --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
    --cpu-bind=none --kill-on-bad-exit=0 \
    ${container[@]+"${container[@]}"} \
    "$python" -m nn.distributed.node_launcher "$logs" "${NUMA_BINDING:-node}" \
    --nnodes="${#nodes[@]}" --nproc-per-node="${RANKS_PER_NODE:-gpu}" --max-restarts="${MAX_RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$port" --rdzv-id="$SLURM_JOB_ID" \
    "${arguments[@]}" &
step=$!
# One that came before the step had a number.
! $warned || kill -s USR1 "$step" || true
code=0
wait "$step" || code=$?
while kill -0 "$step" 2> /dev/null; do
    code=0
    wait "$step" || code=$?
done

# 2, 3 and 130 would come again (nn/distributed/errors.py), and a job that was cancelled is not to come back.
case $code in 0 | 2 | 3 | 130) exit "$code" ;; esac
! $cancelled || exit "$code"
if ! $warned && ((${SLURM_RESTART_COUNT:-0} >= ${MAX_REQUEUES:-10})); then
    echo "slurm_multinode.sh: the ranks ended with $code, requeued ${MAX_REQUEUES:-10} times; the job ends" >&2
    exit "$code"
fi
echo "slurm_multinode.sh: the ranks ended with $code; the job goes back to the queue" >&2
scontrol requeue "$SLURM_JOB_ID"
