#!/usr/bin/env bash
# Run the same line on each of several machines, with its own number. They meet at the first one:
#   HEAD=host0:29400 NNODES=2 NODE_RANK=0 NPROC=8 launch/many_machines.sh [lpr.generate arguments...]
# Rank 0, on the machine with number 0, reads prompts and writes output.
# Nothing between the ranks asks who connects: keep their network apart from all others, and name its interface in
# GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (docs/security.md). The rendezvous is static, as torchrun's negotiated one
# runs what anybody who reaches its port sends.
set -euo pipefail
: "${HEAD:?set HEAD=host:port of the machine with number 0}" "${NNODES:?set NNODES to the number of machines}"
: "${NODE_RANK:?set NODE_RANK to the number of this machine, from 0 to NNODES - 1}"
exec torchrun --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="${NPROC:-8}" \
    --max-restarts="${MAX_RESTARTS:-0}" --master-addr="${HEAD%:*}" --master-port="${HEAD##*:}" -m lpr.generate "$@"
