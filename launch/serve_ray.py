"""The service as a Ray Serve application: meshes, each with a placement group of its own, behind one front.

    cd launch && serve run --working-dir . serve_ray:app model=Qwen/Qwen2.5-Coder-7B lp=4 tp=2 max_meshes=4

Every machine needs `pip install 'lpr[ray]'`. A mesh is `python -m lpr.serve` on the machine of its replica, or torchrun
on several machines. The front sends prompts that begin alike, and requests of one session, to the same mesh, where
their prefix is cached and their drafts are warm, unless that mesh has too many requests. Ray Serve starts further
meshes by the number of running and waiting requests, and restarts lost ones. A request whose mesh is lost before its
answer begins goes to another mesh, and a stream of one text that has begun goes on at another (lpr.fleet.resume).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx
import ray
from pydantic import BaseModel, PositiveInt
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lpr.dist.places import die_with_parent
from lpr.fleet.affinity import routing_key
from lpr.fleet.resume import Resumption
from lpr.serve.api.middleware import Guard, Keys
from lpr.serve.checks import read_json
from lpr.serve.options import parse

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
LOAD_SECONDS = 3600.0
"""Time for a mesh to load its model, as lpr.serve's --load-timeout."""
DRAIN_SECONDS = 30.0
"""Time for open requests when a mesh is stopped, as lpr.serve's --shutdown-timeout."""
TRIES = 3
"""Meshes that a request is sent to until one begins to answer."""
Answer = tuple[int, dict[str, str], AsyncIterator[bytes]]
"""Status, headers and body of a mesh's answer."""
HOP_BY_HOP = ("connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding")


class Settings(BaseModel, extra="forbid"):
    """What `serve run` takes as name=value."""

    model: str | None = None
    """Model folder or hub id; default: the small code model that comes with lpr."""
    lp: PositiveInt = 1
    tp: PositiveInt = 1
    gpus_per_machine: int = 8
    """A mesh takes as many machines as its ranks need. With 0, ranks are CPU processes of one machine."""
    ranks_per_machine: int | None = None
    """Default: as many as there are GPUs."""
    cpus_per_rank: float = 1.0
    min_meshes: PositiveInt = 1
    max_meshes: PositiveInt = 1
    target_requests: float = 8.0
    """Running and waiting requests per mesh above which Ray starts a further mesh; about the slots of a mesh."""
    most_requests: PositiveInt = 64
    """Requests of a mesh above which its prompts go to the next mesh."""
    upscale_seconds: float = 30.0
    downscale_seconds: float = 600.0
    flags: str = ""
    """Further flags of lpr.serve."""

    @property
    def num_ranks(self) -> int:
        """Ranks of a mesh."""
        return self.lp * self.tp

    @property
    def machine_ranks(self) -> int:
        """Ranks of a mesh on each of its machines."""
        return min(self.num_ranks, self.ranks_per_machine or self.gpus_per_machine or self.num_ranks)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources of a mesh, one entry per machine; raises ValueError if ranks do not fill machines evenly."""
        machines, rest = divmod(self.num_ranks, self.machine_ranks)
        if rest:
            raise ValueError(f"{self.num_ranks} ranks do not fill machines of {self.machine_ranks}")
        bundle = {"CPU": self.cpus_per_rank * self.machine_ranks}
        return [bundle | ({"GPU": self.machine_ranks} if self.gpus_per_machine else {})] * machines

    def command(self, port: int, machine: int, head: str) -> list[str]:
        """The command of a machine of a mesh: the service, or torchrun if there are several machines."""
        flags = ["--lp", str(self.lp), "--tp", str(self.tp), "--host", "127.0.0.1", "--port", str(port)]
        flags += ["--shutdown-timeout", f"{DRAIN_SECONDS - 5:.0f}"]
        flags += ["--model", self.model] if self.model is not None else []
        flags += shlex.split(self.flags)
        machines = len(self.bundles)
        if machines == 1:
            return [sys.executable, "-m", "lpr.serve", *flags]
        host, _, store = head.rpartition(":")
        places = [f"--nnodes={machines}", f"--node-rank={machine}", f"--nproc-per-node={self.machine_ranks}"]
        places += [f"--master-addr={host}", f"--master-port={store}"]
        return [sys.executable, "-m", "torch.distributed.run", *places, "-m", "lpr.serve", *flags]


@ray.remote
class Machine:
    """A further machine of a mesh. The mesh's replica owns it; it ends with the mesh, and its ranks end with it."""

    def __init__(self, command: list[str]) -> None:
        """Start the ranks of this machine."""
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def is_running(self) -> bool:
        """True while they run."""
        return self._process.poll() is None


class Mesh:
    """A mesh: the service as a child process, and further machines if it needs them."""

    def __init__(self, settings: Settings) -> None:
        """Start the ranks of all machines. Health checks begin when the model has loaded."""
        port = free_port()
        head = f"{ray.util.get_node_ip_address()}:{free_port()}"
        command = settings.command(port, 0, head)
        # However this process dies, the service must end with it, so that its GPUs are free for the next mesh.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        self._machines = [
            Machine.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(get_current_placement_group(), number),
            ).remote(settings.command(port, number, head))
            for number, bundle in enumerate(settings.bundles)
            if number
        ]
        self._name = serve.get_replica_context().replica_id.unique_id
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=httpx.Timeout(None, connect=5.0))

    async def loaded(self) -> None:
        """Return once the mesh takes requests; raises RuntimeError if it has ended."""
        async with asyncio.timeout(LOAD_SECONDS):
            while not await self._says_ok("/readyz"):
                self._check_running()
                await asyncio.sleep(0.2)

    async def check_health(self) -> None:
        """Raise RuntimeError if a restart helps, as /livez reports. Ray Serve calls this periodically."""
        self._check_running()
        if not await self._says_ok("/livez"):
            raise RuntimeError("the ranks are silent or hang")

    async def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """Forward a request; yields status and headers, with the mesh's name, then the body as it arrives."""
        async with self._http.stream(method, path, headers=headers, content=body) as response:
            yield response.status_code, {**response.headers, "x-lpr-mesh": self._name}
            async for part in response.aiter_raw():
                yield part

    async def __del__(self) -> None:
        """Let the service finish open requests, and end it."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, DRAIN_SECONDS)
        self._process.kill()

    async def _says_ok(self, path: str) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(path, timeout=10.0)).status_code == 200
        return False

    def _check_running(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the service has ended with code {self._process.returncode}")


class Guarded(Response):
    """The answer of a guarded application to the request that is being answered."""

    def __init__(self, app: ASGIApp, receive: Receive) -> None:
        """Let `app` answer; `receive` gives the request's body."""
        super().__init__()
        self._app, self._receive = app, receive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Response."""
        await self._app(scope, self._receive, send)


async def check_body(scope: Scope, body: bytes, receive: Receive) -> None:
    """Raise ApiError for what is no JSON, or too deep; beside the event loop."""
    if body:
        await asyncio.to_thread(read_json, body)


class Front:
    """Forwards each request to the mesh that has its prefix."""

    def __init__(self, meshes: DeploymentHandle, settings: Settings) -> None:
        """Forward to `meshes` what lpr.serve would take with the flags of `settings`; raises InputError."""
        self._meshes = meshes
        args = parse(shlex.split(settings.flags), quiet=True)
        keys = Keys.read(args.api_key, args.api_key_file)
        self._guard = Guard(self._answer, args, keys, "", None, check_body)

    async def __call__(self, request: Request) -> Response:
        """Forward a request and its answer; 503 if no mesh begins to answer.

        What a mesh would refuse for its key, host, type or size is refused here: a mesh has no keys of its own if only
        this process has LPR_API_KEY, and sees the host of this one.
        """
        return Guarded(self._guard, request.receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._forwarded(Request(scope, receive))
        await response(scope, receive, send)

    async def _forwarded(self, request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        fields = fields_of(body)
        # Without a key, a random one spreads requests evenly.
        key = routing_key(headers, fields) or uuid.uuid4().hex
        stream = Resumption.of(request.url.path, fields) if request.method == "POST" else None

        async def ask() -> Answer:
            return await self._ask(key, request.method, path, headers, stream.body if stream is not None else body)

        try:
            status, answered, parts = await ask()
        except (RayError, httpx.HTTPError) as failure:
            return JSONResponse(lost(failure), 503, {"Retry-After": "5"})
        kept = {name: value for name, value in answered.items() if name not in HOP_BY_HOP}
        if stream is not None and status == 200:
            parts = continued(stream, parts, ask)
        return StreamingResponse(parts, status, kept)

    async def _ask(self, key: str, *request: Any) -> Answer:
        """Status, headers and body of an answer; raises the last failure if no mesh begins one."""
        for left in reversed(range(TRIES)):
            parts = self._meshes.options(stream=True, session_id=key).answer.remote(*request)
            try:
                return *(await anext(parts)), parts
            except (RayError, httpx.HTTPError):  # the mesh is lost, and Ray Serve starts another
                if not left:
                    raise
                await asyncio.sleep(0.1)
        raise AssertionError


async def continued(
    stream: Resumption, parts: AsyncIterator[bytes], ask: Callable[[], Awaitable[Answer]]
) -> AsyncIterator[bytes]:
    """The whole of a stream: where its mesh is lost, another goes on, TRIES times at most."""
    failure: Exception = RuntimeError("the stream broke off")
    for _ in range(TRIES):
        with contextlib.suppress(RayError, httpx.HTTPError):
            async for part in parts:
                if data := stream.feed(part):
                    yield data
        if stream.is_complete:
            return
        try:
            status, _, parts = await ask()
        except (RayError, httpx.HTTPError) as error:
            failure = error
            break
        if status != 200:
            failure = RuntimeError(f"another mesh answered {status}")
            break
    yield b"data: " + json.dumps(lost(failure)).encode() + b"\n\ndata: [DONE]\n\n"


def lost(failure: Exception) -> dict[str, Any]:
    """The error of a request that no mesh answers."""
    message = f"no mesh answers: {type(failure).__name__}"
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "mesh_lost"}}


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object; {} for any other body."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(body)
        return found if isinstance(found, dict) else {}
    return {}


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def app(settings: Settings) -> serve.Application:
    """The application that `serve run` starts."""
    bundles = settings.bundles

    class Loaded(Mesh):
        async def __init__(self) -> None:
            super().__init__(settings)
            await self.loaded()

    meshes = serve.deployment(
        Loaded,
        name="Mesh",
        ray_actor_options={"num_cpus": bundles[0]["CPU"], "num_gpus": bundles[0].get("GPU", 0)},
        placement_group_bundles=bundles,
        placement_group_strategy="STRICT_PACK" if len(bundles) == 1 else "PACK",
        max_ongoing_requests=settings.most_requests,
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_meshes,
            initial_replicas=settings.min_meshes,
            max_replicas=settings.max_meshes,
            target_ongoing_requests=settings.target_requests,
            upscale_delay_s=settings.upscale_seconds,
            downscale_delay_s=settings.downscale_seconds,
        ),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=DRAIN_SECONDS + 10.0,
    )
    front = serve.deployment(
        Front, name="Front", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0.1}, num_replicas=1
    )
    return front.bind(meshes.bind(), settings)
