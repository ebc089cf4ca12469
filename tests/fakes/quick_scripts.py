"""`torchrun` for shell scripts that tests start: forked behind the imports, as commands of Python are (quick_start.py).

The program of that name on a script's PATH hands its arguments, folder, environment and output on to the process of
the tests, which starts torchrun. Signals come through; where the program is killed, so is torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """#!{python} -SEI
import json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({door!r})
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: line.send(bytes([number])))
job = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(line, [len(job).to_bytes(4, "big")], [1, 2])
line.sendall(job)
sys.exit((line.recv(1) or b"\\1")[0])
"""


@pytest.fixture(scope="module")
def torchrun_path() -> Iterator[str]:
    """A PATH whose `torchrun` is forked; with LPR_TRUE_START one with that of this Python's packages."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if "LPR_TRUE_START" in os.environ:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="lpr-") as folder, socket.socket(socket.AF_UNIX) as door:
        name = f"{folder}/door"
        program = Path(folder, "torchrun")
        program.write_text(PROGRAM.format(python=sys.executable, door=name))
        program.chmod(0o755)
        door.bind(name)
        door.listen()
        threading.Thread(target=answer_all, args=(door,), daemon=True).start()
        try:
            yield f"{folder}:{path}"
        finally:
            door.shutdown(socket.SHUT_RDWR)  # which ends the thread


def answer_all(door: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=answer, args=(door.accept()[0],), daemon=True).start()


def answer(line: socket.socket) -> None:
    """Start torchrun for one program, pass its signals on, and tell it the exit code."""
    with line:
        head, outputs, *_ = socket.recv_fds(line, 4, 2)
        with line.makefile("rb", buffering=0) as reading:
            data = b""
            while len(data) < int.from_bytes(head, "big"):
                data += reading.read(1 << 16)
        words, folder, environment = json.loads(data)
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        try:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=outputs[0], stderr=outputs[1], start_new_session=True
            )
        finally:
            for each in outputs:
                os.close(each)

        def tell() -> None:
            code = process.wait()
            with contextlib.suppress(OSError):
                line.send(bytes([code if code >= 0 else 128 - code]))

        waiting = threading.Thread(target=tell, daemon=True)
        waiting.start()
        with contextlib.suppress(OSError):
            while number := line.recv(1):
                process.send_signal(number[0])
        process.kill()  # unless it has ended
        waiting.join()
