"""Prints what a process is, as JSON, and ends with 7; with "again", of a child too; with "wait", until it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

IS_FORKED = "torch" in sys.modules


def words_of(name: str) -> list[str]:
    return Path(f"/proc/self/{name}").read_text().rstrip("\0").split("\0")


facts = {
    "pid": os.getpid(),
    "parent": os.getppid(),
    "session": os.getsid(0),
    "folder": os.getcwd(),
    "forked": IS_FORKED,
    "arguments": sys.argv[1:],
    "command": words_of("cmdline"),
    "told": "NAME=value" in words_of("environ"),
    "name": os.environ.get("NAME"),
    "input": sys.stdin.read(),
    "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd"))[3:],
}
if "again" in sys.argv:
    command = [sys.executable, "-u", __file__, "last"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        found = json.loads(child.communicate()[0])
    facts["child"] = [found["forked"], found["pid"] == child.pid, found["parent"] == os.getpid(), child.returncode]
print(json.dumps(facts), flush=True)
if "wait" in sys.argv:
    signal.pause()
sys.exit(7)
