"""Predicted speed of jobs in which some ranks verify and the others draft with a low-bit copy of the model.

The draft ranks extend their draft while the other ranks verify it (EngineOptions.draft_ranks). The tokens per step have
no closed form, because a drafted token is valid only if all before it are. So steps are simulated, with the measured
agreement of a copy's choices and the step times of lpr.planner.prediction. Errors in a chain are assumed independent;
of several copies only the first is modelled.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lpr.model.low_bit.products import FORMS, Form
from lpr.model.self_draft import LONGEST
from lpr.planner.facts import ModelFacts
from lpr.planner.footprint import Mesh, copy_bytes, kv_token_bytes, split_problem, weight_bytes
from lpr.planner.prediction import Inputs, Setting, lp_seconds, tp_seconds

COUNTS = range(LONGEST + 1)  # drafted tokens of a step
NUM_STEPS = 5_000
STATE_ACCESSES = 3  # a pass reads its recurrent states, and reads and writes them to advance


@dataclass(frozen=True)
class Agreement:
    """The share of a copy's choices that equal the model's, along the model's own text."""

    form: Form
    temperature: float
    share: float


def read_agreement(values: Mapping[str, Any], form: Form, temperature: float) -> Agreement:
    """The agreement at the nearest measured temperature, from the JSON of lpr/assets/measured.json."""
    known = [Agreement(form, each["temperature"], each[form]) for each in values["agreement"]["shares"]]
    return min(known, key=lambda each: abs(each.temperature - temperature))


@dataclass(frozen=True)
class Pipelined:
    """The result of a simulation."""

    tokens_per_step: float
    passes_per_step: float
    seconds_per_step: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step


def simulate(
    step_seconds: Callable[[int], float], pass_seconds: float, agreement: float, text: float, *,
    num_steps: int = NUM_STEPS, seed: int = 0,
) -> Pipelined:  # fmt: skip
    """Decode with verifying and drafting ranks side by side.

    `step_seconds(n)` is the time of a step that verifies n drafted tokens, `pass_seconds` that of a pass, `agreement`
    the probability that the copy's choice equals the model's, `text` the mean number of accepted text-draft tokens
    after a correct chain.
    """
    dice = random.Random(seed)
    num_tokens, num_passes, seconds, left = 0, 0, 0.0, 0.0
    chain: list[bool] = []  # per drafted token, True if it is the model's choice (unknown to the ranks)
    for _ in range(num_steps):
        took = step_seconds(len(chain))
        made = int((took + left) / pass_seconds)
        left = took + left - made * pass_seconds
        further = [dice.random() < agreement for _ in range(min(made, LONGEST + 1))]
        num_passes, seconds = num_passes + len(further), seconds + took
        accepted = next((place for place, is_right in enumerate(chain) if not is_right), len(chain))
        stands = accepted == len(chain)
        extra = 0
        while stands and dice.random() < text / (1.0 + text):  # the number of accepted text tokens is geometric
            extra += 1
        num_tokens += accepted + 1 + extra
        # After a correct chain, the first further pass's choice may equal the bonus token.
        chain = further[extra + 1 :][:LONGEST] if stands and all(further[: extra + 1]) else []
    return Pipelined(num_tokens / num_steps, num_passes / num_steps, seconds / num_steps)


@dataclass(frozen=True)
class Roles:
    """GPUs that verify, as one replica, and GPUs that draft, as one or more copies."""

    verify: int
    draft: int  # GPUs of a copy
    copies: int = 1

    def __str__(self) -> str:
        return f"tp {self.verify} + {self.copies} x draft tp {self.draft}"


def roles_of(facts: ModelFacts, num_gpus: int, memory: int, form: Form, element_size: int) -> list[Roles]:
    """The divisions of `num_gpus` GPUs with `memory` bytes each in which model and copy can be split and fit."""
    copy = copy_bytes(facts, form) + element_size * sum(
        each.count * each.shape[0] * each.shape[1] for each in facts.weights if each.is_lookup and len(each.shape) == 2
    )
    parts = [2**power for power in range(num_gpus.bit_length()) if not split_problem(facts, 2**power)]
    return [
        Roles(verify, draft, (num_gpus - verify) // draft) for verify in parts for draft in parts
        if verify < num_gpus and (num_gpus - verify) % draft == 0 and copy / draft < 0.9 * memory
        and weight_bytes(facts, verify, element_size) < 0.9 * memory
    ]  # fmt: skip


def pipelined(setting: Setting, roles: Roles, agreement: Agreement, inputs: Inputs | None = None) -> Pipelined:
    """The simulation of `roles` for one sequence."""
    inputs, at = inputs or Inputs(), setting.temperature or 0.0
    trees = setting.measured.ways(at, 1)
    best = max(trees, key=lambda each: setting.rate(Mesh(1, roles.verify), each, inputs))
    text = best.tokens_per_step - 1.0
    ranks = Mesh(1, roles.verify + roles.copies * roles.draft)
    payload = best.payload_bytes(1) + 8 * LONGEST
    gather = lp_seconds(ranks, payload, setting.machine, inputs)
    # Precomputed per chain length: a simulation looks them up thousands of times.
    sizes = [best.nodes + count for count in COUNTS]
    steps = [setting.step_of(Mesh(1, roles.verify), size, size, payload, inputs) for size in sizes]
    times = [each.forward + each.tp + each.host + gather for each in steps]
    return simulate(times.__getitem__, _pass(setting, roles.draft, agreement.form, inputs), agreement.share, text)


def _pass(setting: Setting, tp: int, form: Form, inputs: Inputs) -> float:
    """Seconds of a pass of one token: what it reads, its collectives, and the host's work for one token."""
    facts, element_size = setting.facts, setting.element_size
    num_bytes = copy_bytes(facts, form) / tp + setting.kv * kv_token_bytes(facts, tp, element_size)
    num_bytes += STATE_ACCESSES * facts.state_bytes(element_size, tp)
    reading = num_bytes / (setting.machine.gpu.bandwidth * inputs.bandwidth_fraction)
    host = setting.measured.host_seconds(setting.temperature or 0.0, 1.0) * inputs.host
    return reading + tp_seconds(facts, tp, element_size, 1.0, setting.machine, inputs) + host


@dataclass(frozen=True)
class Compared:
    """A division of the GPUs, the copy, and what it yields."""

    roles: Roles
    agreement: Agreement
    found: Pipelined

    def __str__(self) -> str:
        tokens, rate = self.found.tokens_per_step, self.found.tokens_per_second
        return f"{self.agreement.form}, {tokens:.2f}, {rate:.0f}"

    def as_json(self) -> dict[str, Any]:
        parts = asdict(self.roles) | asdict(self.agreement) | asdict(self.found)
        return {**parts, "tokens_per_second": self.found.tokens_per_second}


def compare(setting: Setting, num_gpus: int, values: Mapping[str, Any]) -> list[Compared]:
    """Every division with every form of a copy, the fastest first; empty for models without a copy."""
    if setting.facts.low_bit is not None:
        return []
    memory, found = setting.machine.gpu.memory, list[Compared]()
    for form in FORMS:
        agreement = read_agreement(values, form, setting.temperature or 0.0)
        divisions = roles_of(setting.facts, num_gpus, memory, form, setting.element_size)
        found += [Compared(roles, agreement, pipelined(setting, roles, agreement)) for roles in divisions]
    return sorted(found, key=lambda each: -each.found.tokens_per_second)
