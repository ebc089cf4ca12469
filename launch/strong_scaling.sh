#!/usr/bin/env bash
# Wall clock of 1, 2, 4 and 8 ranks on this machine's GPUs (or NPROC processes), with lookahead and tensor
# parallelism: launch/strong_scaling.sh --model M --data classeval.jsonl [benchmarks.fleet arguments...]
set -euo pipefail
nproc=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
meshes=(1x1)
for ranks in 2 4 8; do
    ((ranks > nproc)) || meshes+=("${ranks}x1" "1x$ranks")
    ((ranks > nproc || ranks < 4)) || meshes+=("$((ranks / 2))x2")
done
exec python -m benchmarks.fleet --meshes "${meshes[@]}" --output benchmarks/results/fleet.json "$@"
