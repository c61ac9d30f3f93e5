"""Instances from a laptop, and OpenSSH's own client in a notebook and in a job, on the real closet."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.acceptance.process_output import ProcessOutput
from tests.support.hub.browser import Product
from tests.support.hub.installed_laptop import Laptop, install_laptop
from tests.support.hub.kernel_client import open_kernel
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

SERVER = """exec python -c 'import socket
with socket.create_server(("127.0.0.1", 9123)) as listening:
    print("listening", flush=True)
    listening.accept()[0].sendall(b"served in the container")'"""
#: What docs/rights.md promises to end what a removed user has, seconds.
LEAVE_S = 60.0
COUNT = "import os, time\nwhile not os.path.exists('enough'):\n    time.sleep(0.2)\n"


@pytest.fixture(scope="module")
def ada(product: Product) -> Iterator[Client]:
    """ada, with a token of her own."""
    client = log_in(product.address, "ada", product.password)
    yield client
    for server in client.servers() or ():
        client.stop(server)
    wait_for(lambda: not any(gpu["holder"] for gpu in client.gpus()), "all GPUs are free", 60)
    client.close()


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, product: Product, ada: Client) -> Laptop:
    """gpu-launch from the hub, logged in, with the settings for ssh in a ~/.ssh/config that has other hosts."""
    installed = install_laptop(tmp_path_factory.mktemp("ssh-laptop"), product)
    installed.run("login", product.address, "--token-file", "-", stdin=ada.token)
    own = installed.home / ".ssh" / "config"
    own.parent.mkdir(mode=0o700)
    own.write_text("Host elsewhere\n  User me\n")
    installed.run("ssh-config")
    assert own.read_text().endswith("Host elsewhere\n  User me\n")
    return installed


@pytest.fixture(scope="module")
def run(laptop: Laptop) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program of the laptop as its user would, who types `ssh gpuhub-main`."""

    def start(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        # OpenSSH finds its settings by the account's home, which is not HOME.
        words = (words[0], "-F", str(laptop.home / ".ssh/config"), *words[1:]) if words[0] != "rsync" else words
        return subprocess.run(
            words, cwd=laptop.work, env=laptop.environ(), input=stdin, capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip

    return start


@pytest.fixture(scope="module")
def notebook(product: Product, laptop: Laptop) -> Path:
    """Ada's instance `main` with a GPU, started from the laptop; return her home."""
    shown = laptop.run("instance", "start", "--model", "rtx5070", "--name", "main")
    assert "Instance main is ready on rig2 with RTX 5070" in shown, shown
    # Editors offer the hosts that are listed.
    assert "gpuhub-main" in (laptop.home / ".config/gpu-launch/ssh/gpuhub/config").read_text()
    return product.paths.state / "homes" / "ada"


def test_ssh_lands_in_the_notebook(run: Callable[..., subprocess.CompletedProcess[str]], notebook: Path) -> None:
    """It has the notebook's user, GPU, variables and Python, and the command's streams and exit status."""
    shown = run(
        "ssh", "gpuhub-main", "id -un; pwd; nvidia-smi -L; python -c 'import torch, sys; print(sys.prefix)'; exit 7"
    )
    assert (shown.returncode, shown.stderr) == (7, "")
    user, home, gpu, prefix = shown.stdout.splitlines()
    assert (user, home, prefix) == ("ada", "/home/ada", "/opt/gpuhub")
    assert "RTX 5070" in gpu
    terminal = run("ssh", "-tt", "gpuhub-main", stdin="tty; which python; echo job of $JUPYTERHUB_USER; exit\n")
    for text in ("/dev/pts/", "/opt/gpuhub/bin/python", "job of ada"):
        assert text in terminal.stdout, terminal


def test_session_is_confined_like_the_container(
    run: Callable[..., subprocess.CompletedProcess[str]], notebook: Path
) -> None:
    """sshd adds no capability and no listening port, and the image has no host keys, which all users would share."""
    assert "ssh_host" not in run("ssh", "gpuhub-main", "ls /etc/ssh").stdout
    shown = run("ssh", "gpuhub-main", "cat /proc/self/status; echo ===; cat /proc/net/tcp /proc/net/tcp6").stdout
    status, ports = shown.split("===")
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {values[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (values["NoNewPrivs"], values["Seccomp"]) == ("1", "2")
    listening = {line.split()[1].rpartition(":")[2] for line in ports.splitlines() if " 0A " in line}
    assert f"{22:04X}" not in listening


def test_files_and_ports(
    laptop: Laptop, run: Callable[..., subprocess.CompletedProcess[str]], notebook: Path, tmp_path: Path
) -> None:
    """scp, sftp, rsync and -L do what they do with any other host."""
    data = os.urandom(5_000_000)
    (laptop.work / "data.bin").write_bytes(data)
    assert run("scp", "data.bin", "gpuhub-main:copied.bin").returncode == 0
    assert (notebook / "copied.bin").read_bytes() == data
    assert run("sftp", "-b", "-", "gpuhub-main", stdin="get copied.bin back.bin\n").returncode == 0
    assert (laptop.work / "back.bin").read_bytes() == data
    (laptop.work / "code").mkdir()
    (laptop.work / "code/train.py").write_text("print(1)\n")
    sent = run("rsync", "-a", "-e", f"ssh -F {laptop.home / '.ssh/config'}", "code", "gpuhub-main:")
    assert (sent.returncode, (notebook / "code/train.py").read_text()) == (0, "print(1)\n")
    local = tmp_path / "forwarded"
    with subprocess.Popen(
        ["ssh", "-F", laptop.home / ".ssh/config", "-L", f"{local}:127.0.0.1:9123", "gpuhub-main", SERVER],
        env=laptop.environ(),
        stdout=subprocess.PIPE,
    ) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"listening\n"
            with socket.socket(socket.AF_UNIX) as forwarded:
                forwarded.connect(str(local))
                assert forwarded.recv(100) == b"served in the container"
        finally:
            client.terminate()


def test_ssh_lands_in_a_jobs_worker(
    laptop: Laptop, run: Callable[..., subprocess.CompletedProcess[str]], product: Product
) -> None:
    """A running job is a host as well, each of its workers by number, and files go there."""
    laptop.write("count.py", COUNT)
    started = json.loads(laptop.run("run", "--detach", "--json", "--nnodes", "2", "--name", "tally", "count.py"))
    job = started.get("run_id") or started["job"]["run_id"]
    wait_for(lambda: json.loads(laptop.run("ps", "--json"))[0]["state"] == "running", "the job runs", 120)
    nodes = [
        run("ssh", host, "echo $GPUHUB_NODE; nvidia-smi -L | wc -l") for host in ("gpuhub-tally", f"gpuhub-{job}.1")
    ]
    assert [one.returncode for one in nodes] == [0, 0], nodes
    first, second = (one.stdout.split() for one in nodes)
    assert (first[1], second[1], first[0] != second[0]) == ("1", "1", True)
    failed = run("ssh", "gpuhub-tally", "cat >&2; exit 9", stdin="typed")
    assert (failed.returncode, failed.stderr) == (9, "typed")
    laptop.write("enough", "")
    folder = run("ssh", "gpuhub-tally", "ls -d gpu-launch/tally-*").stdout.split()[-1]
    assert run("scp", "enough", f"gpuhub-tally:{folder}/").returncode == 0
    laptop.run("attach", job)


def test_revoked_token_loses_its_connection(laptop: Laptop, notebook: Path, product: Product, ada: Client) -> None:
    """The server asks the hub again and again, so that a lost laptop does not keep what it has open."""
    made = ada.ask(ada.hub, "POST", "/users/ada/tokens", {"expires_in": 3600})[1]
    environ = laptop.environ() | {"GPUHUB_URL": product.address, "GPUHUB_TOKEN": made["token"]}
    command = ["ssh", "-F", str(laptop.home / ".ssh/config"), "gpuhub-main", "echo on; cat"]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"on\n"
        assert ada.ask(ada.hub, "DELETE", f"/users/ada/tokens/{made['id']}")[0] == 204
        assert client.wait(120) == 255


def test_removed_user_loses_all_connections(product: Product, laptop: Laptop, ada: Client, tmp_path: Path) -> None:
    """Ben is taken out of cluster.toml: within a minute he is out of his notebook and his job, and gets in no more."""
    own = replace(laptop, home=tmp_path / "home", work=tmp_path / "work")
    for folder in (own.home / ".ssh", own.work):
        folder.mkdir(parents=True)
    before = product.paths.closet_cluster_file.read_text(encoding="utf-8")
    with closing(log_in(product.address, "ben", product.password)) as ben:
        own.run("login", product.address, "--token-file", "-", stdin=ben.token)
    own.run("ssh-config")
    own.run("instance", "start", "--profile", "cpu", "--name", "main")
    own.write("count.py", COUNT)
    own.run("run", "--detach", "--name", "tally", "count.py")
    wait_for(lambda: json.loads(own.run("ps", "--json"))[0]["state"] == "running", "the job runs", 120)
    commands = [
        ["ssh", "-F", str(own.home / ".ssh/config"), host, "echo on; cat"] for host in ("gpuhub-main", "gpuhub-tally")
    ]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(
                subprocess.Popen(command, env=own.environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for command in commands
        ]
        assert [client.stdout.readline() for client in clients if client.stdout] == [b"on\n", b"on\n"]
        product.restart(before.replace('"ada", "ben"', '"ada"'))
        began = time.monotonic()
        try:
            assert [client.wait(LEAVE_S - (time.monotonic() - began)) for client in clients] == [255, 255]
            for command in commands:
                again = subprocess.run(
                    command, env=own.environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
                )
                assert (again.returncode, again.stdout) == (255, "")
                assert "Log in again with a new token: gpu-launch login" in again.stderr
            holders = {"ada", None}
            wait_for(
                lambda: {(gpu["holder"] or {}).get("owner") for gpu in ada.gpus()} <= holders,
                "ben's GPU is free",
                LEAVE_S,
            )
        finally:
            product.restart(before)


def test_nothing_of_that_name(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The error says what would work."""
    missing = run("ssh", "gpuhub-nothing", "id")
    assert missing.returncode == 255
    assert "You have no running instance or job nothing." in missing.stderr


def test_instances_wait_and_end_without_a_browser(laptop: Laptop, notebook: Path, ada: Client) -> None:
    """A second one waits in the queue; Ctrl-C leaves it there; list, ssh, extend, stop and rm do what they say."""
    with laptop.start("instance", "start", "--profile", "rtx5070", "--name", "second") as process:
        output = ProcessOutput(process)
        output.wait("waiting for GPUs: position 1")
        process.send_signal(signal.SIGINT)
        output.wait("Instance second continues without this command")
        output.rest()
    assert process.returncode == 130
    listed = {found["name"]: found for found in json.loads(laptop.run("instance", "list", "--json"))}
    assert (listed["second"]["state"], listed["second"]["position"]) == ("waiting", 1)
    assert (listed["main"]["state"], listed["main"]["gpus"]) == ("ready", ["RTX 5070"])
    assert "second" in laptop.run("instance", "list")
    assert "in rig2" in laptop.run("instance", "ssh", "main", "--", "echo in $GPUHUB_NODE; exit 5", code=5)
    refused = laptop.run("instance", "start", "--profile", "huge", "--name", "third", code=2)
    assert "There is no profile huge for you." in refused
    assert "cpu (no GPU)" in refused
    assert len(laptop.run("instance", "start", "--profile", "cpu", "--name", "main", code=2).splitlines()) == 2
    assert "Instance main has no time limit." in laptop.run("instance", "extend", "main", "--time-limit", "1h", code=2)
    # The one that waits gets the GPU of the one that is stopped, and the same command waits for it again.
    laptop.run("instance", "rm", "main")
    assert "Instance second is ready on rig2" in laptop.run("instance", "start", "--name", "second")
    laptop.run("instance", "rm", "second")
    wait_for(lambda: not any(gpu["holder"] for gpu in ada.gpus()), "the GPU is free", 60)
    listed = {found["name"] for found in json.loads(laptop.run("instance", "list", "--json"))}
    assert not listed & {"main", "second"}


def test_kernel_with_the_hubs_address_and_a_token(product: Product, laptop: Laptop, ada: Client) -> None:
    """What VS Code's Jupyter extension asks for: the kernels that there are, a new one, and its WebSocket."""
    laptop.run("instance", "start", "--profile", "cpu", "--name", "code")
    url = f"{product.address}/user/ada/code/api/kernelspecs"
    specs = httpx.get(url, headers={"Authorization": f"token {ada.token}"}, trust_env=False, timeout=30)
    assert specs.json()["default"] == "python3"
    with open_kernel(product.address.removeprefix("http://"), ada, "code") as kernel:
        assert kernel.run("print(6 * 7)") == "42\n"
