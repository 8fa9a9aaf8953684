#!/usr/bin/env bash
# Train on several nodes, one torchrun a node. Submit it from the root of the checkout, which all nodes must see:
#
#   sbatch -N 4 --gpus-per-node 8 slurm_multinode.sh dlrm.py experiment=dlrm_criteo_t0 data.path=DIR
#
# Everything behind the name of this script goes to torchrun as it is: a recipe, then its options. It runs in .venv if
# there is one, else with the `python` of the submitting shell. Environment variables:
#
#   RANKS_PER_NODE     ranks of a node; default: one a GPU
#   CONTAINER_IMAGE    image to run in (srun's --container-image, of the pyxis plug-in); default: none
#   CONTAINER_MOUNTS   what the image sees of the cluster, such as /scratch/criteo:/data,/scratch/runs:/recsys/runs
#
#SBATCH --job-name=recsys
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x_%j.log
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
    container=(--container-image="$CONTAINER_IMAGE")
    [[ -z ${CONTAINER_MOUNTS:-} ]] || container+=(--container-mounts="$CONTAINER_MOUNTS")
else
    [[ -f $1 ]] || fail "no file $1 in $PWD; submit from the root of the checkout"
    [[ ! -x .venv/bin/python ]] || python=$PWD/.venv/bin/python
fi

# The first node is the meeting point. Jobs that share it meet at different ports.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[[ ${#nodes[@]} -gt 0 ]] || fail "scontrol names no host in SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"
port=$((20000 + SLURM_JOB_ID % 20000))

# torchrun numbers the ranks and tells each of them LOCAL_WORLD_SIZE, which the sharding plan needs. Without
# --cpu-bind=none all ranks of a node would share the one core of srun's one task.
exec srun \
    --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
    --cpu-bind=none --kill-on-bad-exit=1 \
    ${container[@]+"${container[@]}"} \
    "$python" -m torch.distributed.run \
    --nnodes="${#nodes[@]}" --nproc-per-node="${RANKS_PER_NODE:-gpu}" \
    --rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$port" --rdzv-id="$SLURM_JOB_ID" \
    "$@"
