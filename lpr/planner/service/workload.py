"""What a service has to answer, as a TOML or JSON file says it: arrivals, lengths, temperatures, and the promise."""

from __future__ import annotations

import json
import math
import random
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec

from lpr.config import InputError
from lpr.core.step_times import StepTimes, read_step_times
from lpr.planner.service.requests import SimRequest


class Lengths(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Numbers of tokens: log-normal by two quantiles, or drawn from `values`."""

    median: float = 0.0
    p90: float = 0.0
    """0: all are as long as the median."""
    most: int = 1 << 20
    values: tuple[int, ...] = ()

    def draw(self, dice: random.Random) -> int:
        """One length."""
        if self.values:
            return max(1, dice.choice(self.values))
        sigma = math.log(self.p90 / self.median) / 1.2816 if self.p90 else 0.0
        return max(1, min(self.most, round(self.median * math.exp(sigma * dice.gauss(0.0, 1.0)))))

    @property
    def longest(self) -> int:
        """No length is above this."""
        return max(self.values) if self.values else self.most if self.p90 else round(self.median)

    @property
    def typical(self) -> float:
        """A length in the middle."""
        return sorted(self.values)[len(self.values) // 2] if self.values else self.median

    def check(self, name: str) -> None:
        """Raise InputError for lengths that cannot be."""
        if bool(self.values) == bool(self.median):
            raise InputError(f"{name}: give either values, or a median")
        if (min(self.values) if self.values else self.median) < 1:
            raise InputError(f"{name}: lengths must be at least 1 token")
        if self.p90 and (self.p90 < self.median or self.most < self.p90 or self.most == 1 << 20):
            raise InputError(f"{name}: a spread needs median <= p90 <= most, not {self.median} {self.p90} {self.most}")


class Promise(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The SLO: so many of the requests get their first token, and their tokens on average, within these times."""

    first_token_ms: float
    per_token_ms: float
    share: float = 0.95


class Demand(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Who asks: requests a second at random times, or clients who ask again as soon as they are answered."""

    rate: float = 0.0
    clients: int = 0


class Speed(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Measured: tokens per step at a temperature, in a batch of so many, with so many nodes per request and rank."""

    temperature: float
    tokens_per_step: float
    nodes: float
    batch: int = 1


class Measured(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Measured step times of a mesh, all of a step in them: a file as `--costs` and benchmarks.gpu_check write it."""

    file: str
    lp: int = 1
    tp: int = 1


class Workload(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A service's work; see configs/service/ for an example with all fields."""

    arrivals: Demand
    prompt: Lengths
    output: Lengths
    slo: Promise
    shared_prefix: int = 0
    """Leading tokens that all prompts have in common, such as a system prompt."""
    temperature: dict[str, float] = msgspec.field(default_factory=lambda: {"0.0": 1.0})
    """Temperature to its share of the requests."""
    pace_spread: dict[str, float] = msgspec.field(default_factory=lambda: {"0.0": 0.57, "0.8": 0.14})
    """Temperature to the standard deviation, between requests, of the logarithm of tokens per step. Measured with the
    bundled model: see GREEDY_ACCEPTANCE in lpr.planner.prediction."""
    tokens_per_step: tuple[Speed, ...] = ()
    """In place of what was measured with the bundled model."""
    step_times: tuple[Measured, ...] = ()
    """In place of predicted times; then these meshes are the only ones."""
    request_ms: float = 0.0
    """Time of a request outside the engine: HTTP, tokens from text."""
    prompt_ms_per_token: float = 0.0
    """Measured: what a prompt's token adds to a step. 0: as much as a node of a tree, which also has logits."""

    @property
    def context(self) -> int:
        """The longest prompt and output."""
        return self.shared_prefix + self.prompt.longest + self.output.longest

    def maker(self, seed: str) -> Callable[[float], SimRequest]:
        """What makes the request that comes at a time; the same seed makes the same ones."""
        dice = random.Random(seed)
        temperatures = [float(each) for each in self.temperature]
        shares = list(self.temperature.values())
        spreads = {float(name): value for name, value in self.pace_spread.items()}
        number = 0

        def make(now: float) -> SimRequest:
            nonlocal number
            number += 1
            [temperature] = dice.choices(temperatures, shares)
            spread = spreads[min(spreads, key=lambda each: abs(each - temperature))] if spreads else 0.0
            # Mean 1 of what divides tokens per step: then a fixed number of tokens takes the measured number of steps.
            slowness = math.exp(spread * dice.gauss(0.0, 1.0) - spread * spread / 2)
            length, own = self.prompt.draw(dice), -number  # its own tokens are nobody else's
            return SimRequest(
                arrived=now,
                num_prompt=self.shared_prefix + length,
                num_output=self.output.draw(dice),
                temperature=temperature,
                pace=1.0 / slowness,
                tokens=[0] * self.shared_prefix + [own] * length,
            )

        return make


def read_workload(path: Path) -> Workload:
    """The workload in a file; raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        found = msgspec.convert(values, Workload)
    except OSError as failure:
        raise InputError(f"cannot read --service {path}: {failure.strerror or failure}") from failure
    except ValueError as failure:  # of JSON, TOML, UTF-8 or a field
        raise InputError(f"--service {path}: {failure}") from failure
    try:
        check(found)
    except InputError as failure:
        raise InputError(f"--service {path}: {failure}") from failure
    return found


def check(workload: Workload) -> None:
    """Raise InputError for a workload that cannot be."""
    demand, promise = workload.arrivals, workload.slo
    if (demand.rate > 0) == (demand.clients > 0) or not 0 <= demand.rate < math.inf or demand.clients < 0:
        raise InputError("arrivals: give either a rate above 0 or a number of clients")
    workload.prompt.check("prompt")
    workload.output.check("output")
    if min(workload.shared_prefix, workload.request_ms, workload.prompt_ms_per_token) < 0:
        raise InputError("shared_prefix, request_ms and prompt_ms_per_token must not be negative")
    for name in ("first_token_ms", "per_token_ms"):
        if not 0 < getattr(promise, name) < math.inf:
            raise InputError(f"slo: {name} must be above 0")
    if not 0 < promise.share < 1:
        raise InputError(f"slo: share = {promise.share} must lie between 0 and 1")
    for field, least in (("temperature", 0.0), ("pace_spread", 0.0)):
        try:
            numbers = [(float(name), value) for name, value in getattr(workload, field).items()]
        except ValueError as failure:
            raise InputError(f"{field}: its keys are temperatures, not {failure.args[0].split()[-1]}") from failure
        if any(not 0 <= key < math.inf or not least <= value < math.inf for key, value in numbers):
            raise InputError(f"{field}: temperatures and what they have must not be negative")
    if not sum(workload.temperature.values()) > 0:
        raise InputError("temperature: no request has one")
    for each in workload.tokens_per_step:
        if each.tokens_per_step < 1 or each.nodes < 1 or each.batch < 1 or each.temperature < 0:
            raise InputError("tokens_per_step: a step brings 1 token, by 1 node, to 1 request, or more")
    if workload.step_times and not workload.tokens_per_step:
        raise InputError("step_times need tokens_per_step beside them, measured on the same mesh")
    for table in workload.step_times:
        if table.lp < 1 or table.tp < 1:
            raise InputError(f"step_times: a mesh of {table.lp} x {table.tp}")


def read_times(measured: Measured, folder: Path) -> StepTimes:
    """A table that a workload in `folder` names; raises InputError."""
    path = folder / measured.file
    try:
        return read_step_times(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError) as failure:
        raise InputError(f"cannot read {path}: {failure}") from failure
