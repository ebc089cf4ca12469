"""Flags that cannot be read end a command with one line and exit code 2."""

import importlib

import pytest


@pytest.mark.parametrize("command", ["cli.generate", "cli.plan", "cli.corpus", "serve.__main__"])
@pytest.mark.parametrize("flag", ["--no-such-flag", "stray", "--seed", "--trie-nodes=abc", "--port=abc"])
def test_flags_that_cannot_be_read_are_one_line(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(f"lpr.{command}").main(["--output", "there", flag]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("lpr.") and error.count("\n") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--trie-nodes", "abc"], "--trie-nodes: 'abc' is none of INT|{auto}"),
        (["--max-new-tokens", "abc"], "--max-new-tokens: 'abc' is not a whole number"),
        (["--temperature", "banana"], "--temperature: 'banana' is not a number"),
        (["--dtype", "float99"], "invalid choice 'float99' for argument '--dtype'. Expected one of ('auto', 'float32'"),
        (["--max-new-tokens"], "Missing value for argument '--max-new-tokens'."),
        (["--no-such-flag", "3"], "Unrecognized options: --no-such-flag, 3"),
    ],
)
def test_the_line_names_the_flag(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module("lpr.cli.generate").main(flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["cli.generate", "cli.plan", "cli.corpus", "serve.__main__"])
def test_help_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(f"lpr.{command}").main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: lpr.")
