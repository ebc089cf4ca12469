"""The bundled model: its texts, and its recipe's holes, weights of tokens and loops."""

from __future__ import annotations

import random
import re
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import lpr
from tests.fakes.fake_driver import tokenizer_json
from tests.fakes.paths import ROOT
from tests.fakes.skeletons import SKELETONS

TEXT = "import os\n\n\ndef size(path):\n    # bytes\n    found = os.stat(path)\n    return found.st_size\n\n\nx = 1\n"


@pytest.fixture(scope="module", autouse=True)
def recipe():
    """The folder of the recipe's modules, which import each other by their names."""
    sys.path.insert(0, str(ROOT / "dev"))
    yield
    sys.path.remove(str(ROOT / "dev"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    import bundled_text
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    bundled_text.save_tokenizer(without_marks(), folder)
    return AutoTokenizer.from_pretrained(folder)


def without_marks():
    """The bundled model's tokenizer without the tokens for holes."""
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(tokenizer_json())
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|pad|>")


def test_holes_leave_nothing_out():
    from bundled_text import cut_holes, line_hole, make_hole, pieces_of, syntax_spans

    rng = random.Random(0)
    assert "".join(pieces_of(TEXT * 40, rng)) == TEXT * 40
    assert "".join("".join(hole) for hole in cut_holes(TEXT * 40, rng)) == TEXT * 40
    for _ in range(500):
        assert "".join(make_hole(TEXT, syntax_spans(TEXT), rng)) == TEXT
    lines = {line_hole(TEXT, rng) for _ in range(50)}
    assert {middle for _, middle, _ in lines} == {
        "def size(path):",
        "    # bytes",
        "    found = os.stat(path)",
        "    return found.st_size",
    }
    assert all("".join(hole) == TEXT and hole[0].endswith("\n") and hole[2].startswith("\n") for hole in lines)


def test_most_holes_are_lines_and_syntax():
    """Few middles break off within a word, whatever stands before the node on its line."""
    from bundled_text import cut_holes, syntax_spans

    text = 'def f(path):\n    größe = measure("ä", len(path))\n    return größe\n'
    spans = [text[start:end] for start, end in syntax_spans(text)]
    assert {'measure("ä", len(path))', "len(path)", "return größe", text[:-1]} <= set(spans)
    assert syntax_spans("def (") == [] and syntax_spans("x = 1\ry = 2\n") == []
    rng, split = random.Random(0), 0
    holes = [hole for _ in range(60) for hole in cut_holes(TEXT * 9, rng)]
    for before, middle, after in holes:
        split += bool(re.search(r"\w$", before + middle) and re.match(r"\w", after))
    assert len(holes) > 60 and split < 0.1 * len(holes)


def test_ids_keep_the_vocabulary_and_gain_the_marks(tokenizer):
    from bundled_text import FIM, encode

    before = without_marks()
    assert len(tokenizer) % 8 == 0 and len(set(tokenizer.convert_tokens_to_ids(list(FIM)))) == 3
    assert tokenizer(TEXT).input_ids == before(TEXT).input_ids
    plain, num_holes = encode(tokenizer, [TEXT], 0.0, random.Random(0))
    assert num_holes == 0 and plain.tolist() == [*before(TEXT).input_ids, 0]
    holed, num_holes = encode(tokenizer, [TEXT * 3], 1.0, random.Random(0))
    assert num_holes >= 1
    prefix, suffix, middle = tokenizer.convert_tokens_to_ids(list(FIM))
    order = [token for token in holed.tolist() if token in (prefix, suffix, middle, 0)]
    assert order == [prefix, suffix, middle, 0] * num_holes


def test_the_service_prompts_as_the_recipe_trains(tokenizer, monkeypatch):
    """`suffix` finds the added tokens, and its prompts are the ids that were trained on."""
    import bundled_text

    from lpr.serve.text.fim import filler
    from lpr.serve.text.tokens import Tokens

    monkeypatch.setattr(bundled_text, "make_hole", lambda text, spans, rng: bundled_text.line_hole(text, rng))
    trained, _ = bundled_text.encode(tokenizer, [TEXT], 1.0, random.Random(3))
    ask = filler(Tokens(tokenizer.backend_tokenizer.to_str()))
    assert ask is not None and tokenizer.convert_tokens_to_ids("<|fim_pad|>") in ask.end_ids
    asked = {}
    for middle in ("def size(path):", "    # bytes", "    found = os.stat(path)", "    return found.st_size"):
        prefix, suffix = TEXT.split(middle + "\n")
        asked[middle] = [*ask.prompt(prefix, "\n" + suffix), *tokenizer(middle).input_ids, 0]
    assert trained.tolist() in asked.values()


def test_weights_of_a_batch(tokenizer, tmp_path):
    from bundled_text import FIM
    from train_bundled import Batches

    prefix, suffix, middle = tokenizer.convert_tokens_to_ids(list(FIM))
    np.array([prefix, 5, suffix, 6, middle, 7, 8, 0] * 300, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.savez(
        tmp_path / "stuck.npz",
        ids=np.array([9, 9, 4, 4], dtype=np.uint16), weight=np.array([1, 0, -1, -1], dtype=np.int8), starts=[0],
    )  # fmt: skip
    args = Namespace(seed=1, tokens=2048, middle_weight=3.0, end_weight=2.0, stuck_share=1.0)
    batches = Batches(tmp_path, args, tokenizer)
    ids, weight = batches.get({"step": 0, "block": 0}, 2048, 0.0, 0.0)
    inside = weight[0] == 3
    assert ids[0, 1:][inside].unique().tolist() == [0, 7, 8] and int(inside.sum()) == 3 * 256
    ids, weight = batches.get({"step": 0, "block": 0}, 2048, 0.0, 1.0)
    assert ids[0, :6].tolist() == [9, 9, 4, 4, 9, 9] and weight[0, :5].tolist() == [0, -1, -1, 1, 0]
    ids, weight = batches.get({"step": 0, "block": 0}, 2048, 1.0, 0.0)
    stuck = torch.nonzero(weight[0] < 0)[:, 0] + 1
    assert len(stuck) > 900 and int(stuck[-1]) == 2048
    tail = ids[0, int(stuck[0]) :]
    assert any(torch.equal(tail[period:], tail[:-period]) for period in range(1, 600))


def test_no_prompt_follows_text_that_was_cut(tokenizer):
    """What the model is to unlearn ends with an end token, before which nothing teaches it to begin a file."""
    from bundled_measures import stuck_sequence

    prompt, rng = tokenizer("import os\n\n\n").input_ids, random.Random(0)
    sound = tokenizer("def size(path):\n    return os.stat(path).st_size\n").input_ids
    assert stuck_sequence(tokenizer, prompt, sound, rng) is None

    begun = [*tokenizer("def size(pa").input_ids, *tokenizer("import sys\n\n\nx = 1\n").input_ids]
    ids, weight = stuck_sequence(tokenizer, prompt, begun, rng)
    assert tokenizer.decode(ids) == "import os\n\n\ndef size(paimport sys<|endoftext|>"
    unlearned = np.flatnonzero(weight == -1)
    assert tokenizer.decode(ids[unlearned]) == "import sys" and (weight[: len(prompt)] == 1).all() and weight[-1] == 0

    method = "    def size(self):\n        return self.size\n\n"
    for _ in range(20):
        ids, weight = stuck_sequence(tokenizer, prompt, tokenizer(method * 9).input_ids, rng)
        text = tokenizer.decode(ids)
        copies = text.count("def size")
        assert text == "import os\n\n\n" + (method * copies)[:-1] + "<|endoftext|>"
        assert copies > 1 and weight[-2:].tolist() == [1, 1] and (weight[len(prompt) : len(prompt) + 10] == 0).all()


def test_other_files_are_found():
    from bundled_measures import begun_file

    for text in ('raise ValueError("afrom typing import Any\n', "Get theimport os\n", "x(\nimport os\n", "aclass B:\n"):
        assert begun_file(text) >= 0, text
    sound = (
        "    import os\n\nfrom os import (\n    path,\n)\nclass A(B):\n    def f(self):\n        pass\n"
        "    >>> from os import path\n# import os\nx = reimport\nyield from a.b\nThe class method: import the data\n"
    )
    assert begun_file(sound) == -1
    for text in ('    if user is not None:"""\n', '        return"""\nclass Server:\n'):
        assert begun_file(text) >= 0, text


def test_glued_words_are_found():
    from bundled_measures import first_fault, glued_word

    for text, place in (
        ("self.valueclass = value", 10), ("(x,class):", 3), ("prediclass_labels", 5), ("aclass=False", 1),
        ("the railimport of", 8), ("declass(hand)", 2), ("none=def\n", 5),
    ):  # fmt: skip
        assert glued_word(text) == first_fault(text) == place, text
    sound = (
        "superclass dataclass Metaclass isclass() __class__ subclass importlib default fromkeys :class:`A` 'class'\n"
        "from_dump(context=from_dump)\nf(x)\nclass A:\n    def f(self):\n        ...\nx[1]\nimport os\ndefined\n"
    )
    assert first_fault(sound) == -1


def test_the_bundled_model_writes_clean_text():
    """Greedy completions of class skeletons: none begins another file in a line or glues its first word to others."""
    from bundled_measures import first_fault

    engine = lpr.Engine.from_pretrained(lpr.bundled_model(), lpr.DecodeConfig(max_batch_size=8), device="cpu")
    done = engine.generate(list(SKELETONS), lpr.SamplingParams(max_new_tokens=160))
    assert [each.text for each in done if first_fault(each.text) >= 0] == []
    assert any(each.finish_reason == "stop" for each in done)


def test_loops_are_found():
    from bundled_measures import find_loop, four_gram_loop

    assert find_loop([1, 2, 3, *[4, 5] * 40], 32, 64) == (3, 2)
    assert find_loop([1, 2, 3, *[4, 5] * 32], 32, 64) == (0, 0)
    assert find_loop(list(range(300)), 32, 64) == (0, 0)
    assert four_gram_loop([7, *[1, 2, 3, 4] * 9]) and not four_gram_loop([1, 2, 3, 4] * 8)


def test_a_wider_model_has_the_same_logits(tokenizer):
    """Rows for added tokens change no other logit; the losses written out are those of the library."""
    from bundled_net import batch_loss, load_model, token_losses

    ids = torch.tensor([tokenizer(TEXT).input_ids])
    narrow, wide = (load_model(lpr.bundled_model(), size, "cpu") for size in (0, len(tokenizer) + 8))
    with torch.no_grad():
        logits = [model(ids).logits for model in (narrow, wide)]
        library = torch.nn.functional.cross_entropy(logits[1][0, :-1], ids[0, 1:], reduction="none")
        ours = token_losses(wide, ids)
    size = logits[0].shape[-1]
    assert wide.config.vocab_size == len(tokenizer) + 8 and torch.allclose(logits[0], logits[1][..., :size], atol=1e-4)
    assert torch.allclose(ours[0], library, atol=0.2) and abs(float(ours.mean() - library.mean())) < 0.02
    weight = torch.ones(ours.shape)
    weight[0, 0], weight[0, 1], weight[0, 2] = 0.0, -2.0, 3.0
    with torch.no_grad():
        loss, nll = batch_loss(wide, ids, weight, 0.5)
    unlikelihood = -2 * torch.log1p(-torch.exp(-ours[0, 1]))
    assert float(loss) == pytest.approx(float(ours[0, 3:].sum() + 3 * ours[0, 2] + unlikelihood) / 2, rel=1e-3)
    assert float(nll) == pytest.approx(float(ours[0, 2:].sum()), rel=1e-3)


def test_a_teacher_says_what_to_write_instead():
    """At a negative weight the loss is the cross-entropy with a narrower teacher's choice without the token."""
    from bundled_net import batch_loss, load_model, other_choices

    model, teacher = load_model(lpr.bundled_model(), 4112, "cpu"), load_model(lpr.bundled_model(), 0, "cpu")
    ids = torch.tensor([[5, 900, 41, 7]])
    instead = other_choices(teacher, ids)
    assert torch.allclose(instead.sum(-1), torch.ones(1, 3)) and not instead.gather(-1, ids[:, 1:, None]).any()
    with torch.no_grad():
        plain = teacher(ids[:, :-1]).logits[0, 1]
        plain[41] = -torch.inf
        assert torch.allclose(instead[0, 1], plain.softmax(-1), atol=1e-2)  # bf16 where the processor multiplies it
        likely = model(ids[:, :-1]).logits[0, 1].log_softmax(-1)
        loss, _ = batch_loss(model, ids, torch.tensor([[0.0, -2.0, 0.0]]), 1.0, teacher)
        alone, _ = batch_loss(model, ids, torch.tensor([[0.0, -2.0, 0.0]]), 1.0)
    assert float(loss) == pytest.approx(-2 * float((instead[0, 1] * likely[:4104]).sum()), rel=1e-2)
    assert abs(float(loss - alone)) > 0.1


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_gradients_are_orthogonalised_as_by_torch(shape):
    from bundled_net import newton_schulz

    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    settings = (3.4445, -4.775, 2.0315), 5, 1e-7
    theirs = torch.optim._muon._zeropower_via_newtonschulz(gradient, *settings)
    ours = newton_schulz(gradient, *settings)
    assert ours.dtype == torch.float32 and torch.allclose(ours, theirs.float(), atol=0.03)
    assert float(torch.linalg.svdvals(ours).max()) < 1.3 and float(torch.linalg.svdvals(ours).min()) > 0.6


def test_a_mixture_of_weights(tokenizer, tmp_path):
    """Equal parts are the mean; a part without rows for the tokens for holes takes the first one's."""
    from bundled_net import load_model, mix

    folders = [tmp_path / name for name in ("wide", "narrow", "mixed")]
    model = load_model(lpr.bundled_model(), len(tokenizer) + 8, "cpu")
    model.save_pretrained(folders[0])
    tokenizer.save_pretrained(folders[0])
    narrow = load_model(lpr.bundled_model(), 0, "cpu")
    with torch.no_grad():
        for parameter in narrow.parameters():
            parameter *= 3
    narrow.save_pretrained(folders[1])
    mix(Namespace(parts=[f"{folders[0]}=1", f"{folders[1]}=3"], out=folders[2]))
    mixed = load_model(folders[2], 0, "cpu").state_dict()
    rows = narrow.get_input_embeddings().weight.shape[0]
    for name, value in model.state_dict().items():
        assert torch.allclose(mixed[name][:rows], 2.5 * value[:rows], rtol=0.01)
    added = model.get_input_embeddings().weight[rows:]
    assert torch.allclose(mixed["model.embed_tokens.weight"][rows:], added, rtol=0.01)
