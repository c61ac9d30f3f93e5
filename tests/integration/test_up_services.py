"""Services on the practice closet's nodes: from lines in cluster.toml to a page behind the login, and to `gpuhub down`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from gpuhub.common import names, secrets
from gpuhub.common.paths import Paths
from tests.support.closet import model_hub, package_index
from tests.support.closet.existing_nodes import INSTANCE, run_gpuhub, write_settings
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

#: Runs a command in a notebook, and returns its output.
RunInside = Callable[[str], str]

ADDRESS = "http://127.0.0.1:18200"
#: Answers with what it was sent, and remembers each visitor in its data.
PROGRAM = (
    "import http.server, json\\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\\n"
    "    def do_GET(self):\\n"
    "        sent = {name.lower(): value for name, value in self.headers.items()}\\n"
    "        open('/data/visitors', 'a').write(sent['x-forwarded-user'] + chr(10))\\n"
    "        body = json.dumps(sent).encode()\\n"
    "        self.send_response(200)\\n"
    "        self.send_header('Content-Length', str(len(body)))\\n"
    "        self.end_headers()\\n"
    "        self.wfile.write(body)\\n"
    "print('serving', flush=True)\\n"
    "http.server.ThreadingHTTPServer(('', 8000), Handler).serve_forever()\\n"
)
#: From a user's container: connections to a service's own addresses, and what the broker answers to its token.
PROBE = """
import os, socket, sys, urllib.request
def connect(host):
    try:
        socket.create_connection((host, 8000), 5).close()
        return "open"
    except OSError as error:
        return type(error).__name__
print([connect(host) for host in sys.argv[1:]])
"""
#: In a notebook, and in the jobs that it starts: asks the service at the address that the variable has.
ASK = """
import os, urllib.request
from urllib.error import HTTPError
print(urllib.request.urlopen(os.environ["NOTES"] + "/asked", timeout=30).read().decode())
try:
    urllib.request.urlopen(os.environ["NOTES"].replace("notes", "broker") + "/api/v1/jobs", timeout=30)
except HTTPError as error:
    print("the broker:", error.code)
print("keys:", [name for name in os.environ if name.endswith("_JOB_KEY")])
"""
#: Reports its loss, as any script does; it knows nothing of MLflow.
TRAIN = """
import time, gpu_launch
for step in range(1, 6):
    gpu_launch.report(step, 5, loss=1 / step)
    time.sleep(0.3)
"""
#: Prints the runs that MLflow has, as seen from a notebook.
LIST_RUNS = """
import json, os, urllib.request
def call(path, **body):
    request = urllib.request.Request(
        os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/" + path,
        data=json.dumps(body).encode(), headers={"Content-Type": "application/json"},
    )
    return json.loads(urllib.request.urlopen(request, timeout=60).read())
ids = [one["experiment_id"] for one in call("experiments/search", max_results=10)["experiments"]]
print(json.dumps(call("runs/search", experiment_ids=ids).get("runs", [])))
"""
#: In the cache's own container, which has Hugging Face's client: downloads a model as users' programs do.
DOWNLOAD = f"""
import os
from huggingface_hub import snapshot_download
folder = snapshot_download("{model_hub.MODEL}")
print(sorted((name, os.path.getsize(os.path.join(folder, name))) for name in os.listdir(folder)))
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what the test opens."""
    with ExitStack() as found:
        yield found


@pytest.fixture
def data() -> Iterator[Path]:
    """A folder of the nodes, which have this machine's file system."""
    folder = Path("/srv") / f"gpuhub-test-{uuid4().hex[:8]}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def write(closet: Any, folder: Path, data: Path, services: bool = True) -> Path:
    """Write settings with a service that has no network, one that has one and admits no user of the tests, and presets."""
    common = f'image = "gpuhub/base:latest"\ncommand = ["python3", "-c", "{PROGRAM}"]\nport = 8000\n'
    tables = (
        f'[[services]]\nname = "notes"\nnode = "rig2"\ndata = "{data}/notes"\nvariables = ["NOTES={{url}}"]\n{common}'
        f'[[services]]\nname = "private"\ninternet = true\nusers = ["nobody-here"]\n{common}'
        f'[[services]]\nname = "mlflow"\npreset = "mlflow"\ndata = "{data}/mlflow"\n'
        f'[[services]]\nname = "packages"\npreset = "python-packages"\ndata = "{data}/packages"\n'
        f'environment = ["PROXPI_CACHE_DIR=/data", "PROXPI_INDEX_URL={package_index.URL}"]\n'
        f'[[services]]\nname = "models"\npreset = "hugging-face"\ndata = "{data}/models"\n'
        f'environment = ["OLAH_OPTIONS=--cache-size-limit=1GB --hf-scheme=http --hf-netloc={model_hub.NETLOC}"]\n'
    )
    file = write_settings(closet, folder, tables if services else "")
    file.write_text(file.read_text().replace('https = "local"\n', ""))
    return file


def run_service(*words: str) -> str:
    """Run `gpuhub service`, and return its output."""
    command = [str(Path(sys.executable).with_name("gpuhub")), "service", *words, "--instance", INSTANCE]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout


def find_service(name: str) -> str:
    return next((line for line in run_service("list").splitlines() if line.startswith(f"{name} ")), "")


def ask(path: str, token: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}", "Cookie": "jupyterhub-session-id=secret"}
    return httpx.get(ADDRESS + path, headers=headers, trust_env=False, timeout=30)


def test_a_service_from_cluster_toml_to_its_removal(closet: Any, tmp_path: Path, data: Path, stack: ExitStack) -> None:
    """Four lines bring it; it comes back when it dies; `doctor`, `service` and `down` know it, and its data stays."""
    data.mkdir()
    file = write(closet, tmp_path, data)
    try:
        done = run_gpuhub("up", file)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for(lambda: "running" in find_service("notes"), "the service runs", 120)
        password = secrets.read_secret(Paths(INSTANCE), secrets.USER_PASSWORD)
        ada = stack.enter_context(closing(log_in(ADDRESS, "ada", password)))
        wait_for(lambda: ask("/services/notes/", ada.token).status_code == 200, "it answers", 60)
        sent = ask("/services/notes/", ada.token).json()
        assert sent["x-forwarded-user"] == "ada"
        assert not {"authorization", "cookie"} & set(sent)
        assert ask("/services/private/", ada.token).status_code == 404
        assert ask("/services/notes/", "0" * 32).status_code == 401

        with use_notebook(closet, ada) as run:
            ask_from_inside(run)
            log_a_launch(run, ada)
            install_packages(run, closet, tmp_path)
            download_models(run, closet)
        name = names.service_container_name(INSTANCE, "notes")
        with closing(closet.client("rig2")) as client:
            client.containers.get(name).kill()
        wait_for(lambda: " 1 " in find_service("notes"), "it was started again", 60)
        assert "serving" in run_service("logs", "notes")
        assert "starts again" in run_service("restart", "notes")
        wait_for(lambda: ask("/services/notes/", ada.token).status_code == 200, "it answers again", 60)
        with closing(closet.client("rig2")) as client:
            client.containers.get(name).remove(force=True)
        findings = json.loads(run_gpuhub("doctor", "--json", file).stdout)[0]["findings"]
        assert any(one["check"] == "service" and "private on rig1 runs" in one["value"] for one in findings)

        # Others on the bridge, and the node's address: neither is a way to a service.
        with closing(closet.client("rig1")) as client:
            relay = client.containers.get(names.service_relay_name(INSTANCE, "private"))
            own = relay.attrs["NetworkSettings"]["Networks"][names.access_network_name(INSTANCE)]["IPAddress"]
            addresses = [own, str(closet.plan.node("rig1").address)]
            probed = client.containers.run(
                "gpuhub/base:latest",
                ["python3", "-c", PROBE, *addresses],
                network=names.access_network_name(INSTANCE),
                remove=True,
            )
        assert "open" not in probed.decode()

        file = write(closet, tmp_path, data, services=False)
        done = run_gpuhub("up", file)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for(lambda: not list_containers(closet), "the former services are gone", 60)
    finally:
        done = run_gpuhub("down", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list_containers(closet) == []
    assert "ada" in (data / "notes" / "visitors").read_text()


@contextmanager
def use_notebook(closet: Any, ada: Client) -> Iterator[RunInside]:
    """Start a notebook; yield a function that runs a command there and returns its output."""
    ada.start("main", "gpu")
    wait_for(lambda: ada.is_ready("main"), "the notebook is ready", 120)
    lease = ada.ask(ada.broker, "GET", "/leases")[1][0]
    with closing(closet.client(lease["nodes"][0])) as client:
        notebook = client.containers.get(names.notebook_container_name(INSTANCE, "ada", "main"))
        user = notebook.attrs["Config"]["User"]

        def run(command: str) -> str:
            code, output = notebook.exec_run(["sh", "-c", command], user=user, workdir="/home/ada")
            assert code == 0, output.decode()
            return str(output.decode())

        run("rm -rf work && mkdir work")
        yield run
    ada.stop("main")


def ask_from_inside(run: RunInside) -> None:
    """A notebook and its job on another GPU ask the service without a token of their own."""
    run(f"cat > work/ask.py <<'END'\n{ASK}\nEND")
    for command in ("python work/ask.py", "cd work && gpu-launch run --nnodes 1 ask.py"):
        output = run(command)
        assert '"x-forwarded-user": "ada"' in output
        assert '"x-forwarded-prefix": "/services/notes"' in output
        assert "the broker: 404" in output
        assert "keys: []" in output


def log_a_launch(run: RunInside, ada: Client) -> None:
    """A launch is a run in MLflow by itself, with its metrics and its GPU."""
    wait_for(lambda: ask("/services/mlflow/health", ada.token).status_code == 200, "MLflow answers", 180)
    assert "MLflow" in ask("/services/mlflow/", ada.token).text
    run(f"cat > work/train.py <<'END'\n{TRAIN}\nEND\ncat > work/show.py <<'END'\n{LIST_RUNS}\nEND")
    before = len(json.loads(run("python work/show.py")))
    assert "MLflow:" not in run("cd work && gpu-launch run --nnodes 1 train.py --epochs 5")
    logged, *others = json.loads(run("python work/show.py"))
    assert len(others) == before
    info, metrics, params = logged["info"], logged["data"]["metrics"], logged["data"]["params"]
    assert (info["run_name"], info["user_id"], info["status"]) == ("train.py", "ada", "FINISHED")
    assert [(one["key"], one["step"], one["value"]) for one in metrics] == [("loss", 5, 0.2)]
    values = {one["key"]: one["value"] for one in params}
    assert (values["command"], values["ranks"]) == ("train.py --epochs 5", "1")
    assert "RTX" in values["gpus"]


def install_packages(run: RunInside, closet: Any, folder: Path) -> None:
    """What pip has installed once comes from the cache, also while the index is away."""
    install = f"pip install --no-cache-dir --disable-pip-version-check {package_index.PACKAGE} --target"
    with package_index.served_index(closet, folder):
        run(f"{install} work/first")
    run(f"{install} work/second")
    assert run(f"cd work/second && python -c 'import {package_index.PACKAGE} as found; print(found.VALUE)'") == "1\n"


def download_models(run: RunInside, closet: Any) -> None:
    """The hub sends a file once: the second program, Hugging Face's own, gets it from the cache."""
    sizes = {name: len(content) for name, content in model_hub.FILES.items()}
    fetch = "curl --fail --silent --show-error $HF_ENDPOINT/{}/resolve/main/{} | wc -c"
    with model_hub.served_hub(closet) as sent:
        assert {name: int(run(fetch.format(model_hub.MODEL, name))) for name in sizes} == sizes
        with closing(closet.client("rig1")) as client:
            cache = client.containers.get(names.service_container_name(INSTANCE, "models"))
            variables = {"HF_ENDPOINT": "http://127.0.0.1:5000/services/models", "HF_HOME": "/tmp/hub"}
            code, output = cache.exec_run(["python3", "-c", DOWNLOAD], environment=variables)
        assert code == 0, output.decode()
        assert str(sorted(sizes.items())) in output.decode()
        assert sent == sizes


def list_containers(closet: Any) -> list[str]:
    """Return the names of services' containers on all nodes."""
    labels = [f"{names.LABEL_INSTANCE}={INSTANCE}", f"{names.LABEL_KIND}={names.KIND_SERVICE}"]
    found = []
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            found += [
                one.name for one in client.containers.list(all=True, ignore_removed=True, filters={"label": labels})
            ]
    return found
