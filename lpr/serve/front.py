"""The front process: it listens before the model is loaded, and exits after the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lpr.config import InputError, read_text
from lpr.fleet.options import default_name
from lpr.protocol import ErrorCode, Stop
from lpr.serve import limits
from lpr.serve.api.middleware import Keys
from lpr.serve.keeper import Keeper, Ranks
from lpr.serve.link import Link
from lpr.serve.messages import Loading, ToFront
from lpr.serve.options import ServeArgs
from lpr.serve.port import Port, room
from lpr.serve.ranks import socket_folder
from lpr.serve.service import Service

if TYPE_CHECKING:
    from lpr.serve.api.context import Context
    from lpr.serve.routes import Routes

MOST_KEYS = 64  # most keys whose shared drafts are read at the start; drafts of further keys are read at first use
BACKLOG = 1024  # listen backlog; a connection beyond it retries after a second


class Front:
    def __init__(
        self,
        args: ServeArgs,
        argv: Sequence[str],
        attached: Path | None = None,
        make_ranks: Callable[[Path], Ranks] | None = None,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """Read files and bind the port; raises InputError.

        `attached` is the socket for ranks started by a launcher. Without it the front starts the ranks, by default as
        processes with the flags `argv`. `loaded` is called when a model is first served, and when its facts change.
        """
        self.args = args
        self._loaded = loaded
        self._attached = attached
        self._make_ranks = make_ranks or (lambda path: Ranks(argv, args.lp or 1, args.tp, path))
        self._keys = Keys.read(args.api_key, args.api_key_file)
        if args.allow_runtime_lora_updating and not self._keys:
            raise InputError("--allow-runtime-lora-updating needs --api-key or --api-key-file")
        if self._keys and args.trie is not None and args.share_drafts != "all":
            raise InputError("--trie keeps what all keys wrote for all of them: say so by --share-drafts all")
        self._template = read_text(args.chat_template, "--chat-template") if args.chat_template is not None else None
        for path, flag in ((args.tls_cert, "--tls-cert"), (args.tls_key, "--tls-key")):
            if path is not None:
                read_text(path, flag)
        tls = _certificate(args.tls_cert, args.tls_key) if args.tls_cert is not None else None
        most = room(args.max_connections)
        if most < args.max_connections:
            why = "this process may not open more files (ulimit -n)"
            print(f"lpr.serve: --max-connections {args.max_connections}: only {most}, as {why}", file=sys.stderr)
        needs_loopback = not self._keys and not args.insecure
        self._main = Port(_listen(args.host, args.port, needs_loopback), most, tls)
        self.port = self._main.number
        self._metrics: Port | None = None
        if args.metrics_port is not None:
            listening = _listen(args.metrics_host or args.host, args.metrics_port)
            self._metrics = Port(listening, limits.METRICS_CONNECTIONS.most, tls)
        self.metrics_port = self._metrics.number if self._metrics is not None else None
        self.replica = args.fleet.replica_name or default_name(self.port)
        self._console = Console(stderr=True)
        self._keeper: Keeper | None = None
        self._routes: Routes | None = None
        self._stopping = asyncio.Event()
        self._failure: tuple[int, str] | None = None

    async def run(self) -> int:
        """Serve until a signal, or until the ranks cannot be started again; returns the exit code."""
        args = self.args
        self.service = Service(args, lambda message: link.send(message))
        self.service.tenants = [""] if args.share_drafts == "all" or not self._keys else self._keys.names[:MOST_KEYS]
        self.service.weights = self._keys.weights
        link = Link(self._receive, self._lost)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # only the main thread of a process can
                loop.add_signal_handler(number, self.stop)
        with tempfile.TemporaryDirectory(prefix="lpr-serve-", dir=socket_folder()) as folder:
            if self._attached is not None:
                await link.listen(self._attached)
            else:
                self._keeper = Keeper(self.service, link, Path(folder), self._make_ranks, args)
            tasks = [asyncio.create_task(self._keep())]
            try:
                if self._keeper is not None:
                    await self._keeper.begun.wait()
                # Imported late (0.5 s), while the ranks load torch.
                make_routes: type[Routes] = importlib.import_module("lpr.serve.routes").Routes
                self._routes = make_routes(self.service, args, self._keys, self.replica, self._template)
                self._routes.open(self._main, self._metrics).add_done_callback(self._ended)
                self._load()  # facts that the ranks sent meanwhile
                tasks.append(asyncio.create_task(self._show_progress()))
                await self._stopping.wait()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.service.drained(), args.shutdown_timeout)
                self._hand_back()
                await asyncio.sleep(0.05)  # so that final chunks are written
            finally:
                await self._end(tasks, link)
        if self._failure is not None:
            print(f"lpr.serve: error: {self._failure[1]}", file=sys.stderr)
            return self._failure[0]
        return 0

    def stop(self) -> None:
        """Begin to shut down. The second call does not wait for open requests."""
        if self._stopping.is_set():
            self._hand_back()
        self.service.draining = True
        self._stopping.set()

    @property
    def context(self) -> Context:
        """What every endpoint uses; there is none before `run`."""
        assert self._routes is not None
        return self._routes.context

    # Within.

    def _hand_back(self) -> None:
        self.service.fail_all(ErrorCode.DRAINED, "the server shut down before this was finished")

    def _receive(self, message: ToFront) -> None:
        self.service.receive(message)
        if self.service.mesh.is_hopeless:
            self._fail(2, self.service.mesh.refused or "")
        else:
            self._load()

    def _load(self) -> None:
        if self._routes is not None and self.service.mesh.facts is not None:
            try:
                if self._routes.load(self.service.mesh.facts):
                    self._loaded()
            except (InputError, ValueError) as failure:
                self._fail(2, str(failure))

    def _lost(self) -> None:
        self.service.lost()
        if self._keeper is None:  # the launcher starts the ranks again, and a front with them
            self._fail(1, "the ranks were lost; see what they wrote above")

    def _fail(self, code: int, reason: str) -> None:
        self.service.lost()
        self.service.fail_all(ErrorCode.RANKS_LOST, "the ranks were lost")
        if self._failure is None and not self._stopping.is_set():
            self._failure = (code, reason)
            self.stop()

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if not self._stopping.is_set():
            why = None if serving.cancelled() else serving.exception()
            self._fail(1, f"the HTTP server has ended{f': {why}' if why is not None else ''}")

    async def _keep(self) -> None:
        if self._keeper is None:
            return
        try:
            self._fail(*await self._keeper.run())
        except Exception as failure:  # without a keeper, requests would wait forever
            logging.getLogger(__name__).exception("the keeper of the ranks has failed")
            self._fail(1, f"internal error: {type(failure).__name__}: {failure}")
        finally:
            self._keeper.begun.set()

    async def _end(self, tasks: Sequence[asyncio.Task[None]], link: Link) -> None:
        for task in tasks:  # before the ranks end, so that they are not started again
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        link.send(Stop())
        for port in (self._main, self._metrics):
            if port is not None:
                port.close()
        if self._routes is not None:
            await self._routes.close()
        if self._keeper is not None:
            await self._keeper.close()
        await link.close()

    async def _show_progress(self) -> None:
        scheme = "https" if self.args.tls_cert else "http"
        print(f"lpr.serve: listening on {scheme}://{self.args.host}:{self.port}", flush=True)
        if self._metrics is not None:
            host = self.args.metrics_host or self.args.host
            print(f"lpr.serve: metrics at {scheme}://{host}:{self._metrics.number}/metrics", flush=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        ready = asyncio.create_task(self.service.mesh.ready.wait())
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
            bar = progress.add_task("starting the ranks", total=None)
            while not ready.done():
                await asyncio.wait({ready}, timeout=0.2)
                if isinstance(loading := self.service.mesh.loading, Loading):
                    progress.update(bar, description=loading.stage, completed=loading.done, total=loading.total)
        facts = self.service.mesh.facts
        if facts is not None:
            mesh = f"lp {facts.lp} x tp {facts.tp}, {facts.dtype} on {facts.device}"
            print(f"lpr.serve: ready: {self.args.names[0]}, {mesh}", flush=True)


def _listen(host: str, port: int, needs_loopback: bool = False) -> socket.socket:
    """A listening socket; raises InputError, also if `needs_loopback` and the address is reachable from outside."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if needs_loopback and not ipaddress.ip_address(address[0]).is_loopback:
            why = "others reach this address, so give --api-key, --api-key-file or --insecure"
            raise InputError(f"--host {host}: {why}")
        found = socket.socket(family, kind, protocol)
    except OSError as failure:
        raise InputError(f"--host {host}: {failure.strerror or failure}") from failure
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as failure:
        found.close()
        raise InputError(f"cannot listen at {host}:{port}: {os.strerror(failure.errno or 0)}") from failure
    return found


def _certificate(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """A server's context; raises InputError for a certificate and a key that cannot be read or do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
        return context
    except (ssl.SSLError, OSError) as failure:
        raise InputError(f"--tls-cert {certificate} and --tls-key {key} cannot be used: {failure}") from failure
