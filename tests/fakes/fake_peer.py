"""A peer whose prompts say what it does."""

import sys
import time

from benchmarks.peers.worker import Complete, Request, main


def start(folder: str) -> Complete:
    if folder == "broken":
        raise ValueError("no such model")

    def complete(request: Request) -> tuple[list[int], int]:
        print("chatter")
        if request["prompt"] == [1]:
            raise RuntimeError("out of luck")
        if request["prompt"] == [2]:
            time.sleep(60)
        if request["prompt"] == [3]:
            sys.exit("gone")
        return [*request["prompt"], 7, 0, 8], 3

    return complete


if __name__ == "__main__":
    sys.exit(main(start))
