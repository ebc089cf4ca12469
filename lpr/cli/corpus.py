"""`python -m lpr.corpus FILES... --output trie/`: add text to a trie file, so that the first request drafts from it.

    python -m lpr.corpus src docs/guide.md --glob "*.py" --model M --output trie/
    python -m lpr.generate --model M --prompts FILE.jsonl --output OUT.jsonl --trie trie/

Only the model's tokenizer is loaded. Text is read and tokenised in pieces, so memory is bounded by the capacity.
"""

import codecs
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lpr.cli.flags import read_flags
from lpr.config import DecodeConfig, InputError
from lpr.engine.trie_file import check_writable, fingerprint_of, num_documents, read_trie, trie_path, write_trie
from lpr.model.loader import bundled_model, load_tokenizer
from lpr.native import SuffixIndex

PIECE = 1 << 16  # characters tokenised as one string, cut at the end of a line: only tokens across that cut can differ
BATCH = 1 << 20  # characters tokenised in one call
Skip = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Args:
    """Add text files to a trie file, from which lpr.generate --trie and Engine.load_trie draft."""

    files: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Text files, and folders that are searched for them. Each file is one document; the last ones are the newest."""
    output: Path  # Folder or .safetensors file of the trie. Text is added to an existing trie.
    model: str | None = None
    """Model folder or hub id, for its tokenizer. Default: the small code model that comes with lpr."""
    glob: str = "*"  # Names of the files in folders, at any depth, without hidden ones.
    field: str | None = None  # The files are JSON Lines, and this field of each line is a document.
    capacity: int = DecodeConfig.trie_capacity  # Most tokens of the trie; the oldest text is dropped first.
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Drop the text of an existing trie at --output.
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON line to stdout instead of a sentence to stderr."""


class Piece(NamedTuple):
    text: str
    ends_document: bool


@dataclass
class Counts:
    files: int = 0
    skipped: int = 0
    documents: int = 0
    tokens: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 (bad input) or 130 (interrupted)."""
    try:
        return run(read_flags(Args, "lpr.corpus", argv))
    except InputError as failure:
        print(f"lpr.corpus: error: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lpr.corpus: interrupted; nothing was written", file=sys.stderr)
        return 130
    except SystemExit:  # after --help
        return 0


def run(args: Args) -> int:
    """Add all text, then write the trie; raises InputError."""
    if args.capacity < 1:
        raise InputError(f"--capacity {args.capacity} must be at least 1")
    files = find_files(args.files, args.glob, leave_out=trie_path(args.output))
    check_writable(args.output)
    tokenizer = load_tokenizer(args.model or bundled_model())
    fingerprint = fingerprint_of(tokenizer, len(tokenizer))
    trie = SuffixIndex(args.capacity)
    if trie_path(args.output).exists() and not args.fresh:
        trie = SuffixIndex.from_history(read_trie(args.output, fingerprint), args.capacity)
        trie.end_document()
    console = Console(stderr=True)
    began = time.perf_counter()
    counts = feed(trie, files, args.field, tokenizer, console)
    if not counts.documents:
        raise InputError(f"none of the {len(files)} files holds text to learn from; nothing was written")
    written = write_trie(args.output, trie, fingerprint)
    record = {
        "output": str(written),
        **vars(counts),
        "held_tokens": len(trie),
        "held_documents": num_documents(np.array(trie.history())),
        "capacity": args.capacity,
        "seconds": round(time.perf_counter() - began, 3),
    }
    if args.json:
        print(json.dumps(record))
        return 0
    console.print(
        f"{counts.documents} documents of {counts.files} files, {counts.tokens} tokens, in {record['seconds']} s; "
        f"{written} holds {len(trie)} tokens of {args.capacity}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def find_files(paths: Sequence[Path], glob: str, leave_out: Path) -> list[Path]:
    """The files of `paths`, those of folders by ascending name; raises InputError."""
    if not paths:
        raise InputError("no files given: name text files, or folders to search with --glob")
    found = []
    for path in paths:
        if not path.is_dir():
            if path.exists() and not path.is_file():
                raise InputError(f"{path} is neither a file nor a folder: its text is read twice, first to check it")
            try:
                path.open("rb").close()
            except OSError as failure:
                raise InputError(f"cannot read {path}: {failure.strerror or failure}") from failure
            found.append(path)
            continue
        try:
            inside = [each for each in sorted(path.rglob(glob)) if each.is_file()]
        except (ValueError, NotImplementedError, IndexError) as failure:
            raise InputError(f"--glob {glob!r} is no pattern for names inside a folder: {failure}") from failure
        inside = [each for each in inside if not any(part.startswith(".") for part in each.relative_to(path).parts)]
        inside = [each for each in inside if each.resolve() != leave_out.resolve()]
        if not inside:
            raise InputError(f"no file in the folder {path} matches --glob {glob!r}")
        found += inside
    return found


def feed(trie: SuffixIndex, files: Sequence[Path], field: str | None, tokenizer: Any, console: Console) -> Counts:
    """Insert the documents of `files` and show progress on `console`; other files are named there and skipped."""
    counts = Counts()
    tokens_read = TextColumn("{task.fields[tokens]} tokens")
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), tokens_read)

    def skip(what: str) -> None:
        counts.skipped += 1
        console.print(f"lpr.corpus: skipped {what}", markup=False, highlight=False, soft_wrap=True)

    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=sum(path.stat().st_size for path in files), tokens=0)
        for batch in batches(pieces_of(files, field, counts, skip)):
            texts = [piece.text for piece in batch]
            encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            for piece, tokens in zip(batch, encoded["input_ids"], strict=True):
                trie.extend(tokens)
                counts.tokens += len(tokens)
                if piece.ends_document:
                    trie.end_document()
                    counts.documents += 1
            num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
            progress.update(bar, advance=num_bytes, tokens=counts.tokens)
        progress.update(bar, completed=progress.tasks[bar].total)  # of JSON lines only the field's text is counted
    return counts


def batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces, each large enough for a call of the tokenizer."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH or len(batch) == 1024:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def pieces_of(files: Sequence[Path], field: str | None, counts: Counts, skip: Skip) -> Iterator[Piece]:
    """The text of all files, piece by piece; calls `skip` for files that are not text."""
    for path in files:
        if (reason := why_no_text(path)) is not None:
            skip(f"{path}: {reason}")
            continue
        counts.files += 1
        yield from text_pieces(path) if field is None else field_pieces(path, field, skip)


def why_no_text(path: Path) -> str | None:
    """The reason why a file is not text, or None; checks the whole file before any of it is inserted."""
    decoder, size = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                if b"\0" in block:
                    return "a binary file"
                decoder.decode(block)
                size += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as failure:
        return f"not UTF-8: {failure.reason} in the block at byte {size}"
    except OSError as failure:
        return failure.strerror or str(failure)
    return None if size else "empty"


def text_pieces(path: Path) -> Iterator[Piece]:
    # errors="replace": a file that changed since `why_no_text` can only make a draft worse.
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        rest = ""
        while block := file.read(PIECE):
            rest += block
            cut = rest.rfind("\n") + 1
            if not cut and len(rest) >= 2 * PIECE:
                cut = len(rest)  # a line without an end
            if cut:
                yield Piece(rest[:cut], False)
                rest = rest[cut:]
        yield Piece(rest, True)


def field_pieces(path: Path, field: str, skip: Skip) -> Iterator[Piece]:
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError) as failure:
                skip(f"{path}, line {number}: not JSON ({failure})")
                continue
            text = record.get(field) if isinstance(record, dict) else None
            if isinstance(text, str) and text:
                yield Piece(text.encode("utf-8", "replace").decode(), True)
            else:
                skip(f"{path}, line {number}: no text in {field!r}")
