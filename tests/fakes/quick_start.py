"""Python processes that tests start are forked behind the imports of torch and transformers, 7 s of a core each.

`patch()` has `subprocess.Popen` (below `asyncio` and `torchrun` too) ask a process that has done the imports for a
child, where a command runs one of `MODULES` or a program of tests/fakes, and its environment has nothing of its own
that an import reads. Each child has such a process for its children: torchrun, the front and the supervisor start some.
Sandboxes are forked by a second process, which has imported what they import and nothing else.
The child is its caller's, with its pid, exit code, signals, descriptors, session, command line and environment.
It differs from one that was started: all have one hash seed, and pages that nobody writes are shared. Commands of shell
scripts (but for `torchrun`, with tests/fakes/quick_scripts.py) and those with `-c` are started, and all with
LPR_TRUE_START in their environment or in pytest's.

As a program this is the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = (
    "benchmarks.gpu_check",
    "lpr.generate",
    "lpr.serve",
    "lpr.serve.ranks.rank",
    "lpr.dist.supervisor",
    "torch.distributed.run",
    "tests.fakes.supervised_worker",
)
"""What a command may run by its module's name."""
SANDBOX = "lpr.serve.sandboxed"
SANDBOX_IMPORTS = "lpr.serve.checks", "lpr.serve.text.grammar_tasks"
IMPORTED = (
    "lpr.cli.generate",
    "lpr.serve.__main__",
    "lpr.serve.ranks.bridge",
    "torch.distributed.launcher.api",
    "torch.distributed.argparse_util",
    "transformers.models.llama.modeling_llama",
)
READ_BY_IMPORTS = (
    "ATEN", "CUDA", "GOMP", "HF_", "KMP", "LD_", "LPR_NATIVE", "LPR_TRUE", "MALLOC", "MKL", "OMP", "PYTHON",
    "TOKENIZERS", "TORCHINDUCTOR", "TORCH_", "TRANSFORMERS", "TRITON",
)  # fmt: skip
READ_LATER = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""Of these, variables that no import reads: torchrun sets the first for its ranks, a compilation the others."""
ROOM = "x" * 40000
"""For the command line, and for the environment, of a child in place of its first parent's."""
HIGH = 400
"""Descriptors come to numbers from this one first: a child may want the lower ones."""
IGNORED = signal.SIGHUP, signal.SIGINT, signal.SIGTERM
"""Signals that a child ignores if its parent does."""


def is_forker(pid: int | str) -> bool:
    return ROOM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def read_by_imports(environment: dict[str, str]) -> dict[str, str]:
    read = (name for name in environment if name.startswith(READ_BY_IMPORTS) and name not in READ_LATER)
    found = {name: environment[name] for name in read}
    if set(found.get("PYTHONPATH", "").split(os.pathsep)) <= {"", str(ROOT), *sys.path}:
        found.pop("PYTHONPATH", None)
    return found


class Forker:
    """The process that forks for this one."""

    def __init__(self, connection: socket.socket, environment: dict[str, str]) -> None:
        self.connection, self.lock, self.owner = connection, threading.Lock(), os.getpid()
        self.environment = read_by_imports(environment)

    def fork(self, job: dict[str, Any], descriptors: list[int]) -> int:
        """Have a child, whose pid is returned."""
        prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
        with self.lock:
            prctl(37, ctypes.byref(before), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
            prctl(36, 1, 0, 0, 0)  # the child's first parent ends, and then it is this process's
            try:
                data = json.dumps(job).encode()
                socket.send_fds(self.connection, [len(data).to_bytes(4, "big")], descriptors)
                self.connection.sendall(data)
                answer = self.connection.recv(4)
            finally:
                prctl(36, before.value, 0, 0, 0)
        assert len(answer) == 4, "the process that forks has ended"
        return int.from_bytes(answer, "big")


forker: Forker | None = None
sandboxes: Forker | None = None
"""Forks sandboxes, for the process of the tests; of others, most start one or two."""


def patch(is_first: bool = True) -> None:
    """Fork what can be forked, from now on; sandboxes by the first process alone."""
    if "LPR_TRUE_START" in os.environ:
        return
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(execute)
    environment = dict(os.environ)  # of now: a test may change it for itself
    pipes = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"

    def execute_child(self: Any, *given: Any) -> None:
        global forker, sandboxes
        asked = signature.bind(self, *given).arguments
        job = job_of(asked)
        if job is not None and job["sandbox"]:
            if sandboxes is None and is_first:
                sandboxes = started(execute, job["environment"], SANDBOX)
            asked_for = sandboxes
        else:
            if job is not None and forker is None:
                forker = started(execute, environment)
            asked_for = forker
        here = asked_for is not None and asked_for.owner == os.getpid()
        if job is None or not here or read_by_imports(job["environment"]) != asked_for.environment:
            execute(self, *given)
            return
        ends = (asked[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        own = [number if end == -1 else end for number, end in enumerate(ends)]
        self.pid = asked_for.fork(job, [*own, *asked["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in pipes))

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def job_of(asked: dict[str, Any]) -> dict[str, Any] | None:
    """What a child is to be, or None of a command that is to be started."""
    args, folder = asked["args"], os.fspath(asked["cwd"] or os.getcwd())
    others = [asked[name] for name in ("shell", "preexec_fn", "startupinfo")]
    others += [asked[name] is not None for name in ("uid", "gid", "gids")] + [asked["umask"] != -1]
    if any(others) or isinstance(args, str | bytes | os.PathLike) or len(args) < 2:
        return None
    command = [os.fsdecode(word) for word in args]
    rest = command[2:] if command[1] == "-u" else command[1:]
    if command[0] != sys.executable or not rest:
        return None
    is_module = rest[0] == "-m" and rest[1:2] and rest[1] in (*MODULES, SANDBOX)
    program = Path(folder, rest[0])
    if not is_module and program != ROOT / "lpr.generate" and program.parent != ROOT / "tests" / "fakes":
        return None
    environment = os.environ if asked["env"] is None else asked["env"]
    return {
        "command": command,
        "rest": rest,
        "sandbox": SANDBOX in rest[:2],
        "folder": os.path.realpath(folder),
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
        "descriptors": [0, 1, 2, *asked["pass_fds"]],
        "ignored": [number for number in IGNORED if signal.getsignal(number) is signal.SIG_IGN],
        "session": asked["start_new_session"],
        "group": asked["process_group"],
    }


def started(execute: Any, environment: dict[str, str], *kind: str) -> Forker:
    """The first process that forks; or, with SANDBOX, the one that forks sandboxes."""
    mine, others = socket.socketpair()
    with others, contextlib.ExitStack() as kept:
        now = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        kept.callback(setattr, subprocess.Popen, "_execute_child", now)
        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
        process = subprocess.Popen(
            [sys.executable, __file__, str(others.fileno()), ROOM, *kind],
            env={**environment, "PYTHONPATH": str(ROOT), "ROOM": ROOM},
            cwd=ROOT, pass_fds=[others.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def end() -> None:
        if process.poll() is None and os.getpid() == owner:
            mine.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)

    owner = os.getpid()
    atexit.register(end)
    return Forker(mine, environment)


def take(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, *_ = socket.recv_fds(connection, 4, 64)
    if not head:
        os._exit(0)  # who could ask has ended
    data = bytearray()
    while len(data) < int.from_bytes(head, "big"):
        data += connection.recv(1 << 16)
    return json.loads(data), descriptors


def fork_for(connection: socket.socket) -> dict[str, Any]:
    """Fork a child for each job that comes; returns in the child, with its job."""
    while True:
        job, descriptors = take(connection)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if child := os.fork():
                os.write(writing, child.to_bytes(4, "big"))
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            for each in (connection.detach(), reading, writing):
                os.close(each)
            place(descriptors, job["descriptors"])
            return job
        os.waitpid(between, 0)
        connection.sendall(os.read(reading, 4))
        for each in (reading, writing, *descriptors):
            os.close(each)


def place(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that they have in the parent."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, HIGH) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(high, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def wait_for_jobs(connection: socket.socket) -> dict[str, Any]:
    """Fork, until this is a child that has its own forking process; returns what it is to do."""
    global forker
    while True:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)  # they are for the processes beside this one
        job = fork_for(connection)
        if job["session"]:
            os.setsid()
        if job["group"] >= 0:
            os.setpgid(0, job["group"])
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        if job["sandbox"]:  # whose children are forks of its own
            break
        mine, others = socket.socketpair()
        if os.fork() != 0:
            others.close()
            forker = Forker(mine, job["environment"])
            break
        connection, null = others, os.open(os.devnull, os.O_RDWR)
        mine.close()
        for number in range(3):
            os.dup2(null, number)
        for number in {null, *job["descriptors"]} - {0, 1, 2}:
            os.close(number)
    for number in IGNORED:
        is_interrupt = number == signal.SIGINT
        usual = signal.default_int_handler if is_interrupt else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in job["ignored"] else usual)
    return job


def show(field: int, words: list[str]) -> None:
    """Write what /proc tells of this process over what its first parent was started with; `field` of its `stat`."""
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(places[field - 3]), int(places[field - 2])
    data = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(data) < end - begin:
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, data, len(data))


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    gc.disable()
    is_light = SANDBOX in sys.argv
    for name in SANDBOX_IMPORTS if is_light else IMPORTED:
        importlib.import_module(name)
    if not is_light:
        from transformers import conversion_mapping  # which compiles 1,000 patterns when the first model is loaded

        conversion_mapping.get_checkpoint_conversion_mapping("llama")
    for name in (*MODULES, SANDBOX, "lpr.serve.__main__"):
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # it is run, and would be found imported
    gc.freeze()
    gc.enable()
    job = wait_for_jobs(connection)
    show(48, job["command"])
    show(50, [f"{name}={value}" for name, value in job["environment"].items()])
    if not is_light:
        patch(is_first=False)
    rest = job["rest"]
    if "-u" in job["command"][:2]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv = rest[1:] if rest[0] == "-m" else rest
    sys.path[0] = job["folder"] if rest[0] == "-m" else str(Path(job["folder"], rest[0]).parent)
    if rest[0] == "-m":
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    sys.modules["tests.fakes.quick_start"] = sys.modules["__main__"]
    main()
