"""Prompts that the front makes: fill-in-the-middle per family, chat templates, tokens without transformers."""

# ruff: noqa: RUF001 (DeepSeek's markers are spelled with these characters)

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lpr.config import InputError
from lpr.serve.api.infill import LineLimit
from lpr.serve.text import tokens as tokens_module
from lpr.serve.text.chat_template import ChatTemplates, TemplateError
from lpr.serve.text.fim import FAMILIES, Extra, Family, Filler, filler
from lpr.serve.text.lengths import lengths_of
from lpr.serve.text.served import Served
from lpr.serve.text.tokens import Tokens
from tests.fakes.fake_driver import QWEN, TEMPLATE, tokenizer_json

BEFORE, AFTER = "def f(x):\n    return ", "\n\nprint(f(2))\n"
EXTRA = (Extra("import os\n", "a.py"), Extra("y = 1", "b.py"))
MARKS = {
    "codegemma": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),
    "qwen-coder": (
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|fim_pad|>",
    ),
    "granite-4": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "glm": ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    "falcon-h1-coder": ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    "seed-coder": ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
    "mellum": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>", "<|im_start|>"),
    "starcoder2": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>"),
    "fim-underscore": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "deepseek-coder": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codestral": ("[PREFIX]", "[SUFFIX]"),
}
PROMPTS = {
    "codegemma": "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>",
    "qwen-coder": "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>",
    "granite-4": "<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>",
    "glm": "<|code_prefix|>{p}<|code_suffix|>{s}<|code_middle|>",
    "falcon-h1-coder": "<|prefix|>{p}<|suffix|>{s}<|middle|>",
    "seed-coder": "<[fim-suffix]>{s}<[fim-prefix]>{p}<[fim-middle]>",
    "mellum": "<fim_suffix>{s}<fim_prefix>{p}<fim_middle>",
    "starcoder2": "<fim_prefix>{p}<fim_suffix>{s}<fim_middle>",
    "starcoder": "<fim_prefix>{p}<fim_suffix>{s}<fim_middle>",
    "fim-underscore": "<fim_prefix>{p}<fim_suffix>{s}<fim_middle>",
    "santacoder": "<fim-prefix>{p}<fim-suffix>{s}<fim-middle>",
    "deepseek-coder": "<｜fim▁begin｜>{p}<｜fim▁hole｜>{s}<｜fim▁end｜>",
    "codestral": "[SUFFIX]{s}[PREFIX]{p}",
}
FILES = {
    "codegemma": "<|file_separator|>a.py\nimport os\n<|file_separator|>b.py\ny = 1\n<|file_separator|>c.py\n",
    "qwen-coder": "<|repo_name|>repository\n<|file_sep|>a.py\nimport os\n<|file_sep|>b.py\ny = 1\n<|file_sep|>c.py\n",
    "granite-4": "# a.py\nimport os\n# b.py\ny = 1\n# c.py\n",
    "glm": "# a.py\nimport os\n# b.py\ny = 1\n# c.py\n",
    "falcon-h1-coder": "# a.py\nimport os\n# b.py\ny = 1\n# c.py\n",
    "seed-coder": "<filename>a.py\nimport os\n<filename>b.py\ny = 1\n<filename>c.py\n",
    "mellum": "<reponame>repository\n<filename>a.py\nimport os\n<filename>b.py\ny = 1\n<filename>c.py\n",
    "starcoder2": "<repo_name>repository\n<file_sep>a.py\nimport os\n<file_sep>b.py\ny = 1\n<file_sep>c.py\n",
    "starcoder": "<reponame>repository\n<filename>a.py\nimport os\n<filename>b.py\ny = 1\n<filename>c.py\n",
    "fim-underscore": "# a.py\nimport os\n# b.py\ny = 1\n# c.py\n",
    "santacoder": "# a.py\nimport os\n# b.py\ny = 1\n# c.py\n",
    "deepseek-coder": "#a.py\nimport os\n#b.py\ny = 1\n#c.py\n",
    "codestral": "+++++ a.py\nimport os\n+++++ b.py\ny = 1\n+++++ c.py\n",
}


@pytest.mark.parametrize("name", sorted(PROMPTS))
def test_each_family_is_found_by_its_tokens_and_gets_its_prompt(name):
    tokens = Tokens(tokenizer_json(MARKS[name]))
    found = filler(tokens)
    assert found is not None and found.family.name == name
    wanted = PROMPTS[name].format(p=BEFORE, s=AFTER)
    ids = found.prompt(BEFORE, AFTER)
    assert tokens.decode(ids) == wanted
    assert ids == tokens.encode(wanted), "markers are tokens, and the text between them is tokenised by itself"
    assert tokens.decode(found.prompt(BEFORE, AFTER, EXTRA, "c.py")) == FILES[name] + wanted
    assert found.family.source.startswith(("https://", "arXiv"))


def test_every_family_of_the_table_is_tested():
    assert {family.name for family in FAMILIES} == {*PROMPTS, "codellama"}


def sentencepiece(*added):
    """A tokenizer as those of Llama-2: a space becomes a token's first character, and is invented before a text."""
    pieces = ["<unk>", "<s>", "</s>", *added, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "▁b", "a", "b", "=", "☺"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>", *added])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokens(tokenizer.to_str())


def test_codellama_has_its_space_before_the_prefix_and_none_before_the_suffix():
    tokens = sentencepiece("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    found = filler(tokens)
    assert found is not None and found.family.name == "codellama"
    names = [tokens._plain.id_to_token(each) for each in found.prompt("a=", "b")]
    assert names == ["<s>", "▁<PRE>", "▁a", "=", "▁<SUF>", "b", "▁<MID>"]
    assert [tokens._plain.id_to_token(each) for each in found.end_ids] == ["▁<EOT>"]
    assert tokens.bos_ids == [1]


def test_codestral_on_sentencepiece_as_mistral_common_encodes_it():
    tokens = sentencepiece("[PREFIX]", "[SUFFIX]")
    names = [tokens._plain.id_to_token(each) for each in filler(tokens).prompt("a=", "b")]
    assert names == ["<s>", "[SUFFIX]", "b", "[PREFIX]", "▁a", "="]


def test_markers_that_a_file_spells_out_are_plain_text():
    tokens = Tokens(tokenizer_json(MARKS["qwen-coder"]))
    ids = filler(tokens).prompt("s = '<|fim_suffix|>'", "<|endoftext|>")
    assert ids.count(tokens.id_of("<|fim_suffix|>")) == 1 and tokens.id_of("<|endoftext|>") not in ids
    assert tokens.decode(ids) == "<|fim_prefix|>s = '<|fim_suffix|>'<|fim_suffix|><|endoftext|><|fim_middle|>"


def test_a_family_can_be_named_and_must_fit():
    tokens = tokenizer_json(MARKS["starcoder"])
    from tests.fakes.fake_driver import facts

    assert Served(facts(tokenizer=tokens), ["m"], "mellum").filler.family.order == "spm"
    assert Served(facts(tokenizer=tokens), ["m"], "none").filler is None
    with pytest.raises(InputError, match="--fim glm"):
        Served(facts(tokenizer=tokens), ["m"], "glm")


@pytest.mark.parametrize("room", [8, 20, 60, 400])
def test_a_fitted_prompt_fits_and_keeps_what_is_nearest(room):
    tokens = Tokens(tokenizer_json(MARKS["qwen-coder"]))
    found = filler(tokens)
    before = "".join(f"a{index} = 1\n" for index in range(30))
    after = "".join(f"b{index} = 2\n" for index in range(30))
    ids, truncated = found.fitted(room, before, after, EXTRA)
    assert len(ids) <= room
    whole = found.prompt(before, after, EXTRA)
    assert truncated == (len(whole) > room) and (truncated or ids == whole)
    text = tokens.decode(ids)
    kept = text.partition("<|fim_prefix|>")[2].partition("<|fim_suffix|>")
    assert before.endswith(kept[0]) and after.startswith(kept[2].removesuffix("<|fim_middle|>")) and kept[0]


# Tokens.


def test_tokens_are_those_of_transformers():
    from transformers import AutoTokenizer

    from lpr.model.loader import bundled_model

    theirs = AutoTokenizer.from_pretrained(bundled_model())
    ours = Tokens(theirs.backend_tokenizer.to_str())
    for text in ("def f(x):\n    return x\n", "é 漢字 🙂", "<|endoftext|>a", "", " ", "\t\n\r\n"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
        assert b"".join(ours.bytes_of(token) for token in ids) == text.encode()


def test_bytes_of_byte_fallback_tokens():
    tokens = sentencepiece()
    ids = tokens.encode("é", add_special_tokens=False)
    assert b"".join(tokens.bytes_of(token) for token in ids).lstrip() == "é".encode()
    assert tokens.bytes_of(10**6) == b""


MIXED = "def f(x):\n    return  x\n<|endoftext|>é 漢字 🙂 e\u0301\t\r\n <|fim_middle|>▁▁a" * 3


@pytest.mark.parametrize("source", [tokenizer_json(QWEN), sentencepiece()._plain.to_str()], ids=["bytes", "pieces"])
def test_long_texts_have_the_same_ids(monkeypatch, source):
    tokens, plain, literal = Tokens(source), Tokenizer.from_str(source), Tokenizer.from_str(source)
    literal.encode_special_tokens = True
    for longest in (0, len(MIXED), 1 << 14):
        monkeypatch.setattr(tokens_module, "LONG", longest)
        for text in (MIXED, " " + MIXED, "<s>a", ""):
            for add in (True, False):
                assert tokens.encode(text, add) == plain.encode(text, add_special_tokens=add).ids
            assert tokens.encode_piece(text) == literal.encode(text, add_special_tokens=False).ids
            short = tokens.encode_piece(text, leading_space=False)
            monkeypatch.setattr(tokens_module, "LONG", 1 << 14)
            assert short == tokens.encode_piece(text, leading_space=False)
            monkeypatch.setattr(tokens_module, "LONG", longest)


def test_other_threads_run_while_a_long_text_is_encoded():
    tokens, ended, num_ticks = Tokens(tokenizer_json()), threading.Event(), 0
    thread = threading.Thread(target=lambda: (tokens.encode(MIXED * 8000), ended.set()))
    thread.start()
    while not ended.is_set():
        time.sleep(0.002)
        num_ticks += 1
    thread.join()
    assert num_ticks > 5


def tokenizers_of_all_kinds():
    """A tokenizer's JSON by what is special about it, and whether its tokens have an end."""
    composing, swallowing = Tokenizer.from_str(tokenizer_json()), Tokenizer.from_str(tokenizer_json())
    composing.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    swallowing.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    llama = Tokenizer.from_str(sentencepiece()._plain.to_str())
    llama.pre_tokenizer = None
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bounded = {
        "bytes": Tokenizer.from_str(tokenizer_json(QWEN)),
        "pieces": Tokenizer.from_str(sentencepiece()._plain.to_str()),
        "llama": llama,
        "composing": composing,
        "swallowing": swallowing,
    }
    deleting, splitting = Tokenizer.from_str(tokenizer_json()), Tokenizer.from_str(tokenizer_json())
    deleting.normalizer = normalizers.Strip()
    splitting.pre_tokenizer = pre_tokenizers.Whitespace()
    replacing = Tokenizer.from_str(tokenizer_json())
    replacing.normalizer = normalizers.Replace("long", "s")
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    unknown = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    endless = [deleting, splitting, replacing, words, unknown, pieces]
    return {name: each.to_str() for name, each in bounded.items()}, [each.to_str() for each in endless]


BOUNDED, ENDLESS = tokenizers_of_all_kinds()


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_no_text_has_fewer_tokens_than_its_characters_say(name, data):
    tokens = Tokens(BOUNDED[name])
    composed = ["e\u0301", "\u1f82", "\u03b1\u0313\u0300\u0345", "\u1112\u1161\u11ab"]
    plain = ["  ", " " * 40, "<mask>", "NotImplementedError", "a" * 30, "<|endoftext|>", "\r\n", "🙂", "x"]
    pieces = st.sampled_from([*composed, *plain])
    text = "".join(data.draw(st.lists(st.one_of(pieces, st.text(max_size=20)), max_size=30)))
    text = text.encode("utf-8", "replace").decode()
    assert tokens.lengths is not None
    assert tokens.lengths.least_tokens(text) <= len(tokens.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("source", ENDLESS, ids=range(len(ENDLESS)))
def test_a_tokenizer_that_drops_characters_has_no_bound(source):
    assert lengths_of(source) is None


def test_a_text_far_above_the_context_is_known_by_its_characters():
    lengths = Tokens(tokenizer_json()).lengths
    assert lengths.least_tokens("a" * 100_000) > 4096 and lengths.least_tokens("") == 0
    assert lengths.least_tokens("é" * 100_000) > 4096


@pytest.mark.parametrize("source", BOUNDED.values(), ids=BOUNDED)
@pytest.mark.slow(first=2)
def test_only_as_much_of_a_long_text_is_encoded_as_fits(source, monkeypatch):
    """With the same result as if all were."""
    dice = random.Random(5)
    words = [
        "def f(x):\n",
        "    return x\n",
        "é ",
        "漢字",
        " " * 30,
        "a",
        "b=",
        "\n\n",
        "NotImplementedError ",
        "x" * 50,
    ]
    for room in (6, 60):
        cut, whole = Tokens(source), Tokens(source)
        whole.lengths = None
        before, after, other = ("".join(dice.choices(words, k=1_500)) for _ in range(3))
        assert len(cut.tail(before, room)) < len(before) and len(cut.head(after, room)) < len(after)
        assert cut.encode(cut.tail(before, room))[-room:] == whole.encode(before)[-room:]
        family = Family(name="x", prefix="a", suffix="b", middle="=", repository="a", file="b", source="https://")
        for extra in ((), (Extra(other, "a"), Extra("b = a\n", "b")), (Extra("a", "a"),) * 200):
            for prefix, suffix in ((before, after), ("a", after), (before, ""), ("a", "b"), ("", "")):
                found = Filler(family, cut).fitted(room, prefix, suffix, extra)
                assert found == Filler(family, whole).fitted(room, prefix, suffix, extra)


# Chat templates.

CONVERSATION = [{"role": "system", "content": "s"}, {"role": "user", "content": '<a href="x">'}]
TEMPLATES = {
    "ours": TEMPLATE,
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{{ bos_token }}\n{%- for m in messages %}\n    {%- if loop.index0 > 5 %}{% break %}{% endif %}\n"
    "    {% generation %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{% endgeneration %}\n{%- endfor %}",
    "json": "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ {'é': 1} | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("generate", [True, False])
def test_templates_render_as_in_transformers(name, generate):
    from transformers import AutoTokenizer

    from lpr.model.loader import bundled_model

    tokenizer = AutoTokenizer.from_pretrained(bundled_model())
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = TEMPLATES[name]
    theirs = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=generate)
    special = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    ours = ChatTemplates({"default": TEMPLATES[name]}, special).render(
        "default", CONVERSATION, {"add_generation_prompt": generate}
    )
    assert ours == theirs


def test_a_template_may_refuse_and_may_not_escape_its_sandbox():
    def render(source):
        return ChatTemplates({"default": source}, {}).render("default", CONVERSATION, {"add_generation_prompt": True})

    with pytest.raises(TemplateError, match="no system"):
        render("{{ raise_exception('no system') }}")
    with pytest.raises(TemplateError):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateError):
        render("{{ messages.append(1) }}")
    with pytest.raises(TemplateError, match="cannot be read"):
        render("{% if %}")


# llama.cpp's limits of a text.


def limited(text, n_indent, pieces):
    limit = LineLimit(n_indent, 0)
    shown = ""
    for start in range(0, len(text), pieces):
        piece, ended = limit.take(text[start : start + pieces], start + pieces >= len(text))
        shown += piece
        if ended:
            break
    return shown


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text, n_indent, shown",
    [
        ("a\n    b\nc\n", 4, "a\n    b\n"),
        ("a\n    b\n  c\n", 4, "a\n    b\n"),
        ("a\n\n    b\n", 4, "a\n\n    b\n"),
        ("a\n\tb", 1, "a\n\tb"),
        ("a\nb", 0, "a\nb"),
        ("a\n    ", 4, "a\n    "),
        ("x", 4, "x"),
    ],
)
def test_a_line_that_is_indented_too_little_ends_the_text(text, n_indent, shown, pieces):
    assert limited(text, n_indent, pieces) == shown


def test_time_ends_a_text_only_after_a_line(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("lpr.serve.api.infill.time.monotonic", lambda: now[0])
    limit = LineLimit(0, 100)
    assert limit.take("a", False) == ("a", False)
    now[0] = 1.0
    assert limit.take("b", False) == ("b", False)
    assert limit.take("\nc", False) == ("\nc", True)
    soon = LineLimit(0, 100)
    assert soon.take("a\nb", False) == ("a\nb", False)
