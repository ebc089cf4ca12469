"""Flags of `python -m lpr.serve`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lpr.cli.config_file import defaults
from lpr.cli.flags import read_flags
from lpr.config import DecodeConfig, InputError
from lpr.engine.options import EngineOptions, named_folders
from lpr.fleet import options as fleet
from lpr.fleet.options import FleetOptions
from lpr.serve import limits
from lpr.serve.text.calls import NAMES
from lpr.serve.text.defaults import read_defaults, read_override

LONGEST_INTERVAL = 10_000.0  # Milliseconds between the events of a stream at most


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """Serve a model: OpenAI's completions and chats, llama.cpp's /infill, and a page to try them.

    Without arguments, serves the small code model that comes with lpr on one rank: open http://127.0.0.1:8000 in a
    browser, or give an OpenAI client http://127.0.0.1:8000/v1 as its base URL. For a model of your own on 4 GPUs:

        python -m lpr.serve --model Qwen/Qwen2.5-Coder-7B --lp 4 --api-key SECRET

    lp splits one request's guesses over replicas, tp splits the model's weights; lp x tp ranks are started.
    """

    model: str | None = None  # Model folder or hub id. Default: the small code model that comes with lpr.
    served_model_name: tuple[str, ...] = ()
    """Names that clients may ask for the model by; answers carry the first. Default: the hub id or folder's name."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 listens at all of this machine's, also for others: with keys, or --insecure."""
    port: int = 8000  # Port to listen at; 0 takes a free one.
    lp: int | None = None
    """Replicas that work on each request together. Default: 1, or under torchrun as many as the ranks make."""
    tp: int = 1  # Ranks that share one replica of the model, each with a part of its weights.
    timeout: float = 300.0  # Seconds that a rank waits for the others in a step before it gives up.
    load_timeout: float = 3600.0  # The same while the model is loaded, which takes long from slow storage.
    max_failed_starts: int = 5
    """Starts of the ranks in a row that may fail after they have been lost, before the service ends with code 1."""
    config: Path | None = None  # TOML file with values for any of these flags; flags given here win.
    trie: Path | None = None
    """Folder or .safetensors file: draft from what earlier runs wrote, and keep what this one writes."""
    share_drafts: Literal["none", "key", "all"] = "key"
    """Whose earlier outputs a request is drafted from: nobody's, those of its own API key, or everybody's."""
    fim: str = "auto"
    """Family whose fill-in-the-middle prompts the model wants (see /fim); auto: found by its tokens; none: no."""
    chat_template: Path | None = None  # Jinja file with a chat template, instead of the model's own.
    generation_config: str = "auto"
    """Sampling defaults of requests: auto: the model's generation_config.json; vllm: none; or a file or folder."""
    override_generation_config: str | None = None
    """JSON object with values that replace some of these defaults, such as {"temperature": 0}."""
    tool_call_parser: Literal["auto", "none", *NAMES] = "auto"  # type: ignore[valid-type]
    """How the model writes calls of tools; auto: found by its chat template; none: tools are refused."""
    max_queue: int = limits.QUEUE.most  # Requests that may wait for a slot; further ones are answered with 429.
    max_queued_tokens: int = limits.QUEUED_TOKENS.most
    """Prompt tokens of waiting requests; further ones are answered with 429."""
    max_requests_per_key: int = limits.KEY_REQUESTS.most
    """Open requests of one key; further ones are answered with 429. 0: half of all, if there are several keys."""
    max_tokens_per_key: int = limits.KEY_TOKENS.most
    """Prompt tokens of one key's waiting requests; further ones are answered with 429. 0: likewise."""
    max_body: int = limits.BODY.most  # Bytes of a request's body; larger ones are answered with 413.
    pad_stream: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Pad what a stream sends to multiples of 1 KiB: the sizes of encrypted records then do not show its tokens."""
    stream_interval: float = 0.0
    """Collect a stream's steps and send them every so many milliseconds, as one event. 0: one event per step."""
    max_connections: int = limits.CONNECTIONS.most
    """Connections at once. Beyond them a new one replaces the one that has waited longest for its client."""
    request_timeout: float = 600.0  # Seconds that a request may take, waiting included.
    shutdown_timeout: float = 30.0
    """Seconds that open requests have to finish after SIGTERM; then they are handed back."""
    api_key: str | None = None
    """Key that requests must come with, or several separated by commas. Default: $LPR_API_KEY, if it is set."""
    api_key_file: Path | None = None
    """File of such keys: "key", "name key" or "name key weight" per line. Slots are shared by weight; default 1."""
    protect_all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Ask for a key on health, readiness, metrics and the page too."""
    protect_metrics: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Ask for a key on /metrics, which counts the tokens of all clients."""
    metrics_port: int | None = None
    """Show /metrics at a port of its own, with health, and not at --port; 0 takes a free one."""
    metrics_host: str | None = None  # Address of --metrics-port. Default: --host.
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Serve without keys at an address that other machines reach."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that clients may call this service by, besides addresses, localhost and --host; "*" is all. Checked without
    keys, or if given."""
    cors: tuple[str, ...] = ()  # Origins whose pages may ask; "*" is all.
    tls_cert: Path | None = None  # PEM file with the certificate chain: serve HTTPS.
    tls_key: Path | None = None  # PEM file with its key, if that is not in the same file.
    allow_runtime_lora_updating: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Let every key load and unload LoRA adapters, from folders of this machine; needs keys."""
    access_log: bool = True  # Write a line of JSON to stderr for every request.
    otlp: str | None = None  # Send OpenTelemetry spans to this OTLP/HTTP endpoint (pip install 'lpr[otel]').
    fleet: Annotated[FleetOptions, tyro.conf.OmitArgPrefixes] = FleetOptions()
    engine: Annotated[EngineOptions, tyro.conf.OmitArgPrefixes] = EngineOptions()
    decode: Annotated[DecodeConfig, tyro.conf.OmitArgPrefixes] = DecodeConfig()

    @property
    def num_ranks(self) -> int:
        return (self.lp or 1) * self.tp

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the model is served under. A path of this machine is none of them."""
        if self.served_model_name or self.model is None:
            return self.served_model_name or ("bundled",)
        return (Path(self.model).resolve().name if Path(self.model).exists() else self.model,)


def parse(argv: Sequence[str], quiet: bool = False) -> ServeArgs:
    """Arguments from `argv` over those of its `--config` file; raises InputError or SystemExit."""
    groups = {"fleet": FleetOptions, "engine": EngineOptions, "decode": DecodeConfig}  # their fields are flags, too
    args = read_flags(ServeArgs, "lpr.serve", argv, defaults(argv, ServeArgs, groups), quiet)
    key = args.api_key if args.api_key is not None else os.environ.get("LPR_API_KEY")
    args = replace(args, api_key=key, fleet=fleet.complete(args.fleet))
    check(args)
    return args


def check(args: ServeArgs) -> None:
    """Refuse what cannot work; raises InputError."""
    for name in ("port", "metrics_port"):
        if not 0 <= (getattr(args, name) or 0) <= 65535:
            raise InputError(f"{_flag(name)} {getattr(args, name)} must be from 0 (a free one) to 65535")
    if args.metrics_port is None and args.metrics_host is not None:
        raise InputError("--metrics-host needs --metrics-port")
    if args.tp < 1 or (args.lp is not None and args.lp < 1):
        raise InputError(f"a mesh of lp {args.lp} x tp {args.tp}: both must be at least 1")
    at_least = {"max_queue": 0, "max_queued_tokens": 1, "max_body": 1, "max_connections": 8, "max_failed_starts": 1}
    at_least |= {"max_requests_per_key": 0, "max_tokens_per_key": 0}
    for name, least in at_least.items():
        if getattr(args, name) < least:
            raise InputError(f"{_flag(name)} {getattr(args, name)} must be at least {least}")
    for name in ("request_timeout", "shutdown_timeout", "timeout", "load_timeout"):
        if not 0 < getattr(args, name) < float("inf"):
            raise InputError(f"{_flag(name)} {getattr(args, name)} must be above 0, in seconds")
    if not 0 <= args.stream_interval <= LONGEST_INTERVAL:
        raise InputError(f"--stream-interval {args.stream_interval:g} must be from 0 to {LONGEST_INTERVAL:g} ms")
    if args.tls_key is not None and args.tls_cert is None:
        raise InputError("--tls-key needs --tls-cert FILE.pem")
    if taken := set(args.names).intersection(named_folders(args.engine.lora_modules)):
        raise InputError(f"--lora-modules {min(taken)}: this is a name of the model itself")
    fleet.check(args.fleet, args.share_drafts)
    read_override(args.override_generation_config)
    if args.generation_config not in ("auto", "vllm"):
        read_defaults(args.generation_config, {})
    if "" in args.served_model_name:
        raise InputError("--served-model-name: a name is empty")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
