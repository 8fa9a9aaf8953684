#!/usr/bin/env bash
# Train on several nodes with one torchrun per node. Submit it from the root of the checkout, which all nodes must see:
#
#   sbatch -N 4 --gpus-per-node 8 slurm_multinode.sh dlrm.py experiment=dlrm_criteo_t0 data.path=DIR
#
# All arguments are passed to the recipe unchanged. Without run_dir=... the run directory is runs/<recipe>/job_<id>, and a
# requeued job resumes there. Python is that of .venv if it exists, else the `python` of the submitting shell. Logs and
# troubleshooting: docs/operations.md. Environment variables:
#
#   RANKS_PER_NODE     ranks per node; default: one per GPU
#   NUMA_BINDING       torchrun's --numa-binding of each rank to the CPUs near its GPU, or none; default: node
#   MAX_RESTARTS       restarts of failed ranks within the job (torchrun's --max-restarts); default: 3
#   MAX_REQUEUES       requeues of the job after that; default: 10. A requeue at the time limit does not count.
#   CONTAINER_IMAGE    image to run in (srun's --container-image, of the pyxis plug-in); default: none
#   CONTAINER_MOUNTS   directories to mount in the container, such as /scratch/criteo:/data,/scratch/runs:/recsys/runs
#   CONTAINER_WORKDIR  directory of the recipe in the image; default: /recsys, as in our Dockerfile
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

# The first node is the rendezvous endpoint. The port depends on the job id, since jobs may share a node.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[[ ${#nodes[@]} -gt 0 ]] || fail "scontrol names no host in SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"
port=$((20000 + SLURM_JOB_ID % 20000))

# A requeued job keeps its id, so it uses the same directory.
recipe=$(basename -- "$1" .py)
run_dir=runs/$recipe/job_$SLURM_JOB_ID
logs=$run_dir/logs/start_${SLURM_RESTART_COUNT:-0}
arguments=("$@")
named=false
for argument in "$@"; do
    [[ $argument != run_dir=* ]] || named=true
done
$named || arguments+=("run_dir=$run_dir")

# SLURM sends USR1 to this script before the time limit. The signal interrupts `wait` only; the trap forwards it to the step.
step=
warned=false
cancelled=false
trap 'warned=true; [[ -z $step ]] || kill -s USR1 "$step" || true' USR1
trap 'cancelled=true' TERM

# When the task of one node has ended, the others have a minute to end too. PYTHONUNBUFFERED makes logs appear at once.
export SLURM_WAIT=${SLURM_WAIT:-60} PYTHONUNBUFFERED=1

# nn/distributed/node_launcher.py is torchrun with one log per rank and the exit codes of configs/exit_codes.py. It numbers
# the ranks and sets LOCAL_WORLD_SIZE, which the sharding plan needs. Without --cpu-bind=none all ranks of a node would share
# the one core of srun's task.
srun \
    --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
    --cpu-bind=none --kill-on-bad-exit=0 \
    ${container[@]+"${container[@]}"} \
    "$python" -m nn.distributed.node_launcher "$logs" "${NUMA_BINDING:-node}" \
    --nnodes="${#nodes[@]}" --nproc-per-node="${RANKS_PER_NODE:-gpu}" --max-restarts="${MAX_RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$port" --rdzv-id="$SLURM_JOB_ID" \
    "${arguments[@]}" &
step=$!
# The signal may have come before the step had a process id.
! $warned || kill -s USR1 "$step" || true
code=0
wait "$step" || code=$?
while kill -0 "$step" 2> /dev/null; do
    code=0
    wait "$step" || code=$?
done

# 2, 3 and 130 are permanent (configs/exit_codes.py), and a cancelled job is not requeued.
case $code in 0 | 2 | 3 | 130) exit "$code" ;; esac
! $cancelled || exit "$code"
if ! $warned && ((${SLURM_RESTART_COUNT:-0} >= ${MAX_REQUEUES:-10})); then
    echo "slurm_multinode.sh: the ranks ended with $code, requeued ${MAX_REQUEUES:-10} times; the job ends" >&2
    exit "$code"
fi
echo "slurm_multinode.sh: the ranks ended with $code; the job is requeued" >&2
scontrol requeue "$SLURM_JOB_ID"
