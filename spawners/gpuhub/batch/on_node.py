"""Runs on a node, in a job of a user's: becomes their notebook, or a worker of their launch.

The text of this file is in the job's script, so it needs Python 3.8 and nothing else. What to do comes as JSON on the
standard input, where neither `ps` nor anybody's environment shows it.

A notebook's port is bound here, without listening, for as long as the notebook lives: the kernel gives it to nobody
else by chance. The hub is told of it once a process of this very user listens there, and not before. A hub that is away
is waited for: the notebook itself would give up after a minute, and lose its place.

A worker's number is its node's place in the job's list of nodes, which the script hands on as Slurm's own command tells
it: the broker counts the same way. A number of Slurm's, such as SLURM_NODEID, need not go by the same order.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LISTENS = "0A"
PERIOD_S = 0.1
#: Between two reports, at most: a hub that is being restarted is waited for as long as the notebook lives.
LONGEST_S = 20.0
#: The nodes of a job, a name a line, in the order of its list.
JOB_NODES = "GPUHUB_JOB_NODES"


def main() -> None:
    """Become what the standard input tells of."""
    told = json.loads(sys.stdin.read())
    node = os.environ.get("SLURMD_NODENAME", "")
    address = told["addresses"].get(node)
    if address is None:
        sys.exit(f"gpuhub: Slurm runs this on node {node!r}, which is not in cluster.toml")
    environment = dict(os.environ, **told["environment"])
    environment.update(find_place(told["names"][node], address, os.environ))
    if "first_worker" in told:
        environment.update(number_worker(told, node, os.environ.get(JOB_NODES, "").split()))
    else:
        prepare_notebook(told, address, environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        os.execvpe(told["command"][0], told["command"], environment)  # noqa: S606 - no shell is meant
    except OSError as error:
        sys.exit(f"gpuhub: {told['command'][0]} cannot be started on {node}: {error.strerror}")


def find_place(name: str, address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What `%gpu_launch` must know: the node, the network on which its user's other processes reach this one, which is
    the node's own address, and the job's GPUs there, named as the broker names them, by the numbers Slurm gives.
    """
    numbers = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    uuids = ",".join(f"SLURM-{name}-{number}" for number in expand(numbers))
    place = {"GPUHUB_NODE": name, "GPUHUB_GPU_UUIDS": uuids}
    # Launches know IPv4 alone; without a network one keeps to its own node, over the loopback.
    return place if ":" in address else {**place, "GPUHUB_NETWORK_SUBNET": f"{address}/32"}


def expand(numbers: str) -> list[int]:
    """`0,2-3` is 0, 2 and 3."""
    found: list[int] = []
    for part in filter(None, numbers.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def number_worker(told: dict[str, Any], node: str, nodes: list[str]) -> dict[str, str]:
    """Which worker this is, and for the one that leads the others of a detached job who they are."""
    if node not in nodes:
        sys.exit(f"gpuhub: node {node!r} is not one of the job's: {', '.join(nodes) or 'none is known'}")
    index = nodes.index(node)
    variables = {"GPU_LAUNCH_WORKER": str(told["first_worker"] + index)}
    if told["is_detached"]:
        workers = [
            {"index": at, "node": told["names"].get(name, name), "state": "running"} for at, name in enumerate(nodes)
        ]
        variables["GPU_LAUNCH_ROSTER"] = json.dumps(workers)
    return variables


def prepare_notebook(told: dict[str, Any], address: str, environment: dict[str, str]) -> None:
    """Hold a port for the notebook that this process becomes, and have it reported."""
    holder = hold_port(address)
    port = holder.getsockname()[1]
    environment.update(keep_certificates(told["certificates"]))
    host = f"[{address}]" if ":" in address else address
    environment["JUPYTERHUB_SERVICE_URL"] = f"{told['scheme']}://{host}:{port}{told['prefix']}"
    opener = build_opener(environment)
    wait_for_hub(opener, environment["JUPYTERHUB_API_URL"])
    notebook = os.getpid()
    child = os.fork()
    if child == 0:
        # A grandchild reports, so that no dead child of the notebook's is left to it.
        if os.fork() == 0:
            report(opener, told["report"], environment["JUPYTERHUB_API_TOKEN"], (address, port), notebook)
        os._exit(0)
    os.waitpid(child, 0)
    # Open for as long as the notebook lives: nothing closes what is not Python's any more.
    os.set_inheritable(holder.detach(), True)


def hold_port(address: str) -> socket.socket:
    """A socket that is bound to a free port of the address and does not listen: another of SO_REUSEADDR may."""
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def keep_certificates(certificates: dict[str, str] | None) -> dict[str, str]:
    """Keep key and certificates in this process's memory, where its user's programs find them as files for as long as
    it lives, and nothing is left to remove; the variables that name them.
    """
    variables = {}
    for variable, text in (certificates or {}).items():
        file = os.memfd_create(variable, 0)
        os.write(file, text.encode())
        variables[variable] = f"/proc/{os.getpid()}/fd/{file}"
    return variables


def build_opener(environment: dict[str, str]) -> urllib.request.OpenerDirector:
    """How the hub is asked: past all proxies, and with the notebook's certificate where it has one."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if "JUPYTERHUB_SSL_KEYFILE" in environment:
        context = ssl.create_default_context(cafile=environment["JUPYTERHUB_SSL_CLIENT_CA"])
        context.load_cert_chain(environment["JUPYTERHUB_SSL_CERTFILE"], environment["JUPYTERHUB_SSL_KEYFILE"])
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def wait_for_hub(opener: urllib.request.OpenerDirector, url: str) -> None:
    """Return when the hub answers, whatever it says."""
    pause = PERIOD_S
    while True:
        try:
            with opener.open(url, timeout=10):
                return
        except urllib.error.HTTPError:
            return
        except OSError as error:
            say(f"the hub does not answer yet: {error}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_S)


def report(opener: urllib.request.OpenerDirector, url: str, token: str, place: tuple[str, int], notebook: int) -> None:
    """Tell the hub the port of `place` once the notebook listens there; ends with the notebook."""
    address, port = place
    while is_alive(notebook) and not is_listening(address, port, os.getuid()):
        time.sleep(PERIOD_S)
    request = urllib.request.Request(url, json.dumps({"port": port}).encode(), method="POST")  # noqa: S310 - the hub's
    request.add_header("Authorization", "token " + token)
    request.add_header("Content-Type", "application/json")
    pause = PERIOD_S
    while is_alive(notebook):
        try:
            with opener.open(request, timeout=10):
                return
        except OSError as error:
            # A hub that was restarted knows this server's token again when its start goes on.
            say(f"the hub does not take the notebook's port yet: {error}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_S)


def say(text: str) -> None:
    """A line for the notebook's log."""
    sys.stderr.write(f"gpuhub: {text}\n")
    sys.stderr.flush()


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def is_listening(address: str, port: int, uid: int) -> bool:
    """Whether a process of that user listens at the address, by the kernel's own table."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    wanted = f"{b''.join(words).hex().upper()}:{port:04X}"
    with Path("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp").open() as table:
        for line in table:
            fields = line.split()
            if fields[1] == wanted and fields[3] == LISTENS and fields[7] == str(uid):
                return True
    return False


if __name__ == "__main__":
    main()
