"""Deployment files: each is checked by its own tool or schema, and what it starts is started here."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lpr.serve.metrics import Metrics
from lpr.serve.options import ServeArgs, parse
from lpr.serve.service import Service
from tests.dist.test_private_store import listeners
from tests.fakes.paths import ROOT

LAUNCH = ROOT / "launch"
MANIFESTS = sorted((LAUNCH / "k8s").glob("*.yaml"))
WANTED = "this needs pip install '.[launch]'"
TORCHRUN_PATIENCE = 30
"""Seconds that torchrun gives its ranks after a signal, before it kills them."""


def text_of(name: str) -> str:
    return (LAUNCH / name).read_text(encoding="utf-8")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def documents(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason=WANTED)
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def program(name: str) -> str:
    """A program that comes with a Python package, from where that is installed."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return found or pytest.skip(f"{WANTED}: no {name}")


# The image.


def instructions(text: str) -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, arguments), without comments."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = lines.replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in joined.splitlines() if line.strip()]


def last(name: str) -> str:
    return [rest for each, rest in instructions(text_of("Dockerfile")) if each == name][-1]


def test_the_image_passes_its_linter(tmp_path: Path) -> None:
    hadolint = program("hadolint")
    done = subprocess.run([hadolint, LAUNCH / "Dockerfile"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(re.sub(r"^FROM python.*$", "FROM python", text_of("Dockerfile"), flags=re.MULTILINE))
    assert subprocess.run([hadolint, wrong], capture_output=True, timeout=300).returncode != 0


def test_the_image_is_built_from_what_is_there() -> None:
    copied = [rest.split()[:-1] for name, rest in instructions(text_of("Dockerfile"))
              if name == "COPY" and "--from" not in rest]  # fmt: skip
    sources = {source for each in copied for source in each}
    assert {"lpr", "native", "pyproject.toml"} <= sources and all((ROOT / each).exists() for each in sources)
    ignored = text_of("Dockerfile.dockerignore").split()
    assert "*" in ignored and {f"!{each}" for each in sources} <= set(ignored), "all else is left out of the build"


def test_the_image_is_confined_and_serves() -> None:
    stages = [name for name, _ in instructions(text_of("Dockerfile"))].count("FROM")
    bases = {rest.split()[0] for name, rest in instructions(text_of("Dockerfile")) if name == "FROM"}
    assert len(bases) == 1 and PINNED.search(bases.pop())
    assert stages == 2 and re.fullmatch(r"[1-9]\d+:[1-9]\d+", last("USER"))
    command = json.loads(last("ENTRYPOINT"))
    assert command[:3] == ["python", "-m", "lpr.serve"]
    assert f"{parse(command[3:]).port}" == last("EXPOSE") and parse(command[3:]).host == "0.0.0.0"
    assert last("STOPSIGNAL") == "SIGTERM"


@contextlib.contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that answers every path with one status; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_is_that_of_the_service(status: int, code: int) -> None:
    """The image's own command, with the port of a server that is ready or not."""
    command = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert "/readyz" in command[-1]
    with answering(status) as port:
        words = [sys.executable, *command[1:-1], command[-1].replace(":8000/", f":{port}/")]
        assert subprocess.run(words, capture_output=True, timeout=300).returncode == code


# The compose file.


def composed() -> dict[str, Any]:
    (found,) = documents(LAUNCH / "compose.yaml")
    return found


def test_compose_files_are_compose_files() -> None:
    compose = pytest.importorskip("compose_spec", reason=WANTED).PyCompose
    for name in ("compose.yaml", "compose.gpu.yaml"):
        compose.from_yaml(text_of(name)).validate_volumes()
    for right, wrong in (("restart: unless-stopped", "restart: perhaps"), ("stop_grace_period", "stop_period")):
        with pytest.raises(ValueError, match=wrong.split()[-1]):
            compose.from_yaml(text_of("compose.yaml").replace(right, wrong))


def test_the_composed_service_is_ours() -> None:
    services = composed()["services"]
    assert set(services) == {"lpr", "valkey", "prometheus", "grafana"}
    ours = services["lpr"]
    default = interpolated(ours["command"], {})
    args = parse(shlex.split(default))
    assert float(ours["stop_grace_period"].removesuffix("s")) > args.shutdown_timeout + 5
    assert (ROOT / "launch" / ours["build"]["context"]).resolve() == ROOT
    assert (ROOT / ours["build"]["dockerfile"]).exists()
    assert ours["environment"]["LPR_DRAFT_STORE"] == "redis://valkey:6379"
    for service in services.values():
        assert "build" in service or PINNED.search(service["image"])
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in composed()["volumes"] or (LAUNCH / source).is_file(), source


def interpolated(value: str, given: dict[str, str]) -> str:
    """A value as compose reads it: ${NAME:-default} and ${NAME:?message}; raises KeyError with the message."""

    def filled(match: re.Match[str]) -> str:
        name, how, rest = match.groups()
        if given.get(name):
            return given[name]
        if how == "?":
            raise KeyError(rest)
        return rest

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", filled, value).replace("$$", "$")


PINNED = re.compile(r"@sha256:[0-9a-f]{64}$")


def test_the_composed_services_have_passwords_or_do_not_start() -> None:
    services = composed()["services"]
    needed = {
        ("lpr", "LPR_API_KEY"), ("lpr", "LPR_DRAFT_STORE_PASSWORD"), ("valkey", "VALKEY_PASSWORD"),
        ("grafana", "GF_SECURITY_ADMIN_PASSWORD"),
    }  # fmt: skip
    for service, name in needed:
        value = services[service]["environment"][name]
        for given in ({}, {found: "" for found in re.findall(r"\$\{(\w+)", value)}):
            with pytest.raises(KeyError, match="set"):
                interpolated(value, given)
    assert interpolated(services["lpr"]["environment"]["LPR_API_KEY"], {"LPR_API_KEY": "k"}) == "k"
    assert not any("ANONYMOUS" in name for name in services["grafana"]["environment"])
    assert services["valkey"]["networks"] == ["store"] and composed()["networks"]["store"]["internal"]
    assert "ports" not in services["valkey"]
    published = [port for each in services.values() for port in each.get("ports", [])]
    assert all((port["host_ip"] if isinstance(port, dict) else port.split(":")[0]) == "127.0.0.1" for port in published)
    assert "/launch/.env" in (ROOT / ".gitignore").read_text().split()


def store_commands() -> list[list[str]]:
    """How the store is started by compose and by Kubernetes."""
    pod = documents(LAUNCH / "k8s/valkey.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    return [
        [interpolated(word, {}) for word in composed()["services"]["valkey"]["command"]],
        pod["command"] + pod["args"],
    ]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
@pytest.mark.parametrize("number", [0, 1])
def test_the_store_asks_for_its_password_and_does_not_show_it(number: int, tmp_path: Path) -> None:
    """The commands themselves, with redis-server in valkey-server's place."""
    redis = pytest.importorskip("redis")
    port = free_port()
    (tmp_path / "valkey-server").write_text(f'#!/bin/sh\nexec redis-server "$@" --port {port} --bind 127.0.0.1\n')
    (tmp_path / "valkey-server").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "VALKEY_PASSWORD": "sesame"}
    how: dict[str, Any] = {"env": env, "cwd": tmp_path, "stdout": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(store_commands()[number], **how) as server:  # a shell, whose child the server may be
        once = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        stranger, friend = (redis.Redis(port=port, password=each, protocol=2, retry=once) for each in (None, "sesame"))
        try:
            end = time.monotonic() + 30
            while True:
                with contextlib.suppress(redis.exceptions.ConnectionError):
                    if friend.ping():
                        break
                assert time.monotonic() < end and server.poll() is None
                time.sleep(0.05)
            with pytest.raises(redis.exceptions.AuthenticationError):
                stranger.get("a")
            assert friend.config_get("maxmemory") == {"maxmemory": str(512 << 20)}
            assert b"sesame" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        finally:
            stranger.close()
            friend.close()
            os.killpg(server.pid, signal.SIGKILL)


def test_prometheus_and_grafana_find_each_other() -> None:
    services = composed()["services"]
    (scraped,) = documents(LAUNCH / "monitoring/prometheus.yaml")[0]["scrape_configs"]
    (found,) = scraped["dns_sd_configs"]
    assert found["names"] == ["lpr"] and f"--metrics-port {found['port']}" in services["lpr"]["command"]
    assert f":{found['port']}/readyz" in services["lpr"]["healthcheck"]["test"][-1], "no client fills this port"
    (source,) = documents(LAUNCH / "monitoring/datasources.yaml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090" and services["prometheus"]["ports"][0].endswith(":9090")
    (provider,) = documents(LAUNCH / "monitoring/dashboards.yaml")[0]["providers"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./monitoring/dashboard.json"].startswith(provider["options"]["path"])
    assert mounts["./monitoring/datasources.yaml"].startswith("/etc/grafana/provisioning/datasources/")
    assert mounts["./monitoring/dashboards.yaml"].startswith("/etc/grafana/provisioning/dashboards/")
    dashboard = json.loads(text_of("monitoring/dashboard.json"))
    assert source["uid"] == dashboard["templating"]["list"][0]["current"]["value"]


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    promtool = program("promtool")
    path = LAUNCH / "monitoring" / "prometheus.yaml"
    done = subprocess.run([promtool, "check", "config", path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "prometheus.yaml"
    wrong.write_text(path.read_text().replace("metrics_path", "metric_path"))
    assert subprocess.run([promtool, "check", "config", wrong], capture_output=True, timeout=300).returncode != 0


# The dashboard.


def filled_in(expression: str) -> str:
    """An expression with Grafana's variables replaced as for "All"."""
    for name, value in (("$__rate_interval", "20s"), ("$model", ".*"), ("$instance", ".*")):
        expression = expression.replace(name, value)
    return expression


def expressions() -> list[str]:
    """The panels' expressions, with Grafana's variables replaced by values."""
    panels = json.loads(text_of("monitoring/dashboard.json"))["panels"]
    return [filled_in(target["expr"]) for panel in panels for target in panel.get("targets", [])]


def test_the_dashboard_is_one_of_grafana() -> None:
    """Read as Grafana's own models and written again, nothing is lost: every key is one that they know."""
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=WANTED)
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    ours = json.loads(text_of("monitoring/dashboard.json"))

    def written(values: dict[str, Any]) -> dict[str, Any]:
        return json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(copy.deepcopy(values))))

    assert lost(ours, written(ours)) == []
    wrong = copy.deepcopy(ours)
    wrong["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    assert lost(wrong, written(wrong)) == ["/panels[1]/fieldConfig/defaults/units"]
    ids = [panel["id"] for panel in ours["panels"]]
    assert len(set(ids)) == len(ids)


def lost(value: Any, other: Any, where: str = "") -> list[str]:
    """Where `other` lacks what `value` says."""
    if isinstance(value, dict) and isinstance(other, dict):
        return [found for key in value for found in
                (lost(value[key], other[key], f"{where}/{key}") if key in other else [f"{where}/{key}"])]  # fmt: skip
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        return [found for number, each in enumerate(value) for found in lost(each, other[number], f"{where}[{number}]")]
    return [] if value == other else [where]


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads(text_of("monitoring/dashboard.json"))["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    promql = pytest.importorskip("promql_parser", reason=WANTED)
    text = Metrics(Service(ServeArgs(), lambda message: None), "m").text().decode()
    known = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    known |= {name for name in re.findall(r"# TYPE (\S+)", text)}
    rooms = [path for room in ("serve", "fleet") for path in (ROOT / "lpr" / room).glob("*.py")]
    sources = "".join(path.read_text("utf-8") for path in rooms)
    asked = {name for each in expressions() for name in re.findall(r"(?:lpr|vllm):\w+", each)}
    assert len(asked) > 20
    for each in expressions():
        promql.parse(each)
    # Some are there only with --draft-store: those are looked for where they are defined.
    bare = {name: re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    missing = {name for name in asked if name not in known and f'"{bare[name]}"' not in sources}
    assert not missing
    with pytest.raises(Exception):  # noqa: B017 - whatever the parser raises
        promql.parse("sum(rate(lpr:steps_total[1m])")


# Kubernetes.


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_what_kubernetes_takes(path: Path) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason=WANTED)
    import jsonschema

    from tests.fakes.launch_schemas import SCHEMAS

    def check(found: dict[str, Any]) -> None:
        if found["kind"] in SCHEMAS:
            jsonschema.validate(found, SCHEMAS[found["kind"]])
            for template in templates(found):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", **template.get("metadata", {})}}
                kubernetes.validate({**pod, "spec": template["spec"]}, "1.34", strict=True)
        else:
            kubernetes.validate(found, "1.34", strict=True)

    for found in documents(path):
        check(found)
        wrong = copy.deepcopy(found)
        (wrong.get("spec") or wrong)["replica"] = 3
        with pytest.raises(Exception, match="replica"):
            check(wrong)
        for template in templates(wrong := copy.deepcopy(found)):
            template["spec"]["containers"][0]["imagee"] = "x"
            with pytest.raises(Exception, match="imagee"):
                check(wrong)


def templates(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of a LeaderWorkerSet, the leader's first."""
    inner = found.get("spec", {}).get("leaderWorkerTemplate", {})
    return [inner[name] for name in ("leaderTemplate", "workerTemplate") if name in inner]


def leader_of(name: str) -> dict[str, Any]:
    """The pod of a mesh's first machine."""
    (found,) = documents(LAUNCH / "k8s" / f"{name}.yaml")
    return templates(found)[0]["spec"]


def flags_of(pod: dict[str, Any]) -> ServeArgs:
    """The flags that a pod gives lpr.serve."""
    args = pod["containers"][0]["args"]
    return parse(args[args.index("lpr.serve") + 1 :] if "lpr.serve" in args else args)


@pytest.mark.parametrize("name", ["leaderworkerset", "leaderworkerset_two_machines"])
def test_pods_load_as_long_as_they_may_and_end_as_they_should(name: str) -> None:
    pod = leader_of(name)
    box, args = pod["containers"][0], flags_of(pod)
    start, live, ready = (box[f"{each}Probe"] for each in ("startup", "liveness", "readiness"))
    assert start["periodSeconds"] * start["failureThreshold"] >= args.load_timeout
    assert [each["httpGet"]["path"] for each in (start, live, ready)] == ["/readyz", "/livez", "/readyz"]
    ports = {each["name"]: each["containerPort"] for each in box["ports"]}
    assert ports == {"http": args.port, "metrics": args.metrics_port}
    assert {each["httpGet"]["port"] for each in (start, live, ready)} == {"metrics"}, "no client fills this port"
    away = box["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert away >= ready["periodSeconds"] * ready["failureThreshold"], "routers have noticed by then"
    assert pod["terminationGracePeriodSeconds"] >= away + args.shutdown_timeout + 10
    if box.get("command") == ["torchrun"]:
        assert args.shutdown_timeout < TORCHRUN_PATIENCE
    mounts = {each["mountPath"]: each["name"] for each in box["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert set(mounts.values()) == set(volumes)
    assert str(pod["securityContext"]["runAsUser"]) == last("USER").split(":")[0]


@pytest.mark.parametrize("name", ["leaderworkerset", "leaderworkerset_two_machines"])
def test_a_mesh_has_a_rank_per_gpu(name: str) -> None:
    (found,) = documents(LAUNCH / "k8s" / f"{name}.yaml")
    machines = found["spec"]["leaderWorkerTemplate"]["size"]
    for template in templates(found):
        box = template["spec"]["containers"][0]
        gpus = int(box["resources"]["limits"]["nvidia.com/gpu"])
        assert gpus == int(box["resources"]["requests"]["nvidia.com/gpu"])
        assert flags_of(template["spec"]).num_ranks == machines * gpus
    assert len(templates(found)) == (2 if machines > 1 else 1)


def test_routers_send_to_first_machines_alone() -> None:
    (service,) = documents(LAUNCH / "k8s/service.yaml")
    pool, route = documents(LAUNCH / "k8s/inferencepool.yaml")
    assert service["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert pool["spec"]["targetPorts"] == [{"number": flags_of(leader_of("leaderworkerset")).port}]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    assert float(route["spec"]["rules"][0]["timeouts"]["request"].removesuffix("s")) >= ServeArgs().request_timeout
    (listed,) = documents(LAUNCH / "k8s/kustomization.yaml")
    assert all((LAUNCH / "k8s" / each).exists() for each in listed["resources"])
    stores = {each["name"] for each in leader_of("leaderworkerset")["containers"][0]["env"]}
    names = {each["metadata"]["name"] for each in documents(LAUNCH / "k8s/valkey.yaml")}
    assert "LPR_DRAFT_STORE" in stores and names == {"lpr-valkey"}


def pods() -> list[dict[str, Any]]:
    """Every pod of the manifests."""
    found = [document for path in MANIFESTS for document in documents(path)]
    sets = [template["spec"] for each in found for template in templates(each)]
    return sets + [each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment"]


def test_pods_have_secrets_and_nothing_that_they_do_not_need() -> None:
    (kustomization,) = documents(LAUNCH / "k8s/kustomization.yaml")
    named = {each["name"] for each in kustomization["images"]}
    assert len(pods()) == 4
    for pod in pods():
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"]
        (box,) = pod["containers"]
        assert PINNED.search(box["image"]) or box["image"] in named, "kustomize adds the digest"
        secrets = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in box["env"]
                   if "secretKeyRef" in each.get("valueFrom", {})}  # fmt: skip
        assert not any(each.get("optional") for each in secrets.values())
        needed = {"VALKEY_PASSWORD"} if box["name"] == "valkey" else {"LPR_API_KEY", "LPR_DRAFT_STORE_PASSWORD"}
        assert secrets.keys() == needed
        assert "--insecure" not in box["args"]
    keys = {each["valueFrom"]["secretKeyRef"]["key"] for pod in pods() for each in pod["containers"][0]["env"]
            if "secretKeyRef" in each.get("valueFrom", {})}  # fmt: skip
    page = (ROOT / "docs/deployment.md").read_text()
    assert all(f"--from-literal={key}=" in page for key in keys), "the page says how to make them"


def policies() -> dict[str, dict[str, Any]]:
    found = [*documents(LAUNCH / "k8s/networkpolicy.yaml"), *documents(LAUNCH / "k8s/networkpolicy_two_machines.yaml")]
    return {each["metadata"]["name"]: each["spec"] for each in found}


def test_network_policies_are_of_the_pods_that_there_are() -> None:
    found = [document for path in MANIFESTS for document in documents(path)]
    made = [each for document in found for each in templates(document)]
    made += [each["spec"]["template"] for each in found if each["kind"] == "Deployment"]
    labels = [each["metadata"]["labels"] for each in made]
    for name, spec in policies().items():
        chosen = spec["podSelector"]["matchLabels"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        if name != "lpr-ranks":  # the set's own label, which its controller adds
            assert any(chosen.items() <= each.items() for each in labels), name
    store, replica = policies()["lpr-valkey"], policies()["lpr"]
    assert store["ingress"][0]["from"][0]["podSelector"] == replica["podSelector"] and "egress" not in store
    assert [rule["ports"][0]["port"] for rule in replica["ingress"]] == [flags_of(leader_of("leaderworkerset")).port]
    assert policies()["lpr-ranks"]["ingress"][0]["from"] == policies()["lpr-ranks"]["egress"][0]["to"]


# What they start, started here.

KEY = "word-of-tests"
TINY = ["--dtype=float32", "--no-access-log", "--window-size=0", "--trie-nodes=8", "--max-batch-size=2"]
BODY = {"prompt": "def f(x):\n    return", "max_tokens": 8, "temperature": 0}


def ask(port: int, processes: list[subprocess.Popen[bytes]], seconds: float = 240) -> dict[str, Any]:
    """A completion of the service at a port, as soon as it is ready."""
    end = time.monotonic() + seconds
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while True:
            assert time.monotonic() < end and all(each.poll() is None for each in processes)
            with contextlib.suppress(httpx.TransportError):
                if client.get("/readyz").status_code == 200:
                    headers = {"Authorization": f"Bearer {KEY}"}
                    return client.post("/v1/completions", json=BODY, headers=headers).json()
            time.sleep(0.2)


def on_path() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def end_groups(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill whatever they have started."""
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
        each.wait(60)


def ended(processes: list[subprocess.Popen[bytes]], seconds: float = 90) -> list[int]:
    return [each.wait(seconds) for each in processes]


SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
if [ "$SLURM_JOB_NUM_NODES" = 1 ]; then printf "%s\\n" "$@"; exit; fi
for ((id = SLURM_JOB_NUM_NODES - 1; id >= 0; id--)); do SLURM_NODEID=$id "$@" & done
trap 'kill $(jobs -p)' TERM
wait
wait
"""
"""Starts every machine's task here; that of a single machine it prints."""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job, with stand-ins for SLURM's programs."""
    for name, script in (("scontrol", "#!/bin/sh\necho 127.0.0.1\necho other\n"), ("srun", SRUN)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    env = on_path() | {"SLURM_JOB_NODELIST": "a[0-1]", "SLURM_GPUS_ON_NODE": "1", "SLURM_ARRAY_TASK_ID": "3"}
    return env | {"PATH": f"{tmp_path}:{env['PATH']}", "LPR_API_KEY": KEY}


JOB = ["--device=cpu", "--lp=2", *TINY[2:], "--max-new-tokens=8", "--json", "--prompt=def f(x):"]
"""Flags of lpr.generate."""


def test_nothing_that_is_launched_unpickles() -> None:
    """torchrun's negotiated rendezvous unpickles what anybody who reaches its port has written.

    torchrun takes it by --standalone and c10d, and by default for one machine without a --master-port.
    """
    found = [path for path in sorted(LAUNCH.rglob("*")) if path.is_file() and path.suffix in (".sh", ".py", ".yaml")]
    num_launchers = 0
    for path in found:
        code = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
        assert not re.search(r"c10d|--standalone|--rdzv", code), path
        if re.search(r"torchrun --|\[torchrun\]|torch.distributed.run\"", code):
            num_launchers += 1
            assert re.search(r"--master[-_]port", code) and re.search(r"--node[-_]rank", code), path
    assert num_launchers == 5


def listening_of(processes: list[subprocess.Popen[bytes]]) -> set[str]:
    """Addresses at which the processes and all that they have started listen."""
    psutil = pytest.importorskip("psutil")
    found = set()
    for each in processes:
        for one in [psutil.Process(each.pid), *psutil.Process(each.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                found |= listeners(one.pid)
    return found


def test_a_machine_needs_its_number() -> None:
    env = on_path() | {"HEAD": "127.0.0.1:1", "NNODES": "2"}
    done = subprocess.run([LAUNCH / "many_machines.sh"], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "set NODE_RANK to the number of this machine" in done.stderr


def test_the_slurm_service_needs_a_key_or_an_open_word(slurm: dict[str, str]) -> None:
    env = slurm | {"SLURM_JOB_NUM_NODES": "1"}
    keyless = {name: value for name, value in env.items() if name != "LPR_API_KEY"}
    done = subprocess.run([LAUNCH / "slurm_serve.sh"], env=keyless, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "LPR_API_KEY" in done.stderr and not done.stdout
    for flags, variables in (["--insecure"], keyless), (["--api-key-file", "f"], keyless), ([], env):
        command = [LAUNCH / "slurm_serve.sh", *flags]
        assert subprocess.run(command, env=variables, capture_output=True, timeout=300).returncode == 0


def test_on_one_machine_slurm_starts_no_torchrun(slurm: dict[str, str]) -> None:
    command = [LAUNCH / "slurm_serve.sh", "--lp", "4", "--model", "a b", *TINY]
    env = slurm | {"SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    address, *words = done.stdout.splitlines()
    assert address == "lpr.serve: http://127.0.0.1:8003" and words[:3] == ["python", "-m", "lpr.serve"]
    args = parse(words[3:])
    assert (args.lp, args.model, args.port, args.host) == (4, "a b", 8003, "0.0.0.0")
    assert args.shutdown_timeout < TORCHRUN_PATIENCE


def test_scripts_pass_their_linter(tmp_path: Path) -> None:
    shellcheck = program("shellcheck")
    scripts = sorted(LAUNCH.glob("*.sh"))
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, timeout=300)
    assert len(scripts) >= 4 and done.returncode == 0, done.stdout
    assert all(os.access(script, os.X_OK) for script in scripts)


def test_the_image_has_what_the_manifests_use() -> None:
    """A replica with a store for drafts needs redis, which is an extra."""
    recipe = (LAUNCH / "Dockerfile").read_text()
    found = re.search(r'^ARG EXTRAS="\[(.*)\]"$', recipe, re.MULTILINE)
    manifests = [path.read_text() for path in (LAUNCH / "k8s").glob("*.yaml")]
    assert found and any("LPR_DRAFT_STORE" in text for text in manifests)
    assert "fleet" in found[1].split(",") and f"[{found[1]}]" in (LAUNCH / "compose.yaml").read_text()
