"""Ranks with torchrun's environment, forked behind the imports, which are most of what a start costs.

`python tests/fakes/forked_ranks.py 2 PROGRAM.py [ARGUMENTS]`, or a module's name in place of the program.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import socket
import sys

import lpr.cli.generate


def fork_ranks(count: int, *modules: str) -> None:
    """Return in `count` children; the parent ends when all of them have ended, with the highest of their exit codes.

    Before, it imports `modules` too. Torchrun ends the others when one has failed. Here they notice it by themselves,
    or their time is up.
    """
    from transformers import conversion_mapping  # which compiles 1,000 patterns when the first model is loaded

    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    for name in ("transformers.models.llama.modeling_llama", *modules):
        importlib.import_module(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gc.freeze()  # a rank's collector would write to, and so copy, the pages of all that is imported
    ranks = []
    for rank in range(count):
        if (child := os.fork()) == 0:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")
            return
        ranks.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    sys.exit(max(codes, key=abs))


if __name__ == "__main__":
    assert lpr.cli.generate
    fork_ranks(int(sys.argv[1]))
    program, sys.argv = sys.argv[2], sys.argv[2:]
    run = runpy.run_path if program.endswith(".py") else runpy.run_module
    run(program, run_name="__main__")
