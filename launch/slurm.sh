#!/usr/bin/env bash
# sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh [lpr.generate arguments...]
#SBATCH --job-name=lpr
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
set -euo pipefail
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p):29400"
export HEAD NNODES="$SLURM_JOB_NUM_NODES" NPROC="${SLURM_GPUS_ON_NODE:-8}" JOB="$SLURM_JOB_ID"
exec srun --kill-on-bad-exit=1 "${SLURM_SUBMIT_DIR:-.}/launch/many_machines.sh" "$@"
