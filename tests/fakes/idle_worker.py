"""A rank of a job that idles: completes a prompt, idles, completes it again. Started by test_idle, without a launcher.

Arguments: the step's time-out, seconds to idle, and what rank 0 does then: "answer" again, "wait" for a lost rank, or
"decode" until one is lost.
Rank 0 prints one JSON line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

import lpr
from lpr.dist.errors import CommError
from lpr.dist.runtime import World, join, leave

PROMPT, PARAMS = "def f(", lpr.SamplingParams(max_new_tokens=12)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    timeout, idle, then = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    world = World.from_environment()
    with join(world, "cpu", timeout, load_timeout=120) as comm:
        engine = lpr.Engine.from_pretrained(
            lpr.bundled_model(), lpr.DecodeConfig(window_size=0, trie_nodes=8), comm=comm, device="cpu"
        )
        if comm.rank:
            try:
                used, began = cpu_seconds(), time.monotonic()
                engine.work()
                print(json.dumps({"cpu": cpu_seconds() - used, "seconds": time.monotonic() - began}), flush=True)
            except CommError as failure:
                print(json.dumps({"failure": str(failure), "at": time.time()}), flush=True)
                os._exit(1)
            return 0
        first = engine.generate([PROMPT], PARAMS)[0].token_ids
        print("idle", flush=True)
        used = cpu_seconds()
        time.sleep(idle)
        used = cpu_seconds() - used
        if then == "answer":
            second = engine.generate([PROMPT], PARAMS)[0].token_ids
            engine.close()
            print(json.dumps({"equal": first == second, "cpu": used}), flush=True)
            return 0
        try:
            while True:
                if then == "decode":
                    engine.generate([PROMPT], PARAMS)
                else:
                    engine.step()
                    time.sleep(0.05)
        except CommError as failure:
            print(json.dumps({"failure": str(failure), "at": time.time()}), flush=True)
            os._exit(1)


if __name__ == "__main__":
    leave(main())
