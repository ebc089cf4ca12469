"""Who may ask what: keys, hosts, ports, and bodies that nobody reads."""

import base64
import hashlib
import re
import socket
import ssl
import subprocess
import time

import httpx
import pytest

from lpr.config import InputError
from lpr.serve.__main__ import main
from lpr.serve.front import Front
from lpr.serve.options import ServeArgs, parse
from tests.fakes.fake_driver import facts, served

PROMPT = "def f(x):\n    "
KEY = {"Authorization": "Bearer secret"}


def raw(service, head, body=b"", wait=0.0):
    """Send a request as bytes; returns the status and what follows it. The body goes after `wait` seconds."""
    with socket.create_connection(("127.0.0.1", service.front.port), timeout=10) as link:
        link.sendall(head.encode() + b"\r\n\r\n")
        time.sleep(wait)
        link.sendall(body)
        data = b""
        while b"\r\n\r\n" not in data and (new := link.recv(65536)):
            data += new
        return int(data.split()[1]), data


# Keys at the start.


@pytest.mark.parametrize("given", ["", " ", ",", " , \n", '""'])
@pytest.mark.parametrize("where", ["flag", "environment"])
def test_a_key_that_is_none_is_refused_at_the_start(given, where, monkeypatch, capsys):
    monkeypatch.delenv("LPR_API_KEY", raising=False)
    if where == "environment":
        monkeypatch.setenv("LPR_API_KEY", given)
    assert main(["--port", "0", *(["--api-key", given] if where == "flag" else [])]) == 2
    said = capsys.readouterr().err.strip()
    assert said == "lpr.serve: error: --api-key or LPR_API_KEY is given, but holds no key"


@pytest.mark.parametrize("text", ["", "# only this\n", 'alice ""\n', "''\n"])
def test_a_file_without_a_key_is_refused(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InputError, match="--api-key-file"):
        Front(ServeArgs(port=0, api_key="a", api_key_file=path), [])


def test_an_address_that_others_reach_needs_keys(capsys):
    assert main(["--host", "0.0.0.0", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "--host 0.0.0.0: others reach this address" in said and "--insecure" in said and said.count("\n") == 1
    for more in ({"api_key": "a"}, {"insecure": True}):
        with served(host="0.0.0.0", connect=False, **more) as service:
            assert service.client.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--metrics-host", "::1"], "--metrics-host needs --metrics-port"),
        (["--metrics-port", "70000"], "--metrics-port 70000"),
        (["--max-connections", "1"], "--max-connections 1 must be at least 8"),
    ],
)
def test_flags_that_cannot_work(flags, message):
    with pytest.raises(InputError, match=message):
        parse(flags)


# Hosts.


def test_without_keys_names_must_be_allowed():
    with served(allowed_hosts=("lpr.example",)) as service:

        def ask(host, path="/v1/models"):
            return service.client.get(path, headers={"Host": host}).status_code

        for host in (
            "localhost",
            "LOCALHOST:80",
            "a.localhost",
            "127.0.0.1:1",
            "[::1]:80",
            "10.0.0.7",
            "lpr.example:9",
        ):
            assert ask(host) == 200, host
        for host in ("evil.example", "lpr.example.evil", "localhost.evil", "127.0.0.1.evil:80", "", "[::1].evil"):
            assert ask(host) == 421, host
        assert ask("evil.example", "/") == ask("evil.example", "/metrics") == 421
        error = service.client.get("/livez", headers={"Host": "evil.example"}).json()["error"]
        assert error["code"] == "host_not_allowed" and "--allowed-hosts" in error["message"]
        assert raw(service, "GET /livez HTTP/1.0")[0] == 200  # no browser


def test_with_keys_names_are_free_unless_they_are_given():
    for more, status in (({}, 200), ({"allowed_hosts": ("*",)}, 200), ({"allowed_hosts": ("lpr.example",)}, 421)):
        with served(api_key="secret", connect=False, **more) as service:
            assert service.client.get("/livez", headers={"Host": "evil.example"}).status_code == status


# Metrics.


def test_metrics_can_need_a_key():
    with served(api_key="secret", protect_metrics=True, connect=False) as service:
        assert service.client.get("/metrics").status_code == 401
        assert service.client.get("/metrics", headers=KEY).status_code == 200
        assert service.client.get("/livez").status_code == 200


def test_metrics_can_have_a_port_of_their_own(capsys):
    with served(api_key="secret", metrics_port=0, max_connections=8) as service:
        url = f"http://127.0.0.1:{service.front.metrics_port}"
        assert service.client.get("/metrics", headers=KEY).status_code == 404
        assert service.client.get("/readyz").status_code == 200
        for path in ("/metrics", "/health", "/livez", "/readyz"):
            assert httpx.get(url + path).status_code == 200
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/v1/models", headers=KEY).status_code == 404
        service.driver.hold = True
        with httpx.Client(base_url=service.url, headers=KEY, timeout=10) as client:
            links = []
            for _ in range(8):
                request = client.build_request("POST", "/v1/completions", json={"prompt": PROMPT, "stream": True})
                links.append(client.send(request, stream=True))
            assert httpx.get(service.url + "/livez").status_code == 503
            assert "vllm:num_requests_running" in httpx.get(url + "/metrics").text
            for link in links:
                link.close()
    assert f"metrics at {url}/metrics" in capsys.readouterr().out


# Bodies.


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/livez", 200),
        ("GET", "/v1/models", 401),
        ("OPTIONS", "/v1/completions", 401),
        ("HEAD", "/", 405),
        ("DELETE", "/v1/requests/a", 401),
        ("POST", "/metrics", 405),
        ("POST", "/v1/completions", 401),
        ("POST", "/nowhere", 401),
    ],
)
def test_bodies_are_not_read_without_a_key_or_a_need(method, path, status):
    with served(api_key="secret", connect=False) as service:
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        found, data = raw(service, head + "Content-Length: 15000000")  # the answer does not wait for it
        assert found == status and b"\r\nconnection: close\r\n" in data.lower()
        body = b"[" + b'"\\ud83d",' * 200_000 + b"1]"
        assert raw(service, f"{head}Content-Length: {len(body)}", body, 0.05)[0] == status
        assert raw(service, head + "Transfer-Encoding: chunked", b"fffff\r\n" + body[:0xFFFFF])[0] == status
        found, data = raw(service, head + "Content-Length: 10\r\nExpect: 100-continue")
        assert found == status  # and not 100


def test_a_preflight_needs_no_key():
    with served(api_key="secret", cors=("https://a.example",), connect=False) as service:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        assert service.client.options("/v1/completions", headers=headers).status_code == 200
        assert service.client.options("/v1/completions").status_code == 401


def test_a_body_that_is_read_keeps_its_connection_open():
    with served() as service:
        response = service.client.post("/v1/completions", json={"prompt": PROMPT})
        assert response.status_code == 200 and "connection" not in response.headers
        assert "connection" not in service.client.get("/v1/models").headers


# What is shown.


def test_the_page_runs_its_own_script_only():
    with served(connect=False) as service:
        response = service.client.get("/")
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        for tag in ("script", "style"):
            [text] = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
        assert "style=" not in response.text and policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY" and response.headers["referrer-policy"] == "no-referrer"


def test_no_page_loads_scripts_from_elsewhere():
    with served(connect=False) as service:
        assert service.client.get("/docs").status_code == service.client.get("/redoc").status_code == 404
        assert service.client.get("/openapi.json").status_code == 200
        assert "openapi.json" in service.client.get("/").text


def test_a_models_path_is_not_shown(tmp_path):
    (tmp_path / "tiny").mkdir()
    path = str(tmp_path / "tiny")
    with served(facts(model=path), model=path, served_model_name=()) as service:
        listed = service.client.get("/v1/models")
        assert [(each["id"], each["root"]) for each in listed.json()["data"]] == [("tiny", "tiny")]
        for name in ("tiny", path):
            answer = service.client.post("/v1/completions", json={"prompt": PROMPT, "model": name})
            assert answer.json()["model"] == "tiny"
        assert path not in service.client.post("/v1/completions", json={"prompt": "a", "model": "b"}).text
    assert ServeArgs(model="Qwen/Qwen2.5-Coder-7B").names == ("Qwen/Qwen2.5-Coder-7B",)


def test_tls_and_its_half_handshakes(tmp_path):
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*command, "-out", tmp_path / "c", "-keyout", tmp_path / "k"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    flags = {"tls_cert": tmp_path / "c", "tls_key": tmp_path / "k", "metrics_port": 0, "max_connections": 8}
    with served(connect=False, **flags) as service:
        idle = [socket.create_connection(("127.0.0.1", service.front.port)) for _ in range(8)]
        trust = ssl.create_default_context(cafile=str(tmp_path / "c"))
        for port in (service.front.port, service.front.metrics_port):
            assert httpx.get(f"https://localhost:{port}/livez", verify=trust).status_code == 200
        for link in idle:
            link.close()


@pytest.mark.parametrize("share_drafts", ["none", "key", "all"])
def test_a_request_says_whose_it_is_and_how_it_is_treated(tmp_path, share_drafts):
    """What the driver gets of a key, its weight, and the body, in one Submit for each text."""
    path = tmp_path / "keys"
    path.write_text("alice secret 4\nbob other\n")
    with served(api_key_file=path, share_drafts=share_drafts) as service:
        body = {"prompt": "def f(x):", "max_tokens": 2, "seed": 7, "n": 2, "priority": 99, "return_sources": True}
        body["prediction"] = {"type": "content", "content": "return x"}
        answer = service.client.post("/v1/completions", json=body, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200, answer.text
        found = service.driver.submitted
        assert [each.params.seed for each in found] == [7, 8] and len({each.id for each in found}) == 2
        for each in found:
            assert (each.share, each.weight, each.priority, each.details) == ("alice", 4.0, 10, True)
            assert (each.tenant, each.learns) == ("" if share_drafts == "all" else "alice", share_drafts != "none")
            assert each.token_ids == each.prompt_ids and each.prediction and not each.delivered
