"""A rank of a supervised job, for tests: decodes what a file asks for, and says which rank did what, when.

Arguments: a folder, tokens per request, and ranks to a replica. The driver writes a line of JSON per step to `log` in
the folder, and each request's ids to a file of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import lpr
from lpr.dist.runtime import World, join, leave

PROMPTS = ["def f(", "class A:\n    def ", "import os\n"]


def main() -> int:
    folder, count, tp = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    world = World.from_environment()
    with join(world, "cpu", 60, tp, load_timeout=120) as comm:
        engine = lpr.Engine.from_pretrained(
            lpr.bundled_model(),
            lpr.DecodeConfig(window_size=0, trie_nodes=8, max_batch_size=2),
            comm=comm,
            device="cpu",
        )
        engine.work()
        if engine.is_stopped:
            engine.close()
            return 0
        log = (folder / "log").open("a")

        assert comm.membership is not None
        membership = comm.membership

        def say(**facts: object) -> None:
            decision = membership._rendezvous.decision(membership.epoch)
            beside = decision is not None and decision.beside > 0
            fact = {"at": time.time(), "pid": os.getpid(), "epoch": membership.epoch, "beside": beside, **facts}
            print(json.dumps(fact), file=log, flush=True)

        say(drives=world.rank, size=comm.size)
        done = {path.stem for path in folder.glob("*.out")}
        for number, prompt in enumerate(PROMPTS):
            if str(number) not in done and number not in engine.requests:
                temperature = 0.8 if number % 2 else 0.0
                params = lpr.SamplingParams(max_new_tokens=count, temperature=temperature, seed=number, ignore_eos=True)
                engine.submit(prompt, params, id=number)
        while not engine.is_idle or (folder / "hold").exists():
            for request in engine.step():
                if request.finish_reason is not None:
                    (folder / f"{request.id}.new").write_text(json.dumps(request.completion().token_ids))
                    (folder / f"{request.id}.new").rename(folder / f"{request.id}.out")
            say(size=comm.size, tokens=sum(request.num_output for request in engine.requests.values()))
            if engine.is_idle:
                time.sleep(0.1)
        engine.close()
    return 0


if __name__ == "__main__":
    leave(main())
