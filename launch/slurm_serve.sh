#!/usr/bin/env bash
# The service on the machines of a SLURM job, one mesh per job. `--array=0-3` starts four meshes, each with its own port:
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm_serve.sh --model M --lp 2 --tp 8 [lpr.serve arguments...]
# lp x tp is the number of the job's GPUs. The output begins with the address of the service, on the job's first machine.
# Others reach it there: set LPR_API_KEY (sbatch passes it on), or say --insecure. Nothing between the ranks of several
# machines asks who connects: see many_machines.sh about their network.
#SBATCH --job-name=lpr-serve
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --signal=TERM@60
set -euo pipefail
if [[ -z "${LPR_API_KEY:-}" && " $* " != *" --api-key"* && " $* " != *" --insecure "* ]]; then
    echo "lpr.serve: set LPR_API_KEY, give --api-key-file FILE, or say --insecure to serve everybody" >&2
    exit 2
fi
export HEAD NPROC PORT
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
NPROC="${SLURM_GPUS_ON_NODE:-8}"
PORT="$((${PORT:-8000} + ${SLURM_ARRAY_TASK_ID:-0}))"
echo "lpr.serve: http://$HEAD:$PORT"
# The last 60 seconds are for open requests: torchrun gives its ranks 30 of them.
set -- --host 0.0.0.0 --port "$PORT" --shutdown-timeout 25 "$@"
if [ "$SLURM_JOB_NUM_NODES" = 1 ]; then
    # On one machine the service starts the ranks itself and replaces lost ones.
    exec srun --kill-on-bad-exit=1 python -m lpr.serve "$@"
fi
# Rank 0 answers and must run on the machine with number 0, so --node-rank is given instead of negotiated.
# shellcheck disable=SC2016  # each task reads its own number
exec srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID" \
    --nproc-per-node="$NPROC" --master-addr="$HEAD" --master-port="$((PORT + 20000))" -m lpr.serve "$@"' lpr "$@"
