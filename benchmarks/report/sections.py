"""The sections of the report: for each benchmark its title, how to read it, and the builder of its tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.report import services, steps, times
from benchmarks.report.parts import Json, Part, every_value
from benchmarks.report.servers import servers


@dataclass(frozen=True)
class Section:
    """What the page shows of one benchmark's results."""

    title: str
    text: str
    """How to read the tables and pictures."""
    build: Callable[[Json], list[Part]]
    options: str = ""
    """Of the command that makes the result."""
    program: str = ""
    """Its module; default: the one named as the benchmark."""

    def command(self, benchmark: str) -> str:
        """The command that makes the result."""
        words = [
            "python -m",
            self.program or f"benchmarks.{benchmark}",
            self.options,
            f"--output benchmarks/results/{benchmark}.json",
        ]
        return " ".join(filter(None, words))


DATA = "--data hub:classeval"
SECTIONS = {
    "strong_scaling": Section(
        "Tokens per step against ranks",
        "Every rank adds its own nodes to the tree. Steps are counted, not timed. The paper is lookahead decoding (Fu, "
        "Bailis, Stoica, Zhang, ICML 2024, arXiv 2402.02057), with another model and other prompts.",
        steps.strong_scaling, DATA,
    ),
    "ablation": Section(
        "Tokens per step by source and node budget",
        "One rank, with the window only, the trie only, or both with half of the budget each. A node counts for the "
        f"source that named it first. Shares of fewer than {steps.FEWEST} nodes are not shown.",
        steps.ablation, DATA,
    ),
    "replay": Section(
        "Drafting alone",
        "Recorded completions of other models, replayed. Cold: only the prompt is known; warm: outputs of other tasks "
        "are known. The limit copies the longest phrase of the text so far in every step.",
        steps.replay, "--traces FILE.jsonl",
    ),
    "data_sets": Section(
        "Drafting on four data sets",
        "Recorded texts of SmolLM2-135M-Instruct, each replayed by itself. The limit copies the longest phrase of the "
        "text so far in every step.",
        steps.data_sets, "--steps FILE.npz",
    ),
    "heads": Section(
        "A trained prediction head",
        "Texts of SmolLM2-135M-Instruct, replayed with and without what a head guesses that was trained for it; eight "
        "seeds at 0.8. The command needs LPR_PURE_PYTHON=1, and writes the texts first if it is given --prompts.",
        steps.heads, "--model FOLDER --head mtp.safetensors --texts FILE.safetensors", "dev.head_gain",
    ),
    "peers": Section(
        "Peers", "lpr and related systems on the same prompts and weights.", steps.peers, "run --work DIR"
    ),
    "decode": Section(
        "Wall clock against transformers",
        "Whole completions, greedy. All contestants must emit the same tokens; the table counts prompts where one did "
        "not. auto: sizes that lpr chose itself; trie N, both N: N nodes per step.",
        times.decode, DATA,
    ),
    "adaptive": Section(
        "Automatic sizes against fixed sizes",
        "lpr chooses the size of every tree from measured step times and past acceptance. Its aims: match the best "
        "fixed size, and never be slower than plain decoding.",
        times.adaptive, "--data hub:classeval hub:humaneval",
    ),
    "step": Section(
        "Time of a step",
        "Medians of processor time. Host alone: the same steps with the model's results read from a recording, as on a "
        "host whose accelerator computes.",
        times.step, f"{DATA} --threads 1",
    ),
    "host": Section(
        "Host time on a paced device", "Efficiency is the device's share of the wall time.", times.host, "--quick"
    ),
    "gpu_check": Section(
        "Time of a step against its nodes, t(n)",
        "While t(n) is flat, further nodes cost nothing; where it rises, they must earn their time.",
        times.gpu_check,
    ),
    "fleet": Section("Wall clock of real ranks", "Meshes of lp x tp; tokens are compared.", times.fleet, DATA),
    "serve": Section("The service under load", "Waiting times of clients, by load and setting.", services.serve, DATA),
    "servers": Section(
        "Servers", "lpr's server beside vLLM's and llama.cpp's: the same prompts, by turns, in one run. Warm: the "
        "server has answered the same prompts before.",
        servers, "--model FOLDER --vllm DIR --llama DIR",
    ),
    "soak": Section("Soak", "Hostile clients next to well-formed requests.", services.soak, "--minutes 60 --lp 2"),
    "hostile": Section(
        "Hostile clients", "Each probe by itself, against one or several versions of the service.", services.hostile,
        "--service .",
    ),
    "chaos": Section("Chaos", "Ranks are killed and stopped; every stream is compared.", services.chaos),
    "homes": Section("Home ranks", "Work and K/V copies per token, by policy.", services.homes, DATA),
}  # fmt: skip


def parts_of(facts: Json) -> list[Part]:
    """The tables and pictures of a result; of an unknown benchmark every value."""
    section = SECTIONS.get(str(facts.get("benchmark", "")))
    return every_value(facts) if section is None else section.build(facts)
