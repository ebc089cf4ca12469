r"""What a prediction head's guesses earn: texts of its model, replayed with and without them.

    LPR_PURE_PYTHON=1 python -m dev.head_gain --model FOLDER --head mtp.safetensors --texts classeval.safetensors \
        --prompts classeval.jsonl:50-62 --budgets 16 64 --output FILE

The texts are written once, greedily and with eight seeds at 0.8 (dev/head_texts.py); what the head guesses at each
place of them follows from their hidden states alone. So any number of budgets is replayed (benchmarks/replay.py)
without the model, by the specification's drafter, which can be handed guesses. A replay knows the model's candidates
of accepted nodes only, so an engine takes somewhat fewer steps, with and without a head.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.common import circumstances, write_json
from benchmarks.record import Recorded
from benchmarks.replay import FixedSizes, Task, replay_task
from dev.head_texts import Text, keep_texts, kept_texts, prompts_of, write_texts, writer_of
from lpr import DecodeConfig, SamplingParams
from lpr.core.heads import HeadDraft
from lpr.core.suffix_index import SuffixIndex
from lpr.engine.stats import DecodeStats
from lpr.model.heads.forms import DEEPSEEK
from lpr.model.heads.guesses import Chain, Guesser, num_guesses
from lpr.model.heads.head import DraftHead
from lpr.model.heads.read import make_head
from lpr.model.sampling.choice import candidates as candidates_of
from lpr.model.step_inputs import Row
from lpr.native import is_native

KINDS = (0.0, *[0.8] * 8)
"""Temperatures of the texts; the number is the seed."""


class TextGuesser(Guesser):
    """A head's guesses after every token that a text's model has written."""

    def __init__(self, model: PreTrainedModel, head: DraftHead) -> None:
        """Prepare `head` of `model`."""
        self.head, self.device = head, model.device
        self.embed, self.lm_head = model.get_input_embeddings(), head.lm_head or model.get_output_embeddings()
        self._late = {}
        for module in head.block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0

    @torch.no_grad()
    def after(self, text: Text) -> list[HeadDraft]:
        """By place: what the head guesses where token `num_prompt` + place is the last one."""
        self._cache = DynamicCache()
        states, ids, count = text.states.float(), text.ids, len(text.ids) - 1
        how = {"position_ids": torch.arange(count)[None], "past_key_values": self._cache, "use_cache": True}
        self._states = self.head(self.embed(ids[None, 1:]), states[None, :-1], **how)[0]
        self._count, self._begun = count, False
        params = SamplingParams(temperature=text.temperature, seed=text.seed)
        chains = [
            Chain(Row.chain(0, place - 1, [int(ids[place - 1])], 0), [0], [int(ids[place])], params)
            for place in range(text.num_prompt, len(ids))
        ]
        return self.guess(chains, {0: states}, None)  # type: ignore[arg-type]

    def _run(self, rows: Sequence[Row], hidden: Sequence[Tensor], cache: Any) -> list[Tensor]:
        """All rows in one forward behind the text, by a mask."""
        if not self._begun:
            self._begun = True
            return [self._states[row.num_cached : row.num_cached + 1] for row in rows]
        sizes = [row.num_entries for row in rows]
        total, begin = sum(sizes), 0
        mask = torch.full((total, self._count + total), float("-inf"))
        for row in rows:
            for entry, parent in enumerate(row.parents.tolist()):
                here = mask[begin + entry]
                if parent >= 0:
                    here[:] = mask[begin + parent]
                else:
                    here[: row.num_cached] = 0
                here[self._count + begin + entry] = 0
            begin += row.num_entries
        tokens = torch.from_numpy(np.concatenate([row.tokens for row in rows])).long()
        positions = torch.from_numpy(np.concatenate([row.positions for row in rows])).long()
        how = {"position_ids": positions[None], "past_key_values": self._cache, "attention_mask": mask[None, None]}
        found = self.head(self.embed(tokens)[None], torch.cat(list(hidden))[None], use_cache=True, **how)[0]
        self._cache.crop(-total)
        return list(found.split(sizes))


@torch.no_grad()
def recorded(model: PreTrainedModel, text: Text) -> Recorded:
    """The text with the model's candidates after what it has written."""
    written = text.states[text.num_prompt - 1 :].float()
    found, scores = candidates_of(model.get_output_embeddings()(written), 8)
    before = np.zeros((text.num_prompt - 1, 8), np.int32)
    rows = np.concatenate([before, found.numpy()]), np.concatenate([before.astype(np.uint8), scores.numpy()])
    return Recorded(0, text.temperature, text.seed, text.num_prompt, text.ids.numpy(), *rows, np.empty(0))


class HeadSizes(FixedSizes):
    """Drafts with a head's guesses, one list for each task in order, and counts nodes by source and depth."""

    def __init__(self, budget: int, guesses: Sequence[Sequence[HeadDraft]] | None) -> None:
        """Trees of `budget` nodes; without `guesses` from text alone."""
        config = DecodeConfig(window_size=0, trie_nodes=budget, branch_length=budget).resolved()
        super().__init__(config, SuffixIndex(config.trie_capacity))
        self.stats = DecodeStats()
        self._guesses, self._task, self._place = guesses, -1, -1

    def begin_task(self) -> None:
        """The next one."""
        self._task, self._place = self._task + 1, -1

    def draft(self, drafter: Any, tree: Any) -> None:
        """Hand the guesses over first."""
        known = self._guesses is not None and self._place >= 0  # none before the first token is written
        drafter.head = self._guesses[self._task][self._place] if known and self._guesses is not None else None
        super().draft(drafter, tree)

    def observe(self, tree: Any, path: list[int]) -> None:
        """Count."""
        self._place += len(path)
        self.stats.count_step(tree, path)


def replayed(texts: Sequence[Recorded], budget: int, guesses: Sequence[Sequence[HeadDraft]] | None) -> HeadSizes:
    """Replay texts, each by itself."""
    sizes = HeadSizes(budget, guesses)
    for text in texts:
        replay_task(Task(text.tokens[: text.num_prompt].tolist(), text.output, text), sizes)
    return sizes


def figures(sizes: HeadSizes) -> dict[str, Any]:
    """Tokens per step, and nodes by source and depth."""
    tally, steps = sizes.tally, sizes.tally.num_steps
    return {
        "tokens_per_step": round(tally.num_tokens / steps, 3),
        "num_tokens": tally.num_tokens,
        "num_steps": steps,
        "expected_per_step": round(tally.expected / steps, 3),
        "by_depth": [
            {"source": source, "up_to_depth": depth, **vars(count)}
            for (source, depth), count in sorted(sizes.stats.by_depth.items())
        ],
    }


def load_head(model: PreTrainedModel, path: Path) -> DraftHead:
    """The head that dev/train_head.py has written."""
    prefix = DEEPSEEK.prefix.format(model.config.num_hidden_layers)
    return make_head(model, DEEPSEEK, {key.removeprefix(prefix): each.float() for key, each in load_file(path).items()})


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", type=Path, help="its file; without it texts are only written")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="files of texts")
    parser.add_argument("--prompts", nargs="+", default=[], help="FILE:A-B for each file that is not there yet")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    for path, prompts in zip(given.texts, given.prompts, strict=False):
        if not path.exists():
            how = [SamplingParams(max_new_tokens=given.new_tokens, temperature=t, seed=s) for s, t in enumerate(KINDS)]
            asked = prompts_of(prompts, AutoTokenizer.from_pretrained(given.model))
            engine = writer_of(given.model, "float32")
            keep_texts(write_texts(engine, [(prompt, each) for prompt in asked for each in how]), path)
            engine.close()
    if given.head is None:
        return
    if is_native:
        parser.error("set LPR_PURE_PYTHON=1: the drafter in C++ takes guesses from a gather only")
    guesser, runs = TextGuesser(model, load_head(model, given.head)), []
    for path in given.texts:
        texts = kept_texts(path)
        for temperature in sorted({text.temperature for text in texts}):
            chosen = [text for text in texts if text.temperature == temperature]
            replays = [recorded(model, text) for text in chosen]
            for budget in given.budgets:
                guesser.num_guesses = num_guesses(budget)
                guesses = [guesser.after(text) for text in chosen]
                case = {"data": path.stem, "temperature": temperature, "budget": budget}
                for heads, known in (("off", None), ("on", guesses)):
                    run = {**case, "heads": heads, **figures(replayed(replays, budget, known))}
                    print({key: each for key, each in run.items() if key != "by_depth"}, flush=True)
                    runs.append(run)
            if given.output:
                facts = {"benchmark": "heads", "model": Path(given.model).name, "new_tokens": given.new_tokens}
                how = circumstances()
                how["command"] = how["command"].replace("benchmarks.", "dev.", 1)
                write_json(given.output, {**facts, "runs": runs, **how})


if __name__ == "__main__":
    main()
