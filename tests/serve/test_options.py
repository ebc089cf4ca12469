"""Flags and --config files of `python -m lpr.serve`."""

from pathlib import Path

import pytest

from lpr.config import InputError
from lpr.serve.options import parse
from lpr.serve.text.defaults import read_defaults


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
        (["--port", "banana"], "--port: 'banana' is not a whole number"),
        (["--timeout", "banana"], "--timeout: 'banana' is not a number"),
        (["--kv-memory", "banana"], "--kv-memory: 'banana' is none of {None}.FLOAT"),
        (["--lp", "0"], "both must be at least 1"),
        (["--request-timeout", "0"], "--request-timeout 0"),
        (["--tls-key", "k"], "--tls-key needs --tls-cert"),
        (["--served-model-name", ""], "a name is empty"),
        (["--override-generation-config", "{"], "--override-generation-config is not JSON"),
        (["--override-generation-config", "[]"], "--override-generation-config is not a JSON object"),
        (["--override-generation-config", '{"temp": 1}'], "'temp' is none of temperature, top_p"),
        (["--override-generation-config", '{"top_p": 2}'], "--override-generation-config: top_p=2"),
        (["--generation-config", "/nowhere"], "cannot read --generation-config /nowhere: No such file"),
    ],
)
def test_bad_flags_are_one_line(flags, message):
    with pytest.raises(InputError, match=message):
        parse(flags)


def test_sampling_defaults_are_the_models_a_files_or_none(tmp_path):
    own = {"temperature": 0.7, "top_k": -1, "eos_token_id": 3, "top_p": None}
    assert read_defaults("auto", own) == {"temperature": 0.7, "top_k": 0}
    assert read_defaults("auto", own, '{"temperature": 0, "max_new_tokens": 9}')["temperature"] == 0
    assert read_defaults("vllm", own) == {} and read_defaults("vllm", own, '{"min_p": 0.1}') == {"min_p": 0.1}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.3, "do_sample": true}')
    assert read_defaults(str(path), own) == {"temperature": 0.3} == read_defaults(str(tmp_path), own)
    path.write_text('{"temperature": "hot"}')
    with pytest.raises(InputError, match=r"generation_config.json: temperature='hot'"):
        parse(["--generation-config", str(tmp_path)])


def test_a_key_of_the_environment_counts(monkeypatch):
    monkeypatch.setenv("LPR_API_KEY", "k")
    assert parse([]).api_key == "k" and parse(["--api-key", "l"]).api_key == "l"
