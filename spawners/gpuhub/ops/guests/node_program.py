#!/usr/bin/env python3
"""gpuhub-node: lends this machine's GPUs to a gpuhub over WireGuard, as long as its owner wants.

  gpuhub-node status               what it does now
  gpuhub-node pause | resume       lend nothing; jobs get SIGTERM and some time to write a checkpoint
  gpuhub-node hours 22:00-08:00    lend in these hours only; `hours always` for all
  gpuhub-node leave                undo everything: keys, service, account, containers, images

The head node sends this file to invited machines. It needs Python 3.9 and its standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

INTERFACE = "gpuhub"
FOLDER = Path("/etc/gpuhub-node")
RUN = Path("/run/gpuhub-node")
PROGRAM = Path("/usr/local/sbin/gpuhub-node")
UNIT = Path("/etc/systemd/system/gpuhub-node.service")
USER, SSH_PORT = "gpuhub-guest", 8022
CONFIG, WISHES, STATUS = FOLDER / "config.json", FOLDER / "wishes.json", RUN / "status.json"
#: WireGuard's headers over IPv6, and the limits of what is tried, bytes.
OVERHEAD, LEAST_MTU, MOST_MTU = 80, 1280, 1420
#: Interval between two reports to the head node, seconds.
PERIOD_S = 3.0
#: Time after which the first report counts as failed, seconds.
JOIN_S = 60.0
#: Without an answer of the head node, the name of its endpoint is resolved again after this time, seconds.
RESOLVE_S = 30.0
#: Without an answer of the head node, jobs get this time after a pause, seconds.
GRACE_S = 120
#: When the machine leaves, the head node gets this time for what jobs wrote, seconds.
RESULTS_S = 600
UNIT_TEXT = f"""[Unit]
Description=Lends GPUs to a gpuhub (gpuhub-node)
After=network-online.target docker.service
Wants=network-online.target

[Service]
ExecStart={PROGRAM} serve
Restart=always
RestartSec=5

[Install]
WantedBy=multi-user.target
"""
# Without local TCP forwarding, sshd refuses sockets as well; the key itself opens Docker's socket alone.
SSHD_TEXT = """ListenAddress {address}:{port}
HostKey {folder}/ssh_host_ed25519_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
AllowUsers {user}
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitTTY no
X11Forwarding no
AllowAgentForwarding no
AllowTcpForwarding local
AllowStreamLocalForwarding local
PermitListen none
PermitTunnel no
PrintMotd no
"""
# The head node reaches sshd here and nothing else; nothing of this machine, containers included, reaches its network.
FILTER_TEXT = f"""table inet gpuhub_node
delete table inet gpuhub_node
table inet gpuhub_node {{
	chain input {{
		type filter hook input priority filter - 5; policy accept;
		iifname "{INTERFACE}" ct state established,related accept
		iifname "{INTERFACE}" tcp dport {SSH_PORT} accept
		iifname "{INTERFACE}" counter drop
	}}
	chain forward {{
		type filter hook forward priority filter - 5; policy accept;
		iifname "{INTERFACE}" counter drop
		oifname "{INTERFACE}" counter drop
	}}
}}
"""


class Failure(Exception):
    """An expected failure, with a text for the owner."""


def run(*command: str, text: str | None = None, check: bool = True) -> str:
    """Run a command and return its output."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise Failure(f"{command[0]} is missing") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"{command[0]} did not end within 120 s") from None
    if check and done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Failure(f"{' '.join(command[:3])}: {lines[-1] if lines else 'failed'}")
    return done.stdout.strip()


def write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_private(file: Path, text: str, mode: int = 0o600) -> None:
    """Write a file that only root can read, in one step."""
    fresh = file.with_name(f".{file.name}.fresh")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as output:
        output.write(text)
    fresh.replace(file)


def read_json(file: Path, default: Any) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default


def ask(config: dict[str, Any], path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send the head node a request over the tunnel and return its answer."""
    url = f"http://{config['head']}:{config['port']}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return dict(json.loads(answer.read(65536) or b"{}"))
    except urllib.error.HTTPError as error:
        text = error.read(4096).decode("utf-8", "replace")
        raise Failure(f"the head node refuses: {text}") from None
    except (OSError, ValueError) as error:
        raise Failure(f"the head node does not answer: {error}") from None


# -- joining ----------------------------------------------------------------------------------------------------------


def check_machine() -> None:
    """Print what the machine has; fail where something is missing."""
    missing: list[str] = []

    def check(what: str, works: bool, remedy: str) -> None:
        write(f"  {'✓' if works else '✗'} {what}" + ("" if works else f": {remedy}"))
        if not works:
            missing.append(what)

    gpus = run("nvidia-smi", "-L", check=False) if shutil.which("nvidia-smi") else ""
    count = gpus.count("GPU ")
    check(f"NVIDIA's driver, {count} GPU{'s' * (count != 1)}", count > 0, "install NVIDIA's driver, and restart")
    runtimes = run("docker", "info", "--format", "{{json .Runtimes}}", check=False) if shutil.which("docker") else ""
    check("Docker", bool(runtimes), "install Docker Engine (docker.io), and start it")
    check(
        "NVIDIA's container toolkit",
        '"nvidia"' in runtimes,
        "install nvidia-container-toolkit, then: "
        "nvidia-ctk runtime configure --runtime=docker; systemctl reload docker",
    )
    if missing:
        raise Failure("nothing was changed. Repair the above, and run the same command again")


def find_mtu(endpoint: str) -> int:
    """Return the largest packet for the tunnel, from what the kernel learns of the path to the endpoint."""
    host, _, port = endpoint.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    is_six = family == socket.AF_INET6
    level, discover, path_mtu = (41, 23, 24) if is_six else (0, 10, 14)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(level, discover, 2)  # never fragment
        probe.connect(target)
        known = probe.getsockopt(level, path_mtu)
        for _ in range(6):
            with contextlib.suppress(OSError):
                # WireGuard drops what is not from it; a router that cannot pass it on says so.
                probe.send(bytes(known - (48 if is_six else 28)))
            time.sleep(0.3)
            known = probe.getsockopt(level, path_mtu)
    return max(LEAST_MTU, min(MOST_MTU, known - OVERHEAD))


def join(arguments: argparse.Namespace) -> None:
    """Join with the invitation's interface, which the invitation's command has made."""
    require_root()
    if FOLDER.exists():
        raise Failure(f"{FOLDER} exists: this machine is a guest already; `gpuhub-node leave` first")
    write(f"This machine becomes the guest {arguments.name}:")
    check_machine()
    config = vars(arguments).copy()
    config.pop("run")
    config["mtu"] = find_mtu(arguments.endpoint)
    write(f"  ✓ packets of {config['mtu']} bytes pass to {arguments.endpoint}")
    FOLDER.mkdir(mode=0o700)
    try:
        config["private_key"] = run("wg", "genkey")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", arguments.name, "-f", f"{FOLDER}/ssh_host_ed25519_key")
        host_key = " ".join((FOLDER / "ssh_host_ed25519_key.pub").read_text().split()[:2])
        body = {
            "public_key": run("wg", "pubkey", text=config["private_key"]),
            "host_key": host_key,
            "mtu": config["mtu"],
        }
        answer = ask(config, "/join", body)
        config.update({key: answer[key] for key in ("instance", "firewall_table", "grace_s")})
        write_private(FOLDER / "authorized_keys", answer["authorized_key"] + "\n", 0o600)
        write_private(CONFIG, json.dumps(config, indent=1))
        write_private(FOLDER / "private.key", config["private_key"])
        write_private(WISHES, json.dumps({"paused": False, "hours": None}))
        write_private(
            FOLDER / "sshd_config", SSHD_TEXT.format(address=config["address"], port=SSH_PORT, folder=FOLDER, user=USER)
        )
        add_account()
        start_service()
        wait_joined()
    except BaseException:
        undo()
        raise
    write(
        f"  ✓ {arguments.name} is lent from now on. Its owner decides: gpuhub-node pause, resume, hours, status, leave"
    )


def add_account() -> None:
    """Add the account that may use Docker's socket; sshd reads its keys as that account."""
    run(
        "useradd",
        "--system",
        "--no-create-home",
        "--home-dir",
        "/nonexistent",
        "--shell",
        "/usr/sbin/nologin",
        "--groups",
        "docker",
        USER,
    )
    # sshd refuses an account that is locked, which a system account without a password is; `*` opens nothing.
    run("usermod", "--password", "*", USER)
    shutil.chown(FOLDER, group=USER)
    FOLDER.chmod(0o710)
    shutil.chown(FOLDER / "authorized_keys", group=USER)
    (FOLDER / "authorized_keys").chmod(0o640)


def has_systemd() -> bool:
    return Path("/run/systemd/system").is_dir()


def start_service() -> None:
    if has_systemd():
        UNIT.write_text(UNIT_TEXT)
        run("systemctl", "daemon-reload")
        run("systemctl", "enable", "--now", UNIT.name)
        return
    write("  ! there is no systemd: start `gpuhub-node serve` at each boot yourself")
    subprocess.Popen(
        [sys.executable, str(PROGRAM), "serve"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_joined() -> None:
    end = time.monotonic() + JOIN_S
    while not read_json(STATUS, {}).get("is_heard"):
        if time.monotonic() > end:
            raise Failure(
                f"the head node did not answer under the new key within {JOIN_S:.0f} s: ask for another invitation"
            )
        time.sleep(0.2)


# -- the service ------------------------------------------------------------------------------------------------------


def ensure_tunnel(config: dict[str, Any]) -> None:
    """Make the interface, or change the invitation's to this machine's own key."""
    run("nft", "-f", "-", text=FILTER_TEXT)
    if not run("ip", "-oneline", "link", "show", "dev", INTERFACE, check=False):
        try:
            run("ip", "link", "add", INTERFACE, "type", "wireguard")
        except Failure:
            run("wireguard-go", INTERFACE)
    run(
        "wg",
        "set",
        INTERFACE,
        "private-key",
        str(FOLDER / "private.key"),
        "peer",
        config["head_key"],
        "endpoint",
        config["endpoint"],
        "allowed-ips",
        f"{config['head']}/32",
        "persistent-keepalive",
        "25",
    )
    run("ip", "address", "replace", f"{config['address']}/32", "dev", INTERFACE)
    run("ip", "link", "set", INTERFACE, "mtu", str(config["mtu"]), "up")
    run("ip", "route", "replace", f"{config['head']}/32", "dev", INTERFACE)


def renew_endpoint(config: dict[str, Any]) -> None:
    """Give WireGuard the endpoint's current address: it resolves a name only once, and that of a home may change."""
    host, _, port = config["endpoint"].rpartition(":")
    address = str(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0][4][0])
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    run("wg", "set", INTERFACE, "peer", config["head_key"], "endpoint", place)


def parse_hours(text: str) -> tuple[int, int] | None:
    """Return begin and end in minutes of the day; None for `always`."""
    if text == "always":
        return None
    match = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)", text)
    if not match:
        raise Failure(f"{text!r} are no hours: write such as 22:00-08:00, or always")
    first, second = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
    if first == second:
        raise Failure(f"{text}: begin and end are the same; write always, or pause")
    return first, second


def is_lent(wishes: dict[str, Any], minute: int) -> bool:
    """Return whether the owner lends the machine in this minute of the day."""
    if wishes.get("paused"):
        return False
    hours = parse_hours(wishes.get("hours") or "always")
    if hours is None:
        return True
    first, second = hours
    return first <= minute < second if first < second else minute >= first or minute < second


def list_containers(config: dict[str, Any], *filters: str, ended: bool = False) -> list[str]:
    """Return the ids of containers of the gpuhub that run here; with `ended`, also of those that have ended."""
    words = [
        word for one in (f"gpuhub.instance={config['instance']}", *filters) for word in ("--filter", f"label={one}")
    ]
    return run("docker", "ps", "--quiet", "--no-trunc", *(["--all"] if ended else []), *words).split()


def serve(_arguments: argparse.Namespace) -> None:
    """Keep the tunnel and sshd running, report, and end what runs while the machine is not lent."""
    require_root()
    config = read_json(CONFIG, None)
    if config is None:
        raise Failure("this machine is not a guest: run the command of an invitation")
    RUN.mkdir(mode=0o755, exist_ok=True)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    write_private(RUN / "pid", str(os.getpid()))
    ensure_tunnel(config)
    sshd: subprocess.Popen[bytes] | None = None
    unlent_since: float | None = None
    grace = int(config.get("grace_s", GRACE_S))
    renewed_at = time.monotonic()
    try:
        while True:
            if sshd is None or sshd.poll() is not None:
                sshd = subprocess.Popen(
                    [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-f", str(FOLDER / "sshd_config")],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            now = time.localtime()
            lent = is_lent(read_json(WISHES, {"paused": True}), now.tm_hour * 60 + now.tm_min)
            unlent_since = None if lent else unlent_since or time.monotonic()
            status: dict[str, Any] = {"is_lent": lent, "is_heard": False, "message": ""}
            try:
                answer = ask(config, "/state", {"available": lent})
                grace = min(int(answer["grace_s"]), 3600)
                status["is_heard"] = True
                renewed_at = time.monotonic()
            except (Failure, KeyError, ValueError, TypeError) as error:
                status["message"] = str(error)
                if time.monotonic() > renewed_at + RESOLVE_S:
                    renewed_at = time.monotonic()
                    with contextlib.suppress(Failure, OSError):
                        renew_endpoint(config)
            try:
                jobs = list_containers(config, "gpuhub.kind=worker")
                if jobs and unlent_since is not None and time.monotonic() > unlent_since + grace + 2 * PERIOD_S:
                    # Also where the head node does not answer, or does not want to.
                    run("docker", "stop", "--time", "2", *jobs, check=False)
                status["jobs"] = len(jobs)
                status["grace_s"] = grace
            except Failure as error:
                status["message"] = str(error)
            write_private(STATUS, json.dumps(status), 0o644)
            time.sleep(PERIOD_S)
    finally:
        if sshd is not None:
            sshd.terminate()


# -- the owner's commands ---------------------------------------------------------------------------------------------


def require_root() -> None:
    if os.geteuid():
        raise Failure("only root may do this: sudo gpuhub-node …")


def change_wishes(**changes: Any) -> None:
    require_root()
    if not CONFIG.exists():
        raise Failure("this machine is not a guest")
    write_private(WISHES, json.dumps({**read_json(WISHES, {}), **changes}))


def pause(_arguments: argparse.Namespace) -> None:
    change_wishes(paused=True)
    status = read_json(STATUS, {})
    write(
        f"Paused. {status.get('jobs', 0)} jobs run here; they end within {status.get('grace_s', GRACE_S)} s, and wait "
        "for other GPUs."
    )


def resume(_arguments: argparse.Namespace) -> None:
    change_wishes(paused=False)
    write("Resumed.")


def hours(arguments: argparse.Namespace) -> None:
    parse_hours(arguments.hours)
    change_wishes(hours=None if arguments.hours == "always" else arguments.hours)
    write(f"Lent {arguments.hours}.")


def show_status(_arguments: argparse.Namespace) -> None:
    wishes, status = read_json(WISHES, None), read_json(STATUS, {})
    if not CONFIG.exists() and not status:
        raise Failure("this machine is not a guest")
    wishes = wishes or {}
    write(f"lent now:   {'yes' if status.get('is_lent') else 'no'}")
    write(f"paused:     {'yes' if wishes.get('paused') else 'no'}")
    write(f"hours:      {wishes.get('hours') or 'always'}")
    write(f"jobs:       {status.get('jobs', 0)}")
    write(f"head node:  {'answers' if status.get('is_heard') else status.get('message') or 'not asked yet'}")


def leave(_arguments: argparse.Namespace) -> None:
    """End what runs, tell the head node, and undo everything; also where the head node does not answer."""
    require_root()
    config = read_json(CONFIG, None)
    if config is None:
        raise Failure("this machine is not a guest")
    change_wishes(paused=True)
    end = time.monotonic() + read_json(STATUS, {}).get("grace_s", GRACE_S) + RESULTS_S
    write("Jobs that run here get their time for a checkpoint, and the head node gets what they wrote …")
    try:
        # The head node removes them when it has what they wrote.
        while list_containers(config, "gpuhub.kind=worker", ended=True) and time.monotonic() < end:
            time.sleep(0.5)
    except Failure as error:
        write(f"  ! {error}\n    Containers, networks, volumes and images of {config['instance']} may remain here.")
    try:
        ask(config, "/leave", {})
    except Failure as error:
        write(f"  ! {error}\n    Its administrator removes this machine there: gpuhub node remove {config['name']}")
    undo()
    write("This machine is no guest any more. Driver, Docker and toolkit stay.")


def attempt(*command: str) -> str:
    """Run a command and return its output; a failure leaves the rest to be done."""
    try:
        return run(*command, check=False)
    except Failure as error:
        write(f"  ! {error}")
        return ""


def undo() -> None:
    """Remove everything that joining has made, as far as it is there."""
    config = read_json(CONFIG, {})
    if has_systemd() and UNIT.exists():
        attempt("systemctl", "disable", "--now", UNIT.name)
        UNIT.unlink()
        attempt("systemctl", "daemon-reload")
    elif (RUN / "pid").exists():
        stop_process(int((RUN / "pid").read_text()))
    if config.get("instance") and shutil.which("docker"):
        label = f"label=gpuhub.instance={config['instance']}"
        for kind, listing, removal in (
            ("container", ("ps", "-aq"), ("rm", "-fv")),
            ("network", ("network", "ls", "-q"), ("network", "rm")),
            ("volume", ("volume", "ls", "-q"), ("volume", "rm")),
        ):
            found = attempt("docker", *listing, "--filter", label).split()
            if found and attempt("docker", *removal, *found):
                write(f"  ✓ {len(found)} {kind}s removed")
        # The label is that of gpuhub's base image, which images of other names that are built on it have as well.
        choices = (("gpuhub/*",), ("--filter", "label=gpuhub.debian"))
        images = {image for words in choices for image in attempt("docker", "images", "-q", *words).split()}
        if images and attempt("docker", "rmi", "-f", *images):
            write(f"  ✓ {len(images)} images removed")
    for table in filter(None, ("gpuhub_node", config.get("firewall_table"))):
        attempt("nft", "delete", "table", "inet", table)
    attempt("ip", "link", "delete", INTERFACE)
    attempt("userdel", USER)
    for folder in (FOLDER, RUN):
        shutil.rmtree(folder, ignore_errors=True)
    if PROGRAM.exists():
        PROGRAM.unlink()
    write("  ✓ tunnel, keys, account and service removed")


def stop_process(pid: int) -> None:
    """End a service that systemd does not run, with its sshd."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"gpuhub-node" in command and b"serve" in command:
            os.kill(pid, 15)
            for _ in range(50):
                time.sleep(0.1)
                os.kill(pid, 0)
    except OSError:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="gpuhub-node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in (
        ("status", show_status),
        ("pause", pause),
        ("resume", resume),
        ("hours", hours),
        ("leave", leave),
        ("serve", serve),
        ("join", join),
    ):
        command = commands.add_parser(name)
        command.set_defaults(run=function)
        if name == "hours":
            command.add_argument("hours", metavar="22:00-08:00")
        if name == "join":
            for option in ("--name", "--head", "--head-key", "--endpoint", "--address"):
                command.add_argument(option, required=True)
            command.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    if arguments.command == "serve":
        # SIGTERM must end sshd as well.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        arguments.run(arguments)
    except Failure as error:
        sys.exit(f"gpuhub-node: {error}")


if __name__ == "__main__":
    main()
