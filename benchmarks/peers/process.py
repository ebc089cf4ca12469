"""The client of a peer's process (benchmarks.peers.worker)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from pathlib import Path
from typing import Any, Self

START_SECONDS, ANSWER_SECONDS = 300.0, 900.0
STOP_SECONDS = 10.0
ROOT = Path(__file__).parents[2]


class PeerError(RuntimeError):
    """A peer did not answer, or answered with a failure."""


class Process:
    """Asks a peer's process to complete prompts; a context."""

    def __init__(self, python: Path, module: str, model: Path, threads: int, log: Path) -> None:
        """Start the process; its output goes to `log`. Raises PeerError."""
        self._log = log
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
        command = [str(python), "-m", module, str(model), str(threads)]
        with log.open("w", encoding="utf-8") as printed:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": printed}
            self._process = subprocess.Popen(command, text=True, env=environment, cwd=ROOT, **pipes)
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.software: dict[str, str] = self._answer(START_SECONDS)["software"]
        except PeerError:
            self.close()
            raise

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; raises PeerError, also on a time-out."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as failure:
            raise PeerError(self._last_words()) from failure
        return self._answer(ANSWER_SECONDS)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_SECONDS)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise PeerError(f"no answer within {seconds:g} s") from None
        if not line:
            self._answers.put("")  # later requests find the end too
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise PeerError(answer["failed"])
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its process ended: {lines[-1] if lines else 'no output'}"
