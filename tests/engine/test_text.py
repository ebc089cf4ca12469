"""TextStream against a reference that decodes everything after each token."""

from __future__ import annotations

import random
import tempfile
import time
from functools import cache
from itertools import chain

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

import lpr.engine.text
from lpr.config import InputError, SamplingParams
from lpr.engine.stop_search import StopSearch
from lpr.engine.text import CONTEXT, REPLACEMENT, IncrementalDecoder, TextStream, Vocabulary

LINES = [
    "def f(x):\n    return x + 1\n",
    "the quick brown fox jumps over the lazy dog, then the other",
    "naïve café, 你好世界, 👩\u200d👩\u200d👧 and 👍🏽, e\u0301 o\u0308",
] * 4
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz\n,.é好\u0301\u200d�", "▁the", "▁a", "ing", "▁▁▁▁", "▁fox", "é▁"]


def fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.add_special_tokens(["<extra>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    return fast(backend)


def byte_fallback(strip: bool = True) -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate([*SPECIALS, *BYTES, *PIECES])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return fast(backend)


def word_piece() -> PreTrainedTokenizerFast:
    pieces = ["the", "fox", "##es", "##ing", ".", "'", "s", "do", "n't", *"abcde", "##a", "##b", "##c"]
    vocab = {token: index for index, token in enumerate([*SPECIALS, *pieces])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return fast(backend)


def metaspace() -> PreTrainedTokenizerFast:
    vocab = [(token, -1.0) for token in [*SPECIALS, *PIECES]]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return fast(backend)


class SentencePieceOnly(SentencePieceBackend):
    """Without a Rust backend; transformers' own joining strips all spaces and shows byte tokens by name."""


class SentencePieceBytes(SentencePieceBackend):
    """Without a Rust backend; SentencePiece decodes byte tokens, an invalid one at a time."""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.sp_model.decode(tokens)


def slow(cls: type[SentencePieceBackend]) -> SentencePieceBackend:
    with tempfile.TemporaryDirectory() as folder:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_prefix=f"{folder}/model",
            model_type="bpe",
            vocab_size=340,
            byte_fallback=True,
            character_coverage=0.98,
            minloglevel=2,
        )
        return cls(vocab_file=f"{folder}/model.model", unk_token="<unk>", bos_token="<s>", eos_token="</s>")


BUILDERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_unstripped": lambda: byte_fallback(strip=False),
    "word_piece": word_piece,
    "metaspace": metaspace,
    "sentencepiece_only": lambda: slow(SentencePieceOnly),
    "sentencepiece_bytes": lambda: slow(SentencePieceBytes),
    "byt5": ByT5Tokenizer,
}
FAST = ["byte_level", "byte_fallback", "byte_fallback_unstripped", "word_piece", "metaspace"]
all_tokenizers = pytest.mark.parametrize("name", BUILDERS)


@cache
def tokenizer_named(name):
    return BUILDERS[name]()


def decode(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def continuation(tokenizer, prompt, tokens) -> str:
    whole = decode(tokenizer, [*prompt, *tokens])
    shown = decode(tokenizer, prompt)
    while not whole.startswith(shown):
        shown = shown[:-1]
    return whole.removeprefix(shown)


def naive(tokenizer, prompt, tokens, params, eos):
    """Ids, text and finish reason by decoding everything after each token; no stop string may hold U+FFFD."""
    for count, token in enumerate(tokens, 1):
        is_eos = token in eos and not params.ignore_eos
        text = continuation(tokenizer, prompt, tokens[: count - is_eos])
        cut = min((cut for stop in params.stop if (cut := text.find(stop)) >= 0), default=None)
        if cut is not None or is_eos:
            return tokens[:count], text[:cut], "stop"
        if count == params.max_new_tokens:
            return tokens[:count], text, "length"
    return tokens, continuation(tokenizer, prompt, tokens), None


def run(stream, tokens, blocks=()):
    """Push until the finish, taking at block borders; gives the chunks. Notes the finish on the stream."""
    chunks = []
    stream.reason = None
    for index, token in enumerate(tokens):
        stream.reason = stream.push(token)
        if stream.reason:
            break
        if index in blocks:
            chunks.append(stream.take())
    chunks.append(stream.take())
    return chunks


def check(tokenizer, prompt, tokens, params, blocks=None, eos=None):
    eos = frozenset([tokenizer.eos_token_id]) if eos is None else eos
    stream = TextStream(tokenizer, prompt, params, eos)
    chunks = run(stream, tokens, range(len(tokens)) if blocks is None else blocks)
    ids, text, reason = naive(tokenizer, prompt, tokens, params, eos)
    assert (stream.num_tokens, stream.reason) == (len(ids), reason)
    assert stream.text == text
    if reason:
        assert "".join(chunks) == text
    else:
        assert text.startswith("".join(chunks))


def text_tokens(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def byte_tokens(tokenizer, data: bytes) -> list[int]:
    """Tokens of one byte each; empty where the tokenizer has none."""
    if isinstance(tokenizer, ByT5Tokenizer):
        return [byte + 3 for byte in data]
    if isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        backend = tokenizer.backend_tokenizer
        if isinstance(backend.decoder, decoders.ByteLevel):
            alphabet = byte_alphabet()
            return [backend.token_to_id(alphabet[byte]) for byte in data]
        tokens = [backend.token_to_id(BYTES[byte]) for byte in data]
        return [] if None in tokens else tokens
    return tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in data])


@cache
def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in of each byte: printable Latin-1 as it is, the rest from U+0100 on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    shown = {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [shown[byte] for byte in range(256)]


UNICODE = st.text(
    st.sampled_from("ab the,\n é你好😀👍🏽👩\u200d👧\u0301�") | st.characters(exclude_categories=["Cs"]),
    max_size=8,
)
FRAGMENTS = [b"\xe4\xbd\xa0", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xff", b"\x80\x80", b" ", b"a"]
DATA = st.sampled_from(FRAGMENTS) | st.binary(max_size=6)


def sequences(tokenizer, max_chunks=8):
    piece = st.one_of(
        UNICODE.map(lambda text: text_tokens(tokenizer, text)),
        DATA.map(lambda data: byte_tokens(tokenizer, data)),
        st.lists(st.integers(0, len(tokenizer) - 1), max_size=6),
        st.sampled_from(sorted(tokenizer.all_special_ids)).map(lambda token: [token]),
    )
    return st.lists(piece, max_size=max_chunks).map(lambda pieces: list(chain.from_iterable(pieces)))


@all_tokenizers
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.slow(first=3)
def test_equals_decoding_everything_after_each_token(name, data):
    tokenizer = tokenizer_named(name)
    prompt = data.draw(sequences(tokenizer, 5), label="prompt")
    tokens = data.draw(sequences(tokenizer), label="tokens")
    text = continuation(tokenizer, prompt, tokens)
    stops = data.draw(st.lists(substrings(text), max_size=3), label="stop")
    params = SamplingParams(
        max_new_tokens=data.draw(st.integers(1, len(tokens) + 1), label="max_new_tokens"),
        stop=tuple(stop for stop in stops if stop and REPLACEMENT not in stop),
        ignore_eos=data.draw(st.booleans(), label="ignore_eos"),
    )
    blocks = data.draw(st.none() | st.sets(st.integers(0, len(tokens))), label="blocks")
    check(tokenizer, prompt, tokens, params, blocks)


def substrings(text):
    """Parts of the text, and parts with a false end, which keep the stream waiting in vain."""
    start = st.integers(0, max(0, len(text) - 1))
    part = st.tuples(start, st.integers(1, 6)).map(lambda span: text[span[0] : span[0] + span[1]])
    return part | part.map(lambda text: text + "~") | st.text("ab e", min_size=1, max_size=3)


@all_tokenizers
@pytest.mark.slow(first=3)
def test_long_random_sequences(name):
    tokenizer = tokenizer_named(name)
    rng = random.Random(name)
    for _ in range(3):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(150)]
        for low in (0x00, 0x80, 0xE0):
            tokens += byte_tokens(tokenizer, bytes(rng.randrange(low, 256) for _ in range(40)))
        tokens += text_tokens(tokenizer, "".join(rng.choices(LINES, k=3)))
        check(tokenizer, tokens[:30], tokens[30:], SamplingParams(max_new_tokens=10_000, ignore_eos=True))


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byt5"])
@pytest.mark.parametrize(
    "text",
    [
        "e\u0301o\u0308",
        "👩\u200d👩\u200d👧\u200d👦👍🏽🇩🇪",
        "\u200d\u200d",
        "你好世界" * 10,
        "\x00\x7f",
        "�a�",
    ],
)
def test_every_character_arrives_whole(name, text):
    tokenizer = tokenizer_named(name)
    tokens = byte_tokens(tokenizer, (text + "a").encode()) + text_tokens(tokenizer, "bc")
    stream = TextStream(tokenizer, [], SamplingParams(max_new_tokens=len(tokens)), frozenset())
    chunks = run(stream, tokens, range(len(tokens)))
    assert "".join(chunks).startswith(text + "a")
    assert REPLACEMENT in text or REPLACEMENT not in "".join(chunks)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_text_that_nothing_can_change_is_not_held_back(name):
    tokenizer = tokenizer_named(name)
    tokens = text_tokens(tokenizer, "the quick fox")
    stream = TextStream(tokenizer, [], SamplingParams(max_new_tokens=99, stop=("xyz",)), frozenset())
    streamed = ""
    for token in tokens:
        stream.push(token)
        streamed += stream.take()
        assert streamed == stream.text.removesuffix("x")


def test_a_character_is_streamed_with_its_last_byte():
    tokenizer = tokenizer_named("byte_level")
    stream = TextStream(tokenizer, [], SamplingParams(), frozenset())
    chunks = []
    for token in byte_tokens(tokenizer, "é😀".encode()):
        stream.push(token)
        chunks.append(stream.take())
    assert chunks == ["", "é", "", "", "", "😀"]


def test_a_byte_run_is_streamed_when_it_ends():
    tokenizer = tokenizer_named("byte_fallback")
    stream = TextStream(tokenizer, [], SamplingParams(), frozenset())
    for token in byte_tokens(tokenizer, "你好".encode()):
        stream.push(token)
        assert stream.take() == ""
    assert stream.text == "你好"
    stream.push(text_tokens(tokenizer, "xa")[-1])
    assert stream.take() == "你好a"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "sentencepiece_bytes"])
@pytest.mark.parametrize("data", [b"\xff", b"\xe4\xbd", b"\xe4\xbd\xa0\xff", b"\x80" * 50, b"\xf0\x9f\x98" * 20])
def test_bytes_that_never_become_a_character(name, data):
    tokenizer = tokenizer_named(name)
    prompt = text_tokens(tokenizer, "the fox")
    tokens = byte_tokens(tokenizer, data)
    stream = TextStream(tokenizer, prompt, SamplingParams(max_new_tokens=len(tokens)), frozenset())
    assert "".join(run(stream, tokens, range(len(tokens)))) == stream.text
    assert stream.text.endswith(REPLACEMENT)
    check(tokenizer, prompt, tokens, SamplingParams(max_new_tokens=len(tokens)))


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace", "sentencepiece_only", "sentencepiece_bytes"])
def test_the_space_between_prompt_and_output_is_kept(name):
    tokenizer = tokenizer_named(name)
    tokens = text_tokens(tokenizer, "fox")
    assert decode(tokenizer, tokens) == "fox"
    for prompt, text in [("the", " fox"), ("", "fox")]:
        params = SamplingParams(max_new_tokens=len(tokens))
        prompt_ids = [tokenizer.bos_token_id, *(text_tokens(tokenizer, prompt) if prompt else [])]
        stream = TextStream(tokenizer, prompt_ids, params, frozenset())
        assert "".join(run(stream, tokens)) == stream.text == text


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_character_that_the_prompt_began(name):
    tokenizer = tokenizer_named(name)
    whole = [*text_tokens(tokenizer, "the"), *byte_tokens(tokenizer, "你".encode())]
    stream = TextStream(tokenizer, whole[:-2], SamplingParams(max_new_tokens=2), frozenset())
    assert "".join(run(stream, whole[-2:], [0])) == stream.text == "你"


def test_a_run_of_bytes_that_opens_the_text_loses_its_space_as_in_decode():
    tokenizer = tokenizer_named("byte_fallback")
    for data, text in [(b" a", "a"), (b"  a", " a"), (b" \xff", 2 * REPLACEMENT), (b"a ", "a ")]:
        tokens = byte_tokens(tokenizer, data)
        stream = TextStream(tokenizer, [], SamplingParams(max_new_tokens=len(tokens)), frozenset())
        run(stream, tokens)
        assert stream.text == decode(tokenizer, tokens) == text


def test_a_replacement_character_of_the_vocabulary_before_a_run_of_bytes():
    tokenizer = tokenizer_named("byte_fallback")
    tokens = [tokenizer.convert_tokens_to_ids(REPLACEMENT), *byte_tokens(tokenizer, "你".encode())]
    check(tokenizer, [], [*tokens, *tokens], SamplingParams(max_new_tokens=8))


def test_a_stop_string_found_when_a_run_of_bytes_breaks_is_cut_at_its_first_occurrence():
    tokenizer = tokenizer_named("byte_fallback")
    stream = TextStream(tokenizer, [], SamplingParams(stop=(3 * REPLACEMENT,)), frozenset())
    run(stream, [*byte_tokens(tokenizer, "你好你好".encode() + b"\xff"), *text_tokens(tokenizer, "a")])
    assert (stream.reason, stream.text) == ("stop", "")


@all_tokenizers
@pytest.mark.slow(first=2)
def test_more_spaces_than_the_window_holds(name):
    tokenizer = tokenizer_named(name)
    space = tokenizer.convert_tokens_to_ids("▁") if "sentencepiece" in name else None
    spaces = [space] * (4 * CONTEXT) if space else text_tokens(tokenizer, " " * (16 * CONTEXT))
    word = text_tokens(tokenizer, "a")
    params = SamplingParams(max_new_tokens=1000)
    for prompt in ([], word, [*word, *spaces], spaces):
        check(tokenizer, prompt, [*spaces, *word, *spaces, *word], params)
        check(tokenizer, prompt, [*word, *spaces], params)


def test_special_tokens_are_not_shown_and_do_not_split_a_character():
    for name in ("byte_level", "byte_fallback"):
        tokenizer = tokenizer_named(name)
        first, second = byte_tokens(tokenizer, "é".encode())
        special = tokenizer.convert_tokens_to_ids("<extra>")
        shown = tokenizer.convert_tokens_to_ids("<tool>")
        stream = TextStream(tokenizer, [], SamplingParams(max_new_tokens=5), frozenset())
        run(stream, [first, special, len(tokenizer) + 7, second, shown])
        assert stream.text == "é<tool>"
        assert stream.num_tokens == 5


def test_eos_wins_over_length_and_is_not_shown_even_if_it_is_no_special_token():
    tokenizer = tokenizer_named("byte_level")
    a, b = text_tokens(tokenizer, "a") + text_tokens(tokenizer, "b")
    for eos in (tokenizer.eos_token_id, b):
        stream = TextStream(tokenizer, [], SamplingParams(max_new_tokens=2), frozenset([eos]))
        assert stream.push(a) is None
        assert stream.push(eos) == "stop"
        assert (stream.num_tokens, stream.text) == (2, "a")
    stream = TextStream(tokenizer, [], SamplingParams(max_new_tokens=2, ignore_eos=True), frozenset([b]))
    assert (stream.push(b), stream.push(b), stream.text) == (None, "length", "bb")


def test_a_stop_string_in_the_last_allowed_token_is_stop():
    tokenizer = tokenizer_named("byte_level")
    tokens = [text_tokens(tokenizer, letter)[0] for letter in "abc"]
    stream = TextStream(tokenizer, [], SamplingParams(max_new_tokens=3, stop=("bc",)), frozenset())
    assert [stream.push(token) for token in tokens] == [None, None, "stop"]
    assert (stream.text, stream.num_tokens, stream.take()) == ("a", 3, "a")


def test_a_stop_string_inside_a_token_cuts_the_text_there():
    tokenizer = tokenizer_named("byte_level")
    (the,) = text_tokens(tokenizer, " the")
    stream = TextStream(tokenizer, [], SamplingParams(stop=("e", "he")), frozenset())
    assert (stream.push(the), stream.text, stream.num_tokens) == ("stop", " t", 1)


def test_a_stop_string_that_begins_in_the_prompt_does_not_count():
    tokenizer = tokenizer_named("byte_level")
    a, b = text_tokens(tokenizer, "a") + text_tokens(tokenizer, "b")
    stream = TextStream(tokenizer, [a], SamplingParams(stop=("ab",)), frozenset())
    assert [stream.push(token) for token in (b, a, b)] == [None, None, "stop"]
    assert stream.text == "b"


def test_an_unfinished_character_does_not_match_a_stop_string_before_the_end():
    for name in ("byte_level", "byte_fallback"):
        tokenizer = tokenizer_named(name)
        tokens = byte_tokens(tokenizer, "你".encode())
        params = SamplingParams(max_new_tokens=3, stop=(REPLACEMENT,))
        stream = TextStream(tokenizer, [], params, frozenset())
        assert [stream.push(token) for token in tokens] == [None, None, "length"]
        stream = TextStream(tokenizer, [], params, frozenset([2]))
        assert [stream.push(token) for token in (*tokens[:2], 2)] == [None, None, "stop"]
        assert stream.text == ""


def test_without_a_tokenizer_there_are_ids_only():
    stream = TextStream(None, [1, 2], SamplingParams(max_new_tokens=3), frozenset([9]))
    assert [stream.push(token) for token in (5, 9)] == [None, "stop"]
    assert (stream.num_tokens, stream.text, stream.take()) == (2, "", "")
    with pytest.raises(InputError, match="needs a tokenizer"):
        TextStream(None, [], SamplingParams(stop=("a",)), frozenset())


def test_nothing_may_follow_the_finish():
    stream = TextStream(None, [], SamplingParams(max_new_tokens=1), frozenset())
    assert stream.push(3) == "length"
    with pytest.raises(RuntimeError, match="after the output ended"):
        stream.push(3)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("kind", ["text", "invalid", "incomplete", "spaces"])
def test_the_work_per_token_does_not_grow(name, kind, monkeypatch):
    tokenizer = tokenizer_named(name)
    tokens = {
        "text": text_tokens(tokenizer, "the fox " * 200),
        "invalid": byte_tokens(tokenizer, b"\xff" * 1000),
        "incomplete": byte_tokens(tokenizer, b"\xf0\x9f\x98" * 300),
        "spaces": text_tokens(tokenizer, " " * 1000),
    }[kind]
    decoder_of = lpr.engine.text.decoder_of
    sizes = []

    def counting(tokenizer):
        decode = decoder_of(tokenizer)

        def decode_counted(tokens):
            sizes.append(len(tokens))
            return decode(tokens)

        return decode_counted

    monkeypatch.setattr(lpr.engine.text, "decoder_of", counting)
    stream = TextStream(tokenizer, tokens, SamplingParams(max_new_tokens=10_000, stop=("~",)), frozenset())
    sizes.clear()
    run(stream, tokens, range(0, len(tokens), 4))
    assert max(sizes, default=0) <= 2 * CONTEXT
    assert len(sizes) <= 1.2 * len(tokens) + 2


@pytest.mark.parametrize("seed", range(20))
def test_stops_are_found_where_a_search_from_the_start_finds_them(seed):
    dice = random.Random(seed)
    for _ in range(100):
        stops = ["".join(dice.choices("ab", k=dice.randrange(1, 9))) for _ in range(dice.randrange(1, 5))]
        search, text = StopSearch(stops), ""
        for _ in range(20):
            final, pending = ("".join(dice.choices("ab", k=dice.randrange(4))) for _ in range(2))
            whole = text + final + pending
            starts = [(at, stop) for stop in stops if (at := whole.find(stop)) >= 0]
            found = search.find(final, pending)
            shown = None if found is None else (found[0] + len(text), found[1])
            assert shown == min(starts, key=lambda each: each[0], default=None)
            text += final
            if found is not None:
                break
            held = (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))
            assert search.num_possible == max(held)


def test_long_stops_that_almost_match_cost_little():
    """Each of 2,000 tokens extends or shifts sixteen stops of 1,023 characters: 200 times the work before."""
    tokenizer = byte_level()
    tokens = text_tokens(tokenizer, "a") * 2000

    def seconds(stops):
        stream = TextStream(tokenizer, [5], SamplingParams(max_new_tokens=9000, stop=stops), frozenset())
        began = time.thread_time()
        stream.extend(tokens)
        return time.thread_time() - began

    short = min(seconds(("b",)) for _ in range(3))
    assert min(seconds(tuple("a" * 1022 + end for end in "bcdefghijklmnopq")) for _ in range(3)) < 20 * short


def test_a_run_of_bytes_is_searched_once():
    """Llama-2's bytes are pending until their run ends: the search goes on where it stopped."""
    read = []
    search = StopSearch(["ab"])
    for size in range(1, 300):
        read.append(len(search._ahead[0]))
        assert search.find("", "b" * size) is None
    assert read == list(range(299))
    assert search.find("", "b" * 299 + "ab") == (299, "ab")
    assert search.find("a", "b") == (0, "ab")


def test_the_vocabulary_is_read_once_per_tokenizer():
    tokenizer = tokenizer_named("byte_fallback")
    assert Vocabulary.of(tokenizer) is Vocabulary.of(tokenizer)
    assert Vocabulary.of(tokenizer).has_byte_runs
    assert not Vocabulary.of(tokenizer_named("sentencepiece_bytes")).has_byte_runs
    assert not Vocabulary.of(tokenizer_named("sentencepiece_only")).has_byte_runs


def scripted_cases():
    for name in ("byte_level", "byte_fallback"):
        tokenizer = tokenizer_named(name)
        for prompt, data, stop in [
            ("the fox", b" a\xe4\xbd\xa0b", ()),
            ("the fox", b"abcabd", ("abd",)),
            ("the fox", b"\xe4\xbd\xa0\xff", ()),
            ("the fox", "你好".encode() * 12, ("好你好你好~",)),
        ]:
            tokens = byte_tokens(tokenizer, data) + text_tokens(tokenizer, "xa fox a fox")
            yield tokenizer, text_tokens(tokenizer, prompt), tokens, SamplingParams(stop=stop)


def test_the_scripted_cases_pass():
    for case in scripted_cases():
        check(*case)


@pytest.mark.parametrize(
    "target, attribute, value",
    [
        (lpr.engine.text, "MAX_UNFINISHED", 0),
        (lpr.engine.text, "CONTEXT", 1),
        (StopSearch, "num_possible", 0),
        (StopSearch, "find", lambda self, final, pending: None),
        (lpr.engine.text, "REPLACEMENT", ""),
        (IncrementalDecoder, "readable", ""),
    ],
)
def test_a_seeded_fault_is_noticed(target, attribute, value, monkeypatch):
    monkeypatch.setattr(target, attribute, value)
    with pytest.raises(AssertionError):
        for case in scripted_cases():
            check(*case)


@pytest.mark.parametrize(
    "more, tokens, why",
    [
        ({"stop": ("zz", "ab")}, "xxabyy", "ab"),
        ({"stop": ("b", "ab")}, "xxab", "ab"),
        ({"stop": ("ab",), "max_new_tokens": 2}, "xxab", None),
        ({"stop_token_ids": (0,)}, "xx", 0),
        ({"stop_token_ids": (1,)}, "xx", None),
        ({"stop_token_ids": (1,), "ignore_eos": True}, "xx", 1),
    ],
)
def test_what_stopped_an_output_is_told(more, tokens, why):
    """The stop string or the id that was asked for, never the model's own end of text."""
    tokenizer = byte_level()
    params = SamplingParams(**{"max_new_tokens": 50, **more})
    stream = TextStream(tokenizer, [5], params, frozenset({1}))
    ids = text_tokens(tokenizer, tokens) + [id for id in more.get("stop_token_ids", ())]
    stream.extend(ids)
    stream.take()
    assert stream.stop_reason == why


@pytest.mark.parametrize("name", FAST)
def test_special_tokens_are_shown_where_they_are_asked_for(name):
    tokenizer = tokenizer_named(name)
    dice = random.Random(name)
    params = SamplingParams(max_new_tokens=30, skip_special_tokens=False)
    for _ in range(40):
        ids = [dice.choice((dice.randrange(len(tokenizer)), *tokenizer.all_special_ids)) for _ in range(40)]
        stream = TextStream(tokenizer, ids[:10], params, frozenset())
        parts = []
        for token in ids[10:]:
            stream.push(token)
            parts.append(stream.take())
        whole, shown = (tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in (ids, ids[:10]))
        while not whole.startswith(shown):
            shown = shown[:-1]
        assert "".join(parts) == whole.removeprefix(shown)
