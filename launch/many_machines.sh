#!/usr/bin/env bash
# Run the same line on each of several machines. They meet at the first one:
#   HEAD=host0:29400 NNODES=2 NPROC=8 launch/many_machines.sh [lpr.generate arguments...]
# Rank 0 reads prompts and writes output, and it may run on any machine: give paths that all machines see.
set -euo pipefail
: "${HEAD:?set HEAD=host:port of the machine at which all meet}" "${NNODES:?set NNODES to the number of machines}"
exec torchrun --nnodes="$NNODES" --nproc_per_node="${NPROC:-8}" --max-restarts="${MAX_RESTARTS:-0}" \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-id="${JOB:-lpr}" -m lpr.generate "$@"
