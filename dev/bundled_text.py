"""The text that the bundled model is trained on: Python files, cut to documents, some of them with holes."""

import ast
import bisect
import collections
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import warnings

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

EOS, PAD = "<|endoftext|>", "<|pad|>"
PREFIX, SUFFIX, MIDDLE = FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
# Tests and fixtures repeat themselves, vendored trees are copies, locale and data tables are not code.
SKIP_DIR = re.compile(
    r"^(tests?|testing|fixtures?|testdata|_?vendor(ed)?|_?externals?|extern|locales?|migrations|idlelib|"
    r"lib2to3|pydoc_data|encodings|node_modules|__pycache__|unicode_data|lexers|styles|botocore|boto3|awscli|pip|"
    r"pkg_resources|ensurepip|antlr4|_inductor_generated)$"
)
SKIP_FILE = re.compile(
    r"(_pb2(_grpc)?|_tables?|_?parsetab|lextab|_generated|_version|unicode.*|idnadata|uts46data)\.py$"
)
GENERATED = re.compile(r"auto-?generated|generated (by|from|file|automatically)|do not (edit|modify)", re.I)


def file_hash(text):
    """Return 64 bits of a stable hash, because the built-in hash changes from run to run."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def read_source(path):
    """Return the text of one file if it is ordinary hand-written Python, else None."""
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.split("\n")
    if not 400 <= len(text) <= 400_000 or len(lines) < 12 or max(map(len, lines)) > 400:
        return None
    if GENERATED.search(text[:800]):
        return None
    letters = sum(c.isalpha() or c in " \n_" for c in text)
    digits = sum(c.isdigit() for c in text)
    if letters < 0.68 * len(text) or digits > 0.08 * len(text):  # number and string tables
        return None
    return text


def cut_documents(text):
    """Return the documents of one file: the whole file, or each of its classes and functions by itself.

    The short documents have the imports that they use, like a class skeleton in a prompt, and many more ends of text
    than whole files. The file's hash decides its form.
    """
    warnings.simplefilter("ignore")  # invalid escapes in the sources
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if file_hash(text) % 100 < 25:
        return [text.strip("\n") + "\n"]
    lines, imports, documents, small = text.split("\n"), [], [], []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.asname or alias.name.split(".")[0] for alias in node.names]
            imports.append((set(names), "\n".join(lines[node.lineno - 1 : node.end_lineno])))
    for node in tree.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        start = min([node.lineno] + [d.lineno for d in node.decorator_list])
        body = "\n".join(lines[start - 1 : node.end_lineno])
        if len(body) < 120:
            continue
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        head = "\n".join(source for names, source in imports if names & used)
        piece = (head + "\n\n\n" if head else "") + body + "\n"
        (documents if len(body) > 500 or isinstance(node, ast.ClassDef) else small).append(piece)
    if small:  # a page of helper functions is one document, not ten scraps
        documents.append("\n\n".join(small))
    return documents or [text.strip("\n") + "\n"]


def list_files(roots):
    """Return (package, relative path, path) of every candidate file, each package counted once."""
    found = []
    for root in map(pathlib.Path, roots):
        for folder, subfolders, names in os.walk(root):
            rel = pathlib.Path(folder).relative_to(root)
            subfolders[:] = sorted(
                d
                for d in subfolders
                if not SKIP_DIR.match(d)
                and not d.endswith(("-info", ".libs"))
                and not (d == "site-packages" and str(rel) == ".")
            )
            for name in sorted(names):
                if name.endswith(".py") and not SKIP_FILE.search(name) and not name.startswith("test_"):
                    found.append(((rel / name).parts[0], str(rel / name), pathlib.Path(folder) / name))
    return found


def select(args):
    """Return (held out, text) of the files that pass the filters, and counts of all files by outcome."""
    files = list_files(args.sources)
    random.Random(args.seed).shuffle(files)
    counts, package_bytes, package_roots = collections.Counter(), collections.Counter(), {}
    seen_files, seen_lines, kept = set(), set(), []
    for package, rel, path in files:
        root = str(path)[: -len(rel)]
        # The same package under two roots is two versions of one text, so the first root met wins.
        if package_roots.setdefault(package, root) != root or package_bytes[package] > args.package_cap:
            counts["other copy or over the cap"] += 1
            continue
        text = read_source(path)
        if text is None:
            counts["filtered"] += 1
            continue
        key = file_hash(text)
        lines = [file_hash(line) for line in map(str.strip, text.split("\n")) if len(line) > 24]
        if key in seen_files or sum(h in seen_lines for h in lines) > 0.5 * max(1, len(lines)):
            counts["duplicate or near-duplicate"] += 1
            continue
        seen_files.add(key)
        seen_lines.update(lines)
        package_bytes[package] += len(text)
        counts["kept"] += 1
        kept.append((file_hash(rel) % 50 == 0, text))  # 2 % of the files, by path, are held out
    return kept, {"counts": counts, "largest_packages": package_bytes.most_common(25)}


def pieces_of(text, rng):
    """Cut a document at ends of lines into pieces of 300 to 2400 characters, so that a hole keeps both its sides.

    It is the context-level variant of fill-in-the-middle (Bavarian et al. 2022, section 3.2): a hole in a whole
    document would often lie in another block of tokens than what surrounds it.
    """
    lines, pieces, size = text.splitlines(keepends=True), [[]], 0
    wanted = 300 * 8 ** rng.random()
    for line in lines:
        if size > wanted:
            pieces.append([])
            size, wanted = 0, 300 * 8 ** rng.random()
        pieces[-1].append(line)
        size += len(line)
    return ["".join(piece) for piece in pieces if len(piece) > 2]


def syntax_spans(text):
    """Return (start, end) of the statements and expressions of a text, in characters; [] if it does not parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if "\r" in text:  # an end of line to the parser
        return []
    lines = text.split("\n")
    starts = list(itertools.accumulate((len(line) + 1 for line in lines), initial=0))

    def place(line, column):  # the parser counts UTF-8 bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    nodes = (node for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.expr)))
    return [(place(n.lineno, n.col_offset), place(n.end_lineno, n.end_col_offset)) for n in nodes]


def make_hole(text, spans, rng):
    """Return (prefix, middle, suffix) of a text: 45 % of the holes are nodes of `spans`, 45 % lines, 10 % characters.

    Holes between two random characters are those of Bavarian et al. (2022); more of them teach a model to break off
    within a word. Lines are an editor's: the line of the cursor, whole or from the cursor on, or up to five lines; the
    suffix then begins with the end of a line. Without spans lines take their share.
    """
    starts, kind = [0] + [i + 1 for i, c in enumerate(text[:-1]) if c == "\n"], rng.random()
    if kind < 0.1:
        first, last = sorted(rng.sample(range(len(text) + 1), 2))
    elif kind < 0.55 and spans:
        first, last = rng.choice(spans)
    else:
        at = rng.randrange(len(starts))
        first, count = starts[at], 1 if rng.random() < 0.7 else rng.randint(2, 5)
        last = text.find("\n", starts[min(at + count, len(starts)) - 1])
        last = len(text) if last < 0 else last
        if rng.random() < 0.4:  # from the cursor on
            end = text.find("\n", first)
            first = rng.randint(first, end if end > first else last)
    return text[:first], text[first:last], text[last:]


def cut_holes(document, rng):
    """Yield (prefix, middle, suffix) of each piece of a document."""
    spans, begin = sorted(syntax_spans(document)), 0
    for piece in pieces_of(document, rng):
        begin = document.index(piece, begin)
        inside = spans[bisect.bisect_left(spans, (begin,)) : bisect.bisect_left(spans, (begin + len(piece),))]
        fit = [(a - begin, b - begin) for a, b in inside if 4 < b - a < len(piece) / 2 and b <= begin + len(piece)]
        yield make_hole(piece, fit, rng)
        begin += len(piece)


def line_hole(text, rng):
    """Return (prefix, middle, suffix) where one line with at least five letters is missing, or None."""
    lines = text.splitlines(keepends=True)
    fit = [i for i, line in enumerate(lines[:-1]) if i > 2 and sum(map(str.isalpha, line)) >= 5]
    if not fit:
        return None
    at = rng.choice(fit)
    return "".join(lines[:at]), lines[at].rstrip("\n"), "\n" + "".join(lines[at + 1 :])


def skeleton(text):
    """Return the text with each function cut to its signature and docstring, or None if it has no class."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    if not any(isinstance(node, ast.ClassDef) for node in tree.body):
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            node.body = [first] if documented else [ast.Pass()]
    return ast.unparse(tree) + "\n"


def encode(tokenizer, documents, fim, rng):
    """Return the ids of all documents in turn, each with its end; a share `fim` of them as pieces with holes (PSM)."""
    end, (prefix, suffix, middle) = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(list(FIM))
    parts, count = [], 0
    for document in documents:
        if rng.random() >= fim:
            parts += [([], document), ([end], "")]
            continue
        for before, between, after in cut_holes(document, rng):
            parts += [([prefix], before), ([suffix], after), ([middle], between), ([end], "")]
            count += 1
    ids = []
    for start in range(0, len(parts), 4000):
        chunk = parts[start : start + 4000]
        encoded = tokenizer.backend_tokenizer.encode_batch([text for _, text in chunk])
        ids += [np.array([*marks, *each.ids], dtype=np.uint16) for (marks, _), each in zip(chunk, encoded, strict=True)]
    return np.concatenate(ids), count


def collect(args):
    """Collect the sources, cut them into documents, write token files, holes, prompts and a summary.

    The tokenizer is trained, or with `--tokenizer` read; the tokens for holes are added to it.
    """
    work = pathlib.Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    kept, summary = select(args)
    with multiprocessing.Pool(args.threads) as pool:
        cut = pool.map(cut_documents, [text for _, text in kept], chunksize=64)
    parts = {"train": [], "held_out": []}
    for (held, _), documents in zip(kept, cut, strict=True):
        parts["held_out" if held else "train"].extend(documents)
    for documents in parts.values():
        random.Random(args.seed + 1).shuffle(documents)
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        sample = parts["train"][:: max(1, len(parts["train"]) // 12000)]
        tokenizer = train_tokenizer(sample, args.vocab)
    save_tokenizer(tokenizer, work / "tokenizer")
    for name, documents in parts.items():
        rng = random.Random(args.seed + 2)
        ids, num_holes = encode(tokenizer, documents, args.fim if name == "train" else 0.0, rng)
        ids.tofile(work / f"{name}.bin")
        size = sum(len(d.encode()) for d in documents)
        summary[name] = {"documents": len(documents), "bytes": size, "tokens": len(ids), "holes": num_holes}
    rng = random.Random(args.seed + 3)
    holes = [line_hole(piece, rng) for document in parts["held_out"] for piece in pieces_of(document, rng)[:3]]
    holes = [hole for hole in holes if hole]
    write_lines(work / "holes.jsonl", rng.sample(holes, min(len(holes), 500)))
    skeletons = [text for text in map(skeleton, parts["train"][:4000]) if text and 400 < len(text) < 5000]
    write_lines(work / "prompts.jsonl", skeletons + [d[:2500] for d in parts["train"][4000:6000]])
    (work / "data.json").write_text(json.dumps({**summary, "sources": args.sources}, indent=1))
    print(json.dumps(summary))


def write_lines(path, values):
    """Write one JSON value a line."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def save_tokenizer(tokenizer, folder):
    """Save the tokenizer with the tokens for holes, and spare ones up to a multiple of 8, which ranks can share."""
    tokenizer.add_special_tokens({"additional_special_tokens": [*FIM, "<|fim_pad|>"]})
    spare = [f"<|reserved_{i}|>" for i in range(-len(tokenizer) % 8)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*FIM, "<|fim_pad|>", *spare]})
    tokenizer.save_pretrained(folder)
    path = pathlib.Path(folder) / "tokenizer_config.json"  # gets the class name that every version knows
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("extra_special_tokens", "is_local", "local_files_only"):  # the first is in tokenizer.json
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=1))


def train_tokenizer(documents, vocab):
    """Train the byte-level BPE tokenizer.

    The pattern gives newline runs and the indentation after them tokens of their own, so that a prompt cut
    at the end of a line is split just as the same line was in training.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    pattern = r"[\r\n]+|(?<=[\r\n])[ \t]+|[ ._]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?=\S)|\s+"
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[EOS, PAD],
            show_progress=False,
            max_token_length=24,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False, model_max_length=4096
    )
