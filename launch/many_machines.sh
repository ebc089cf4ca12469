#!/usr/bin/env bash
# The same line on each of several machines, which meet at the first one:
#   HEAD=host0:29400 NNODES=2 NPROC=8 launch/many_machines.sh [lpr.generate arguments...]
# Prompts and output are read and written by rank 0, on whichever machine that is: give paths that all of them see.
set -euo pipefail
: "${HEAD:?set HEAD=host:port of the machine at which all meet}" "${NNODES:?set NNODES to the number of machines}"
exec torchrun --nnodes="$NNODES" --nproc_per_node="${NPROC:-8}" --max-restarts="${MAX_RESTARTS:-0}" \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-id="${JOB:-lpr}" -m lpr.generate "$@"
