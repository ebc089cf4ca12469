"""Flags and --config files of `python -m lpr.serve`."""

from pathlib import Path

import pytest

from lpr.config import InputError
from lpr.serve.options import parse


def test_a_config_file_sets_flags_and_flags_win(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text(
        'model = "m"\nserved_model_name = ["a", "b"]\nport = 9000\nwindow_size = 7\nprefix_reuse = false\n'
        'api_key_file = "keys"\nrequest_timeout = 30\nshare_drafts = "all"\nmesh = { lp = 4, tp = 2 }\n'
    )
    args = parse(["--config", str(path), "--port", "9001"])
    assert (args.model, args.names, args.port) == ("m", ("a", "b"), 9001)
    assert (args.decode.window_size, args.engine.prefix_reuse, args.request_timeout) == (7, False, 30)
    assert (args.api_key_file, args.share_drafts, args.num_ranks) == (Path("keys"), "all", 8)


@pytest.mark.parametrize(
    "text, message",
    [
        ('port = "8000"', "port = '8000': Expected `int`"),
        ("max_queue = -1", "--max-queue -1 must be at least 0"),
        ('share_drafts = "some"', "share_drafts = 'some'"),
        ("max_new_tokens = 1", "unknown key 'max_new_tokens'"),
        ("trie_nodes = -1", "trie_nodes=-1 must be int >= 0"),
        ("config = 'x'", "unknown key 'config'"),
    ],
)
def test_a_bad_config_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as failure:
        parse([f"--config={path}"])
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--port", "70000"], "--port 70000"),
        (["--lp", "0"], "both must be at least 1"),
        (["--request-timeout", "0"], "--request-timeout 0"),
        (["--tls-key", "k"], "--tls-key needs --tls-cert"),
        (["--served-model-name", ""], "a name is empty"),
    ],
)
def test_bad_flags_are_one_line(flags, message):
    with pytest.raises(InputError, match=message):
        parse(flags)


def test_a_key_of_the_environment_counts(monkeypatch):
    monkeypatch.setenv("LPR_API_KEY", "k")
    assert parse([]).api_key == "k" and parse(["--api-key", "l"]).api_key == "l"
