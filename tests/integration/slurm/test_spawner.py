"""Notebooks as Slurm jobs with the real hub, broker, proxy, Slurm and jupyterhub-singleuser.

The jobs run as a user that Slurm's machines know and the head node does not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.hub.kernel_client import open_kernel
from tests.support.hub.users import Client
from tests.support.product import wait_for
from tests.support.slurm.daemons import wait_saved
from tests.support.slurm.hub import NB, Cluster, build_environment, leases, slurm_hub, start, wait_ready
from tests.support.slurm.site import USERS

pytestmark = [pytest.mark.slurm, pytest.mark.root]

INSTANCE = "ghbatch"
#: Bytes that ZeroMQ sends to everybody who connects; it contains no data.
ZMTP_GREETING = 64


@pytest.fixture(scope="module")
def command() -> Iterator[Path]:
    """The real jupyterhub-singleuser in an environment that every user can read, unlike pytest's folders."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-notebook-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield build_environment(folder, "ipykernel")


@pytest.fixture(scope="module")
def cluster(command: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_hub(INSTANCE, tmp_path_factory.mktemp("hub"), command, site_port=27400, port=18420) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def clear(cluster: Cluster) -> Iterator[None]:
    yield
    for user in (cluster.ada, cluster.ben):
        user.stop(NB)
    cluster.wait_clear()


def is_gone(user: Client) -> bool:
    """Return whether the hub has no such server any more."""
    servers = user.servers()
    return servers is not None and NB not in servers


def answers(cluster: Cluster, user: Client) -> bool:
    """Return whether the notebook answers its user through the proxy."""
    url = f"http://127.0.0.1:{cluster.hub.port}/user/{user.name}/{NB}/api/status"
    with httpx.Client(headers={"Authorization": f"token {user.token}"}, trust_env=False, timeout=10) as web:
        return web.get(url).status_code == 200


def read_log(cluster: Cluster, user: str) -> str:
    """Return the notebook's log; empty before its first line."""
    log = cluster.site.users[user].home / ".gpuhub" / f"notebook-{NB}.log"
    return log.read_text() if log.exists() else ""


def environment_of(pid: int) -> dict[str, str]:
    texts = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(text.decode().partition("=")[::2] for text in texts if text)


def notebooks(user: str) -> list[int]:
    """Return the ids of the user's notebook processes."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_users = entry.stat().st_uid == USERS[user]
                if is_users and b"jupyterhub-singleuser\0" in (entry / "cmdline").read_bytes():
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


def test_notebook_is_a_slurm_job_of_its_user(cluster: Cluster) -> None:
    job = start(cluster, cluster.ada)
    assert answers(cluster, cluster.ada), read_log(cluster, "ada")
    [lease] = leases(cluster.ada)
    assert lease["slurm_job"] == job
    assert cluster.jobs()[job] == (f"{INSTANCE}-lease-{lease['id']}", USERS["ada"], "RUNNING")
    [pid] = notebooks("ada")
    environment = environment_of(pid)
    assert environment["SLURM_JOB_ID"] == str(job)
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["SLURM_JOB_GPUS"] == "0"
    assert environment["HOME"] == str(cluster.site.users["ada"].home)
    assert environment["JUPYTERHUB_SERVICE_URL"].startswith("https://127.0.0.11:")
    assert "PYTHONPATH" not in environment
    # No process shows the token, and Slurm shows the script to no other user.
    token = environment["JUPYTERHUB_API_TOKEN"]
    shown = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    assert token not in shown
    assert token not in read_log(cluster, "ada")
    asked = cluster.site.run("scontrol", "write", "batch_script", str(job), "-", user="ben")
    assert token not in asked.stdout + asked.stderr
    assert token in cluster.site.ask("scontrol", "write", "batch_script", str(job), "-", user="ada")
    readable = subprocess.run(
        ["grep", "-rlsF", token, str(cluster.site.folder), str(cluster.hub.paths.state)],
        check=False, capture_output=True, text=True, user=USERS["ben"], group=USERS["ben"], extra_groups=[],
    )  # fmt: skip
    assert readable.stdout == ""
    cluster.ada.stop(NB)
    cluster.wait_clear()
    assert notebooks("ada") == []
    assert list((cluster.hub.paths.state / "slurm-notebooks").iterdir()) == []


def test_only_the_own_job_reports_the_port(cluster: Cluster) -> None:
    start(cluster, cluster.ada)
    [pid] = notebooks("ada")
    environment = environment_of(pid)
    url = environment["JUPYTERHUB_API_URL"]
    port = int(environment["JUPYTERHUB_SERVICE_URL"].split(":")[2].split("/")[0])
    tls = ssl.create_default_context(cafile=environment["JUPYTERHUB_SSL_CLIENT_CA"])
    tls.load_cert_chain(environment["JUPYTERHUB_SSL_CERTFILE"], environment["JUPYTERHUB_SSL_KEYFILE"])
    with httpx.Client(verify=tls, trust_env=False) as web:

        def post(path: str, token: str, body: object) -> int:
            return web.post(f"{url}{path}", headers={"Authorization": f"token {token}"}, json=body).status_code

        own = environment["JUPYTERHUB_API_TOKEN"]
        assert post("/gpuhub-port", own, {"port": port}) == 204
        assert post("/gpuhub-port", own, {"port": port + 1}) == 409
        assert post("/gpuhub-port", own, {"port": 22}) == 400
        assert post("/gpuhub-port", own, {"port": port, "ip": "127.0.0.1"}) == 400
        assert post("/gpuhub-port", cluster.ada.token, {"port": port}) == 403
        assert post("/gpuhub-port", cluster.ben.token, {"port": port}) == 403
        assert post("/gpuhub-port", "unknown", {"port": port}) == 403
        assert post("/batchspawner", own, {"port": port}) == 404
    assert answers(cluster, cluster.ada)


#: Run by another user of the node: tries every port on which the first argument's user listens, and every Unix socket
#: below the folder in the second one, while the user's kernel prints the secret again and again.
STRANGER = """
import json, os, socket, ssl, sys, time
import zmq
uid, folder = int(sys.argv[1]), sys.argv[2]
ports = set()
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for fields in map(str.split, open(table).readlines()[1:]):
        if fields[3] == "0A" and int(fields[7]) == uid:
            address, port = fields[1].split(":")
            if len(address) == 8:
                host = socket.inet_ntop(socket.AF_INET, bytes.fromhex(address)[::-1])
            else:
                host = "::1"
            ports.add((host, int(port, 16)))
found = {}
context = zmq.Context()
for host, port in sorted(ports):
    subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.subscribe(b"")
    for one in (subscriber, dealer):
        one.linger = 0
        one.ipv6 = ":" in host
        one.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    dealer.send(b"hello")
    end, received = time.monotonic() + 3, []
    while time.monotonic() < end:
        for one in (subscriber, dealer):
            if one.poll(50):
                received.append(repr(one.recv_multipart()))
    with socket.create_connection((host, port), 5) as plain:
        plain.settimeout(3)
        try:
            plain.sendall(b"GET / HTTP/1.1\\r\\nHost: node\\r\\n\\r\\n")
            first = plain.recv(100)
        except OSError as error:
            first = b""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    encrypted, is_tls = b"", False
    try:
        with trusting.wrap_socket(socket.create_connection((host, port), 5)) as secure:
            # With TLS 1.3 a server refuses a client without a certificate only after the handshake.
            is_tls = True
            secure.settimeout(3)
            secure.sendall(b"GET / HTTP/1.1\\r\\nHost: node\\r\\n\\r\\n")
            encrypted = secure.recv(100)
    except OSError:
        pass
    found[f"{host} {port}"] = {
        "zmq": received, "plain": first.decode("latin1"), "tls": is_tls, "encrypted": encrypted.decode("latin1")
    }
try:
    opened = os.listdir(folder)
except OSError as error:
    opened = error.strerror
print(json.dumps({"ports": found, "folder": opened}))
"""


def test_other_users_of_the_node_read_nothing(cluster: Cluster, command: Path) -> None:
    """Kernels have no ports, the notebook's port requires a certificate, and sockets are in a private folder."""
    start(cluster, cluster.ada)
    [pid] = notebooks("ada")
    environment = environment_of(pid)
    folder = Path(environment["JUPYTER_RUNTIME_DIR"])
    own = environment["JUPYTERHUB_SERVICE_URL"].split("/")[2]
    with open_kernel(f"127.0.0.1:{cluster.hub.port}", cluster.ada, NB) as kernel:
        assert "None\n" in kernel.run("import os; print(os.environ.get('NOTHING'))")
        sockets = sorted(path.name.rpartition("-")[2] for path in folder.glob("kernel-*-ipc-*"))
        assert sockets == ["1", "2", "3", "4", "5"]
        running = kernel.begin("import time\nfor _ in range(400): print('a-secret', flush=True); time.sleep(0.1)")
        looked = subprocess.run(
            [command.with_name("python"), "-c", STRANGER, str(USERS["ada"]), str(folder)],
            check=True, capture_output=True, text=True, timeout=90, user=USERS["ben"], group=USERS["ben"],
            extra_groups=[], cwd="/",
        )  # fmt: skip
        assert any("a-secret" in part for part in kernel.messages(running))
        # Output of forked processes reaches the notebook as before.
        assert "from a child" in kernel.run(
            "import os, sys\nif not os.fork():\n    print('from a child', flush=True)"
            "\n    sys.stdout.flush(); os._exit(0)\nos.wait(); time.sleep(1)"
        )
    seen = json.loads(looked.stdout)
    assert seen["folder"] == "Permission denied"
    assert seen["ports"].pop(own.replace(":", " ")) == {"zmq": [], "plain": "", "tls": True, "encrypted": ""}
    # ipykernel takes output of forked processes on this port, with a random key, and sends nothing there.
    assert len(seen["ports"]) <= 1
    for port, answer in seen["ports"].items():
        assert port.startswith("127.0.0.1 ")
        assert (answer["zmq"], answer["tls"], answer["encrypted"]) == ([], False, "")
        assert "HTTP" not in answer["plain"]
        assert len(answer["plain"]) <= ZMTP_GREETING
    # Not by Slurm, which kills after KillWait what a busy machine has not ended by then.
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not folder.exists(), "the folder with the sockets is removed", 30)


def test_waiting_user_is_informed_and_cancels(cluster: Cluster) -> None:
    start(cluster, cluster.ada)
    cluster.ben.start(NB, "gpu")
    job = wait_for(lambda: cluster.job_of("ben"), "ben's job is submitted", 60)
    wait_for(lambda: leases(cluster.ben)[0]["slurm_job"] == job, "the broker knows it", 30)
    with cluster.ben.hub.stream("GET", f"/users/ben/servers/{NB}/progress") as progress:
        message = next(line for line in progress.iter_lines() if "Waiting for a GPU" in line)
    assert "position 1" in message, message
    cluster.ben.stop(NB)
    wait_for(lambda: cluster.job_of("ben") is None, "ben's job is cancelled", 30)
    wait_for(lambda: not leases(cluster.ben), "ben's lease is over", 30)
    assert answers(cluster, cluster.ada)


def test_killed_hub_resumes_running_and_waiting_servers(cluster: Cluster) -> None:
    running = start(cluster, cluster.ada)
    cluster.ben.start(NB, "gpu")
    waiting = wait_for(lambda: cluster.job_of("ben"), "ben's job is submitted", 60)
    wait_for(lambda: leases(cluster.ben)[0]["slurm_job"] == waiting, "the broker knows it", 30)
    cluster.hub.end("hub", signal.SIGKILL)
    cluster.hub.begin("hub")
    cluster.hub.wait_ready()
    wait_for(lambda: cluster.ada.is_ready(NB), "ada's notebook is known again", 60)
    assert answers(cluster, cluster.ada)
    assert cluster.job_of("ada") == running
    # The broker has the hub start ben's server again, and it finds its job.
    wait_for(lambda: NB in (cluster.ben.servers() or {}), "ben's start continues", 120)
    assert cluster.job_of("ben") == waiting
    cluster.ada.stop(NB)
    wait_ready(cluster, cluster.ben)
    assert cluster.job_of("ben") == waiting
    assert answers(cluster, cluster.ben)


def test_notebook_that_starts_without_the_hub_is_found(cluster: Cluster) -> None:
    """The notebook's report waits for the hub, and its token is valid again."""
    blocking = cluster.site.submit("ada", "--gres=gpu:rtx5090:1")
    cluster.site.wait_for_state(blocking, "RUNNING")
    cluster.ben.start(NB, "gpu")
    job = wait_for(lambda: cluster.job_of("ben"), "ben's job is submitted", 60)
    wait_for(lambda: leases(cluster.ben)[0]["slurm_job"] == job, "the broker knows it", 30)
    cluster.hub.end("hub", signal.SIGKILL)
    cluster.site.ask("scancel", str(blocking))
    cluster.site.wait_for_state(job, "RUNNING")
    wait_for(lambda: "the hub does not answer yet" in read_log(cluster, "ben"), "the notebook waits", 60)
    cluster.hub.begin("hub")
    cluster.hub.wait_ready()
    wait_for(lambda: NB in (cluster.ben.servers() or {}), "ben's start continues", 120)
    wait_ready(cluster, cluster.ben)
    assert cluster.job_of("ben") == job
    assert answers(cluster, cluster.ben)


def test_server_is_lost_only_if_slurm_reports_it(cluster: Cluster) -> None:
    job = start(cluster, cluster.ada)
    wait_saved(cluster.site.ask, cluster.site.files.state, job)
    cluster.site.daemons.kill("slurmctld")
    cluster.hub.end("hub", signal.SIGKILL)
    cluster.hub.begin("hub")
    cluster.hub.wait_ready()
    wait_for(lambda: cluster.ada.is_ready(NB), "ada's notebook is known again", 60)
    assert answers(cluster, cluster.ada)
    cluster.site.daemons.start("slurmctld")
    wait_for(lambda: cluster.site.state(job) == "RUNNING", "slurmctld is back", 60)
    assert cluster.ada.is_ready(NB)
    cluster.site.ask("scancel", str(job), user="ada")
    wait_for(lambda: is_gone(cluster.ada), "the hub has removed the server", 60)


def test_job_that_ends_at_once_is_reported(cluster: Cluster) -> None:
    """A job can end before the broker sees it; the user is informed, and nothing is left."""
    folder = cluster.site.users["ada"].home / ".gpuhub"
    if folder.exists():
        shutil.rmtree(folder)
    folder.touch()
    try:
        cluster.ada.start(NB, "gpu")
        wait_for(lambda: is_gone(cluster.ada), "the start has failed", 60)
        cluster.wait_clear()
    finally:
        folder.unlink()
    log = cluster.hub.log("hub")
    assert "its Slurm job" in log or "The notebook ended while it started" in log, log
