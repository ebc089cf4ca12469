r"""Wall clock of completions with a prediction head over those without it: automatic sizes, one request, by turns.

    python -m dev.head_clock --model FOLDER --prompts classeval.jsonl:50-53 humaneval.jsonl:82-85 --threads 2

The head lies beside the checkpoint. Every engine loads the model for itself and lays out its weights, as a service
does; benchmarks.adaptive shares one model, whose products are torch's. Outputs are compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from dev.head_texts import prompts_of
from lpr import Completion, DecodeConfig, Engine, SamplingParams

WARM_UP = SamplingParams(max_new_tokens=16, ignore_eos=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--prompts", nargs="+", required=True, help="JSONL files with a prompt a line, FILE or FILE:A-B"
    )
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ways = {
        "plain": DecodeConfig.autoregressive(max_batch_size=1),
        "off": DecodeConfig(max_batch_size=1, draft_heads="off"),
        "on": DecodeConfig(max_batch_size=1, draft_heads="on"),
    }
    engines = {
        name: Engine.from_pretrained(given.model, decode, dtype=given.dtype, device=given.device)
        for name, decode in ways.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    for engine in engines.values():
        engine.generate([[*range(1, 40)]], WARM_UP)
    for file in given.prompts:
        prompts = prompts_of(file, tokenizer)
        for temperature in (0.0, 0.8):
            seconds, done = dict.fromkeys(ways, 0.0), dict[str, list[Completion]]()
            for number, prompt in enumerate(prompts):
                names = list(ways)[number % 3 :] + list(ways)[: number % 3]
                params = SamplingParams(max_new_tokens=given.new_tokens, temperature=temperature, seed=number)
                for name in names:
                    began = time.perf_counter()
                    done.setdefault(name, []).extend(engines[name].generate([prompt], params))
                    seconds[name] += time.perf_counter() - began
            ids = {name: [each.token_ids for each in found] for name, found in done.items()}
            steps = {name: sum(each.stats.num_steps for each in found) for name, found in done.items()}
            written = sum(map(len, ids["plain"]))
            equal = {name: sum(map(list.__eq__, ids[name], ids["plain"])) for name in ("on", "off")}
            print(
                f"{Path(file).name}, temperature {temperature}: {len(prompts)} prompts, {written} tokens;",
                f"on over off {seconds['off'] / seconds['on']:.2f}, over plain",
                f"{seconds['plain'] / seconds['on']:.2f} on and {seconds['plain'] / seconds['off']:.2f} off;",
                f"tokens per step {written / steps['on']:.2f} on and {written / steps['off']:.2f} off;",
                f"outputs equal to plain decoding's {equal['on']} on and {equal['off']} off",
                flush=True,
            )
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
