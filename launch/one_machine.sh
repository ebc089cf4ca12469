#!/usr/bin/env bash
# All GPUs of this machine (or NPROC processes): launch/one_machine.sh [lpr.generate arguments...]
set -euo pipefail
nproc=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
exec torchrun --standalone --nproc_per_node="$((nproc > 0 ? nproc : 1))" --max-restarts="${MAX_RESTARTS:-0}" \
    -m lpr.generate "$@"
