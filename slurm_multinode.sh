#!/usr/bin/env bash
# Train on several nodes with one torchrun per node. Submit it from the root of the checkout, which all nodes must see, or
# name the recipe of a checkout by its path:
#
#   sbatch -N 4 --gpus-per-node 8 slurm_multinode.sh dlrm.py experiment=dlrm_criteo_t0 data.path=DIR
#
# All arguments are passed to the recipe unchanged. Without run_dir=... the run directory is runs/<recipe>/job_<id>, and a
# requeued job resumes there. Python is that of the checkout's .venv if it exists, else the `python` of the submitting
# shell. Logs and troubleshooting: docs/operations.md. Environment variables:
#
#   RANKS_PER_NODE     ranks per node; default: one per GPU
#   NUMA_BINDING       torchrun's --numa-binding of each rank to the CPUs near its GPU, or none; default: node
#   MAX_RESTARTS       restarts of failed ranks within the job (torchrun's --max-restarts); default: 3
#   MAX_REQUEUES       requeues in a row after starts that failed, or (training without checkpoint.mirror) that ended at the step
#                      at which they began; default: 10
#   SBATCH_SIGNAL      sbatch's own: the warning before the time limit; default: B:USR1@300
#   CONTAINER_IMAGE    image to run in (srun's --container-image, of the pyxis plug-in); default: none
#   CONTAINER_MOUNTS   directories to mount in the container, such as /scratch/criteo:/data,/scratch/runs:/recsys/runs
#   CONTAINER_WORKDIR  directory of the recipe in the image; default: /recsys, as in our Dockerfile. Mount a directory of the
#                      cluster on its runs/: the reason why a start ended, and how many did, lie there
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
[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] || fail "not a job; submit it with sbatch -N 2 slurm_multinode.sh $1"
# A step of srun holds what a step below it would wait for. The shell of salloc may be one too, with a special number. A job that
# sbatch was given within a step inherits the step's variables; SLURM runs its script under this name.
[[ ${0##*/} == slurm_script || ! ${SLURM_STEP_ID:-none} =~ ^[0-9]{1,9}$ ]] ||
    fail "inside srun, which holds the nodes; write sbatch -N 2 slurm_multinode.sh $1, or salloc -N 2 ./slurm_multinode.sh $1"

# SLURM sends USR1 to this script before the time limit. The signal interrupts `wait` only; the trap forwards it to the step.
step=
warned=false
cancelled=false
trap 'warned=true; [[ -z $step ]] || kill -s USR1 "$step" || true' USR1
trap 'cancelled=true' TERM

[[ ${RANKS_PER_NODE:-gpu} =~ ^(gpu|cpu|auto|0*[1-9][0-9]*)$ ]] ||
    fail "RANKS_PER_NODE is a number of ranks, or gpu for one per GPU, not '$RANKS_PER_NODE'"
for count in "${MAX_RESTARTS:-3}" "${MAX_REQUEUES:-10}"; do
    [[ $count =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS and MAX_REQUEUES are numbers, not '$count'"
done

# Seconds of a time limit of SLURM, as 5:00 or 1-12:00:00.
seconds_of() {
    local days=0 clock=$1 total=0 part
    [[ $clock != *-* ]] || days=${clock%%-*}
    for part in ${clock#*-}; do total=$((total * 60 + 10#$part)); done
    echo $((total + days * 86400))
}

# A start that is warned before it trains would be requeued without end. SLURM runs a copy of this script, whose directive
# SBATCH_SIGNAL replaces; that of the command line is not to be seen here.
job=$(scontrol --oneliner show job "$SLURM_JOB_ID" || true)
[[ $job != *HetJobId=* ]] ||
    fail "a heterogeneous job, of which only the first component would train; ask for equal nodes, without ':'"
signal=${SBATCH_SIGNAL:-$(sed -n 's/^#SBATCH --signal=//p' "$0")}
[[ $job != *BatchFlag=1* || ${signal^^} =~ (USR1|(^|:)10)(@|$) ]] ||
    fail "SBATCH_SIGNAL=$signal: the warning before the time limit is USR1, as in B:USR1@300"
if [[ $job == *BatchFlag=1* && $signal == *@* && $job =~ TimeLimit=([0-9:-]+) ]]; then
    limit=$(IFS=: && seconds_of "${BASH_REMATCH[1]}")
    ((limit > ${signal##*@})) || fail "--time ($limit s) is not longer than the warning before it (${signal##*@} s), so" \
        "no start could train; ask for more time, or set the warning: SBATCH_SIGNAL=B:USR1@SECONDS sbatch ..." \
        "(sbatch --signal is not seen here: with it, set SBATCH_SIGNAL too)"
fi

python=python
runs=runs
container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    root=${CONTAINER_WORKDIR:-/recsys}
    container=(--container-image="$CONTAINER_IMAGE" --container-workdir="$root")
    [[ -z ${CONTAINER_MOUNTS:-} ]] || container+=(--container-mounts="$CONTAINER_MOUNTS")
    # This script runs outside.
    ! [[ ,${CONTAINER_MOUNTS:-} =~ ,([^,:]+):"$root"/runs/?([,:]|$) ]] || runs=${BASH_REMATCH[1]}
else
    [[ -f $1 ]] || fail "no file $1 in $PWD; submit from the root of the checkout"
    root=$PWD
    [[ -f nn/distributed/node_launcher.py ]] || root=$(cd -- "$(dirname -- "$1")" && pwd)
    [[ -f $root/nn/distributed/node_launcher.py ]] ||
        fail "neither $PWD nor $root is a checkout (no nn/distributed); submit from the root of the checkout"
    [[ ! -d $root/.venv ]] || python=$root/.venv/bin/python
fi

# The first node is the rendezvous endpoint. Jobs may share a node, and other programs may hold a port: it depends on the job
# and the start, the first one that nobody listens to is taken, and Linux gives none below 32768 to a client.
mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}")
[[ ${#nodes[@]} -gt 0 ]] || fail "scontrol names no host in SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST:-}"
for try in {0..99}; do
    port=$((20000 + (SLURM_JOB_ID + 7919 * ${SLURM_RESTART_COUNT:-0} + try) % 12768))
    # shellcheck disable=SC2016
    timeout 2 bash -c ': <> "/dev/tcp/$0/$1"' "${nodes[0]}" "$port" 2> /dev/null || break
    echo "slurm_multinode.sh: port $port of ${nodes[0]} is taken by another process; the rendezvous takes another" >&2
done

# A requeued job keeps its id, so it uses the same directory.
recipe=$(basename -- "$1" .py)
run_dir=runs/$recipe/job_$SLURM_JOB_ID
logs=$run_dir/logs/start_${SLURM_RESTART_COUNT:-0}
job_dir=$runs/${run_dir#runs/}
ended_with=$runs/${logs#runs/}/ended_with
arguments=("$@")
named=false
for argument in "$@"; do
    [[ ! $argument =~ ^(--|\+*)run_dir= ]] || named=true
done
$named || arguments+=("run_dir=$run_dir")

# When the task of one node has ended, the others have a minute to end too. PYTHONUNBUFFERED makes logs appear at once.
export SLURM_WAIT=${SLURM_WAIT:-60} PYTHONUNBUFFERED=1

# nn/distributed/node_launcher.py is torchrun with one log per rank and the exit codes of configs/exit_codes.py. It numbers
# the ranks and sets LOCAL_WORLD_SIZE, which the sharding plan needs. What the node lacks cannot heal, so it ends the job:
# srun reports the largest code of all nodes, which is 137 where others waited in vain, and not this one.
# shellcheck disable=SC2016
on_node='
root=$1 logs=$2 python=$3
shift 3
for file in "$python" "$root/nn/distributed/node_launcher.py"; do
    command -v "$file" > /dev/null || [ -f "$file" ] || {
        echo "error: node ${SLURMD_NODENAME:-}: there is no $file; all nodes must see the checkout and its .venv" >&2
        mkdir -p "$logs" && echo 2 > "$logs/ended_with"
        exit 2
    }
done
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m nn.distributed.node_launcher "$logs" "$@"'

# Without --cpu-bind=none all ranks of a node would share the one core of srun's task; without a plug-in that binds, srun only
# complains about it.
binding=()
[[ $(scontrol show config || true) == *task/none* ]] || binding=(--cpu-bind=none)

# Commands of one salloc have the same job and start, and none of them is a requeue.
rm -f "$ended_with"
[[ $job != *BatchFlag=0* ]] || rm -f "$job_dir/starts.txt"

srun \
    --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
    ${binding[@]+"${binding[@]}"} --kill-on-bad-exit=0 \
    ${container[@]+"${container[@]}"} \
    /bin/sh -c "$on_node" sh "$root" "$logs" "$python" "${NUMA_BINDING:-node}" \
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
[[ ! -s $ended_with ]] || code=$(< "$ended_with")
case $code in 0 | 2 | 3 | 130) exit "$code" ;; esac
! $cancelled || exit "$code"
if [[ $job == *BatchFlag=0* || $job == *Requeue=0* ]]; then
    echo "slurm_multinode.sh: the ranks ended with $code; a job of salloc or with --no-requeue is not requeued, and the same" \
        "command with the same run_dir resumes" >&2
    exit "$code"
fi
# Failures in a row. The launcher counts the starts in a row of a training that trained nothing; 75 says that it ran.
record=$job_dir/failures
mkdir -p "$job_dir"
failures=0
[[ $code == 75 ]] || failures=$(($(cat "$record" 2> /dev/null || echo 0) + 1))
echo "$failures" > "$record"
if ((failures > 10#${MAX_REQUEUES:-10})); then
    echo "slurm_multinode.sh: the ranks ended with $code, requeued ${MAX_REQUEUES:-10} times in a row; the job ends" >&2
    exit "$code"
fi
echo "slurm_multinode.sh: the ranks ended with $code; the job is requeued" >&2
# The id of an array's last task is that of the array, of which all tasks would be requeued.
task=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
scontrol requeue "$task"
