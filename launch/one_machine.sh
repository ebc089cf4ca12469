#!/usr/bin/env bash
# All GPUs of this machine (or NPROC processes): launch/one_machine.sh [lpr.generate arguments...]
# torchrun's store listens at PORT on every interface and asks for no password (docs/security.md). On a machine that
# others reach, run a file of prompts by `lpr.generate --survive`, which listens on loopback only.
set -euo pipefail
nproc=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
case "$OSTYPE" in darwin*) loopback=lo0 ;; *) loopback=lo ;; esac
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$loopback}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$loopback}"
exec torchrun --nnodes=1 --node-rank=0 --nproc-per-node="$((nproc > 0 ? nproc : 1))" \
    --max-restarts="${MAX_RESTARTS:-0}" --master-addr=127.0.0.1 --master-port="${PORT:-29500}" -m lpr.generate "$@"
