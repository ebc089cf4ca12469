"""The workload of a service, as a TOML or JSON file states it: arrivals, lengths, temperatures, and the SLO."""

from __future__ import annotations

import itertools
import json
import math
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from lpr.config import InputError
from lpr.core.step_times import StepTimes, read_step_times
from lpr.planner.simulated.mesh import SimRequest

NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Factor = Annotated[float, Meta(ge=1)]
Count = Annotated[int, Meta(ge=1)]


class Lengths(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Numbers of tokens: log-normal by two quantiles, or drawn from `values`."""

    median: float = 0.0
    p90: float = 0.0
    """0: all are as long as the median."""
    most: int = 1 << 20
    values: tuple[Count, ...] = ()

    def draw(self, dice: random.Random) -> int:
        """One length."""
        if self.values:
            return max(1, dice.choice(self.values))
        sigma = math.log(self.p90 / self.median) / 1.2816 if self.p90 else 0.0
        return max(1, min(self.most, round(self.median * math.exp(sigma * dice.gauss(0.0, 1.0)))))

    @property
    def longest(self) -> int:
        """Upper bound of the lengths."""
        return max(self.values) if self.values else self.most if self.p90 else round(self.median)

    @property
    def typical(self) -> float:
        """The median."""
        return sorted(self.values)[len(self.values) // 2] if self.values else self.median

    def check(self, name: str) -> None:
        """Raise InputError for impossible lengths."""
        if bool(self.values) == bool(self.median):
            raise InputError(f"{name}: give either values, or a median")
        if self.median and self.median < 1:
            raise InputError(f"{name}: lengths must be at least 1 token")
        if self.p90 and (self.p90 < self.median or self.most < self.p90 or self.most == 1 << 20):
            raise InputError(f"{name}: a spread needs median <= p90 <= most, not {self.median} {self.p90} {self.most}")


class Promise(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The SLO: a share of the requests has its first token, and its mean time per token, within these times."""

    first_token_ms: Positive
    per_token_ms: Positive
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.95


class Demand(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Requests a second at random times, or clients who ask again as soon as they are answered."""

    rate: float = 0.0
    clients: int = 0


class Speed(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Measured tokens per step at a temperature, in a batch of so many, with so many nodes per request and rank."""

    temperature: NotNegative
    tokens_per_step: Factor
    nodes: Factor
    batch: Count = 1


class Measured(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Measured times of whole steps of a mesh, as `--costs` reads and benchmarks.gpu_check writes them."""

    file: str
    lp: Count = 1
    tp: Count = 1


class Workload(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The work of a service; configs/service/ has an example with all fields."""

    arrivals: Demand
    prompt: Lengths
    output: Lengths
    slo: Promise
    shared_prefix: Annotated[int, Meta(ge=0)] = 0
    """Leading tokens that all prompts have in common, such as a system prompt."""
    temperature: dict[str, NotNegative] = msgspec.field(default_factory=lambda: {"0.0": 1.0})
    """Temperature to its share of the requests."""
    pace_spread: dict[str, NotNegative] = msgspec.field(default_factory=lambda: {"0.0": 0.57, "0.8": 0.14})
    """Temperature to the standard deviation, between requests, of the logarithm of tokens per step. Measured with the
    bundled model: see GREEDY_ACCEPTANCE in lpr.planner.prediction."""
    tokens_per_step: tuple[Speed, ...] = ()
    """Replace those of the bundled model."""
    step_times: tuple[Measured, ...] = ()
    """Replace predicted times; only their meshes are planned then."""
    request_ms: NotNegative = 0.0
    """Time of a request outside the engine: HTTP, tokens from text."""
    prompt_ms_per_token: NotNegative = 0.0
    """Measured step time of a prompt's token. 0: that of a node of a tree, which also has logits."""

    @property
    def context(self) -> int:
        """The longest prompt and output."""
        return self.shared_prefix + self.prompt.longest + self.output.longest

    def maker(self, seed: str) -> Callable[[float], SimRequest]:
        """A function from an arrival time to a request; the same seed gives the same requests."""
        dice = random.Random(seed)
        temperatures = [float(each) for each in self.temperature]
        shares = list(self.temperature.values())
        spreads = {float(name): value for name, value in self.pace_spread.items()}
        numbers = itertools.count(1)

        def make(now: float) -> SimRequest:
            [temperature] = dice.choices(temperatures, shares)
            spread = spreads[min(spreads, key=lambda each: abs(each - temperature))] if spreads else 0.0
            # The divisor of tokens per step has mean 1: so a fixed number of tokens takes the measured number of steps.
            slowness = math.exp(spread * dice.gauss(0.0, 1.0) - spread * spread / 2)
            length, own = self.prompt.draw(dice), -next(numbers)  # its own tokens are nobody else's
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
        text = path.read_text(encoding="utf-8-sig")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        found = msgspec.convert(values, Workload)
        check(found)
    except OSError as failure:
        raise InputError(f"cannot read --service {path}: {failure.strerror or failure}") from failure
    except ValueError as failure:  # of JSON, TOML, UTF-8 or a field
        raise InputError(f"--service {path}: {failure}") from failure
    return found


def check(workload: Workload) -> None:
    """Raise InputError for fields that contradict each other."""
    demand = workload.arrivals
    if (demand.rate > 0) == (demand.clients > 0) or not 0 <= demand.rate < math.inf or demand.clients < 0:
        raise InputError("arrivals: give either a rate above 0 or a number of clients")
    workload.prompt.check("prompt")
    workload.output.check("output")
    for field in ("temperature", "pace_spread"):
        try:
            known = all(0 <= float(name) < math.inf for name in getattr(workload, field))
        except ValueError:
            known = False
        if not known:
            raise InputError(f"{field}: its keys are temperatures of at least 0")
    if not sum(workload.temperature.values()) > 0:
        raise InputError("temperature: no request has one")
    if workload.step_times and not workload.tokens_per_step:
        raise InputError("step_times need tokens_per_step too, measured on the same mesh")


def read_times(measured: Measured, folder: Path) -> StepTimes:
    """The step times that a workload in `folder` names; raises InputError."""
    path = folder / measured.file
    try:
        return read_step_times(json.loads(path.read_text(encoding="utf-8-sig")), str(path))
    except (OSError, ValueError) as failure:
        raise InputError(f"cannot read {path}: {failure}") from failure
