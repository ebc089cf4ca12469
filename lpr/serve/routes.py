"""The HTTP side of the front: endpoints, server, and the served model.

The front imports it after it has started the ranks, because the import takes 0.5 s.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from lpr.serve import limits
from lpr.serve.api.app import build, build_metrics
from lpr.serve.api.context import Context
from lpr.serve.api.middleware import Keys
from lpr.serve.connections import Connection
from lpr.serve.messages import Facts
from lpr.serve.metrics import Metrics
from lpr.serve.options import ServeArgs
from lpr.serve.port import Port
from lpr.serve.service import Service
from lpr.serve.text.defaults import read_defaults
from lpr.serve.text.served import Served


class Routes:
    def __init__(self, service: Service, args: ServeArgs, keys: Keys, replica: str, template: str | None) -> None:
        """Prepare the endpoints for clients with `keys`; `template` is --chat-template's text."""
        self._args, self._keys, self._replica, self._template = args, keys, replica, template
        self.context = Context(service, Metrics(service, args.names[0]), args)
        if args.otlp is not None:
            from lpr.serve.telemetry import tracer

            self.context.trace = tracer(args.otlp, args.names[0])
        self._server = uvicorn.Server(_uvicorn_config(build(self.context, args, keys, replica)))
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        self._serving: asyncio.Task[None] | None = None

    def open(self, main: Port, metrics: Port | None) -> asyncio.Task[None]:
        """Start to answer requests at the ports; returns the server's task, which ends with `close`."""
        self._serving = asyncio.create_task(self._server.serve([]))
        self.context.metrics.watch(main)
        main.open(self._make(self._server.config, main))
        if metrics is not None:
            app = build_metrics(self.context, self._args, self._keys, self._replica)
            metrics.open(self._make(_uvicorn_config(app), metrics))
        self.context.start()
        return self._serving

    def load(self, facts: Facts) -> bool:
        """Serve the model of `facts`; False if it is served already. Raises InputError or ValueError."""
        if self.context.served is not None and self.context.served.facts.max_length == facts.max_length:
            return False
        args = self._args
        defaults = read_defaults(args.generation_config, facts.generation, args.override_generation_config)
        served = Served(facts, args.names, args.fim, self._template, defaults, args.tool_call_parser)
        served.adapters = lambda: self.context.service.adapters or ()
        self.context.load(served)
        return True

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                await asyncio.wait_for(self._serving, 10)
        await self.context.close()

    def _make(self, config: uvicorn.Config, port: Port) -> Callable[[], Connection]:
        return lambda: Connection(config, self._server.server_state, {}, port=port)


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    off: Any = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "off", "ws": "none"}
    return uvicorn.Config(app, timeout_keep_alive=limits.IDLE_SECONDS.most, timeout_graceful_shutdown=5, **off)
