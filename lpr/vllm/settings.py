"""The settings of lpr inside vLLM: the object `lpr` in vLLM's `--additional-config`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lpr.config import InputError
from lpr.fleet.options import FleetOptions, check, complete
from lpr.vllm.step_clock import StepClock

Whole = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]

CPU_TOKEN_COST, GPU_TOKEN_COST = 0.03, 0.001  # costs of a further token until steps were measured


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings with their defaults. `num_speculative_tokens` is vLLM's own."""

    token_cost: Annotated[float, Meta(ge=0, lt=1)] | Literal["measured"] = "measured"
    """Time of a further token, as a part of the time of a step of one token: (t(n) - t(1)) / ((n - 1) * t(1)). A draft
    ends where its next token is not worth this. "measured": t(n) is taken from the time between drafts, and where it
    cannot be, is 0.03 on a CPU and 0.001 elsewhere, as a GPU waits for its memory."""
    num_nodes: Annotated[int, Meta(ge=1, le=1024)] = 64  # nodes of the tree from which a draft is chosen
    share: Literal["all", "none"] | Count = "all"
    """Whose outputs a request drafts from besides its own text: those of all requests, of none, or of requests that
    begin with the same N tokens."""
    capacity: Count = 1_000_000  # tokens of others' outputs that are kept; the oldest are forgotten first
    trie: str | None = None
    """File of lpr's --trie, or its folder, whose outputs are known from the start. It is only read."""
    draft_store: str | None = None
    """Redis or Valkey through which replicas share outputs, as lpr.serve's --draft-store; also $LPR_DRAFT_STORE."""
    draft_store_length: Count = FleetOptions.draft_store_length  # as lpr.serve's --draft-store-length
    draft_snapshots: str | None = None  # as lpr.serve's --draft-snapshots
    draft_snapshot_every: float = FleetOptions.draft_snapshot_every  # as lpr.serve's --draft-snapshot-every
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of 127.0.0.1 with lpr's own metrics; 0: none. Replicas on one machine need a port each."""

    def step_clock(self, vllm_config: Any) -> StepClock:
        """The step clock for the device of vLLM's configuration."""
        is_cpu = vllm_config.device_config.device_type == "cpu"
        if self.token_cost != "measured":
            return StepClock(self.token_cost, is_measured=False)
        # Each rank of an external launcher schedules its own drafts, so all ranks must draft the same.
        alike = vllm_config.parallel_config.distributed_executor_backend == "external_launcher"
        return StepClock(CPU_TOKEN_COST if is_cpu else GPU_TOKEN_COST, is_measured=not alike)

    @property
    def fleet(self) -> FleetOptions:
        """The fleet's options, completed from the environment."""
        names = ("draft_store", "draft_store_length", "draft_snapshots", "draft_snapshot_every")
        return complete(FleetOptions(**{name: getattr(self, name) for name in names}))


def settings_of(additional: Any) -> Settings:
    """The settings in vLLM's `additional_config`; raises InputError, which names the setting."""
    values = additional.get("lpr", {}) if isinstance(additional, dict) else {}
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as failure:
        raise InputError(f"additional_config, lpr: {failure}") from failure
    if settings.fleet.draft_store is not None or settings.draft_snapshots is not None:
        check(settings.fleet, "none" if settings.share == "none" else "")
    if settings.share == "none" and settings.trie is not None:
        raise InputError("additional_config, lpr: share is none, so no request would draft from trie")
    return settings
