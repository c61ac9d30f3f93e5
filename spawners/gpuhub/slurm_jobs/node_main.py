"""The program that runs on a node in a user's Slurm job: it runs their notebook, or becomes a worker or a courier.

The text of this file is in the job's script, so it needs only Python 3.8. Its instructions come as JSON on the standard
input, where neither `ps` nor an environment shows them. A courier needs its input and has no secret: its instructions
are the argument.

A notebook's port is bound here, without listening, while the notebook lives, so that the kernel assigns it to no other
program. The port is reported to the hub only once a process of the same user listens there. If the hub is away, the
program waits for it, because the notebook itself would give up after a minute and lose its place in the queue.

The node is shared with other users, who can connect to each port on it. The notebook therefore reaches its kernels over
Unix sockets, in a folder of the node that only its user can enter. This program waits for the notebook's end, and
forwards signals to it, so that the folder is removed. After SIGKILL the user's next notebook on the node removes it.

A worker's index is its node's position in the job's list of nodes, which the script passes on from `scontrol`; the
broker counts in the same way. Slurm's own indices, such as SLURM_NODEID, may have another order.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LISTEN_STATE = "0A"
PERIOD_S = 0.1
#: Maximum pause between two attempts to report the port, seconds; they continue while the notebook lives.
MAX_PAUSE_S = 20.0
#: Variable with the nodes of a job, one name per line, in the order of its list.
JOB_NODES = "GPUHUB_JOB_NODES"
#: Signals with which Slurm or a user ends or informs a notebook.
FORWARDED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
#: Maximum length of a Unix socket's path, bytes.
MAX_SOCKET_PATH = 107
#: Length of what a kernel adds to the socket's folder.
SOCKET_NAME_LENGTH = len(f"/kernel-{'0' * 36}-ipc-5")
#: Age from which an unlocked folder belongs to a notebook that was killed, seconds; a new one is locked at once.
LEFT_FOLDER_S = 60.0
#: JupyterLab's debugger would open a port on which every user of the node could run code in the kernel.
LAB_SETTINGS = {"disabledExtensions": {"@jupyterlab/debugger-extension": True}}

#: Variables of Apptainer that would replace a user's own prompt in terminals.
APPTAINER_PROMPT = ("PROMPT_COMMAND", "PS1")


def main() -> None:
    """Become the program that the instructions name."""
    instructions = json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read())
    node = os.environ.get("SLURMD_NODENAME", "")
    address = instructions["addresses"].get(node)
    if address is None:
        sys.exit(f"gpuhub: Slurm runs this on node {node!r}, which is not in cluster.toml")
    environment = dict(os.environ, **instructions["environment"])
    for name in APPTAINER_PROMPT:
        environment.pop(name, None)
    environment.update(build_node_environment(instructions["names"][node], address, os.environ))
    command = instructions["command"]
    try:
        if "listen" in instructions:
            run_notebook(instructions, instructions["listen"][node], environment)
        if "first_worker" in instructions:
            environment.update(build_worker_environment(instructions, node, os.environ.get(JOB_NODES, "").split()))
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
        os.execvpe(command[0], command, environment)  # noqa: S606 - no shell is meant
    except OSError as error:
        sys.exit(f"gpuhub: {command[0]} cannot be started on {node}: {error.strerror}")


def build_node_environment(name: str, address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Build the variables that `%gpu_launch` needs: the node, its network and the job's GPUs.

    The network, on which the user's other processes reach this one, is the node's own address. The GPUs have the
    broker's names, made from Slurm's numbers.
    """
    numbers = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    uuids = ",".join(f"SLURM-{name}-{number}" for number in expand_numbers(numbers))
    place = {"GPUHUB_NODE": name, "GPUHUB_GPU_UUIDS": uuids}
    # Launches support only IPv4; without a network a launch uses the loopback of its own node.
    return place if ":" in address else {**place, "GPUHUB_NETWORK_SUBNET": f"{address}/32"}


def expand_numbers(numbers: str) -> list[int]:
    """Expand numbers such as `0,2-3` to 0, 2 and 3."""
    result: list[int] = []
    for part in filter(None, numbers.split(",")):
        first, _, last = part.partition("-")
        result += range(int(first), int(last or first) + 1)
    return result


def build_worker_environment(instructions: dict[str, Any], node: str, nodes: list[str]) -> dict[str, str]:
    """Build the variables with the worker's index and, in a detached job, the list of its workers."""
    if node not in nodes:
        sys.exit(f"gpuhub: node {node!r} is not one of the job's: {', '.join(nodes) or 'none is known'}")
    index = nodes.index(node)
    variables = {"GPU_LAUNCH_WORKER": str(instructions["first_worker"] + index)}
    if instructions["is_detached"]:
        workers = [
            {"index": position, "node": instructions["names"].get(name, name), "state": "running"}
            for position, name in enumerate(nodes)
        ]
        variables["GPU_LAUNCH_ROSTER"] = json.dumps(workers)
    return variables


def run_notebook(instructions: dict[str, Any], address: str, environment: dict[str, str]) -> None:
    """Run the notebook on a port of the address, report the port, and end as the notebook ends.

    Raises:
        OSError: The notebook cannot be started.
    """
    holder = reserve_port(address)
    port = holder.getsockname()[1]
    environment.update(store_certificates(instructions["certificates"]))
    host = f"[{address}]" if ":" in address else address
    environment["JUPYTERHUB_SERVICE_URL"] = f"{instructions['scheme']}://{host}:{port}{instructions['prefix']}"
    opener = build_opener(environment)
    wait_for_hub(opener, environment["JUPYTERHUB_API_URL"])
    with forward_signals() as notebooks, create_runtime_folder() as folder:
        environment["JUPYTER_RUNTIME_DIR"] = str(folder)
        settings = folder / "config" / "labconfig" / "page_config.json"
        settings.parent.mkdir(parents=True)
        settings.write_text(json.dumps(LAB_SETTINGS))
        others = environment.get("JUPYTER_CONFIG_PATH")
        environment["JUPYTER_CONFIG_PATH"] = f"{folder}/config" + (f":{others}" if others else "")
        notebook = subprocess.Popen(instructions["command"], env=environment, stdin=subprocess.DEVNULL)
        notebooks.append(notebook)
        arguments = (opener, instructions["report"], environment["JUPYTERHUB_API_TOKEN"], (address, port), notebook)
        threading.Thread(target=report_port, args=arguments, daemon=True).start()
        status = notebook.wait()
    if status < 0:
        # Slurm reports the signal, as it would without this process.
        os.kill(os.getpid(), -status)
    sys.exit(status)


@contextlib.contextmanager
def forward_signals() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Forward Slurm's signals to the processes in the list; without any, a signal ends this process in order."""
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: object) -> None:
        if not processes:
            sys.exit(128 + number)
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED_SIGNALS}
    try:
        yield processes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def create_runtime_folder() -> Iterator[Path]:
    """Create a folder on this node that only the user can enter, and remove it afterwards.

    It is locked, which also keeps systemd-tmpfiles from removing it.
    """
    prefix = f"gpuhub-{os.getuid()}-"
    for parent in (tempfile.gettempdir(), "/tmp", "/dev/shm"):  # noqa: S108 - mkdtemp makes it private
        if len(os.fsencode(f"{parent}/{prefix}")) + 8 + SOCKET_NAME_LENGTH <= MAX_SOCKET_PATH:
            break
    remove_left_folders(parent, prefix)
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left_folders(parent: str, prefix: str) -> None:
    """Remove the user's folders of notebooks that were killed: no process holds their lock."""
    for folder in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(lock)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > LEFT_FOLDER_S:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def reserve_port(address: str) -> socket.socket:
    """Bind a socket to a free port of the address without listening; another socket with SO_REUSEADDR may listen."""
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def store_certificates(certificates: dict[str, str] | None) -> dict[str, str]:
    """Store key and certificates in memory and return the variables that name their files.

    The user's programs can read them as files while this process lives, and nothing needs to be removed.
    """
    variables = {}
    for variable, text in (certificates or {}).items():
        file = os.memfd_create(variable, 0)
        os.write(file, text.encode())
        variables[variable] = f"/proc/{os.getpid()}/fd/{file}"
    return variables


def build_opener(environment: dict[str, str]) -> urllib.request.OpenerDirector:
    """Build the opener for requests to the hub, without proxies and with the notebook's certificate if it has one."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if "JUPYTERHUB_SSL_KEYFILE" in environment:
        context = ssl.create_default_context(cafile=environment["JUPYTERHUB_SSL_CLIENT_CA"])
        context.load_cert_chain(environment["JUPYTERHUB_SSL_CERTFILE"], environment["JUPYTERHUB_SSL_KEYFILE"])
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def wait_for_hub(opener: urllib.request.OpenerDirector, url: str) -> None:
    """Return when the hub gives any answer."""
    pause = PERIOD_S
    while True:
        try:
            with opener.open(url, timeout=10):
                return
        except urllib.error.HTTPError:
            return
        except OSError as error:
            log(f"the hub does not answer yet: {error}")
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def report_port(
    opener: urllib.request.OpenerDirector,
    url: str,
    token: str,
    address_and_port: tuple[str, int],
    notebook: subprocess.Popen[bytes],
) -> None:
    """Report the port to the hub once the notebook listens there; return early if the notebook has ended."""
    address, port = address_and_port
    while notebook.returncode is None and not is_listening(address, port, os.getuid()):
        time.sleep(PERIOD_S)
    request = urllib.request.Request(url, json.dumps({"port": port}).encode(), method="POST")  # noqa: S310 - the hub's
    request.add_header("Authorization", "token " + token)
    request.add_header("Content-Type", "application/json")
    pause = PERIOD_S
    while notebook.returncode is None:
        try:
            with opener.open(request, timeout=10):
                return
        except OSError as error:
            # A restarted hub accepts this server's token again once its start continues.
            log(f"the hub does not accept the notebook's port yet: {error}")
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)


def log(text: str) -> None:
    """Write a line to the notebook's log."""
    sys.stderr.write(f"gpuhub: {text}\n")
    sys.stderr.flush()


def is_listening(address: str, port: int, uid: int) -> bool:
    """Return whether a process of the user listens at the address, according to the kernel's table."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    local_address = f"{b''.join(words).hex().upper()}:{port:04X}"
    with Path("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp").open() as table:
        for line in table:
            fields = line.split()
            if fields[1] == local_address and fields[3] == LISTEN_STATE and fields[7] == str(uid):
                return True
    return False


if __name__ == "__main__":
    main()
