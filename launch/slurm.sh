#!/usr/bin/env bash
# sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh [lpr.generate arguments...]
# Nothing between the ranks asks who connects: see many_machines.sh about their network.
#SBATCH --job-name=lpr
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
set -euo pipefail
# A port of each job's own, as two of them may share a machine.
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p):$((20000 + SLURM_JOB_ID % 10000))"
export HEAD NNODES="$SLURM_JOB_NUM_NODES" NPROC="${SLURM_GPUS_ON_NODE:-8}"
# shellcheck disable=SC2016  # each task reads its own number
exec srun --kill-on-bad-exit=1 bash -c 'NODE_RANK="$SLURM_NODEID" exec "$0" "$@"' \
    "${SLURM_SUBMIT_DIR:-.}/launch/many_machines.sh" "$@"
