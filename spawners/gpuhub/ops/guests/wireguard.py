"""The head node's WireGuard interface for guests, and the packet filter around it.

Guests are not trusted. A guest reaches one port of the head node in the tunnel, that of the service for guests, and
neither another guest nor any machine behind the head node. The head node itself opens connections to the guests' sshd
only.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.files import replace_file
from gpuhub.common.paths import Paths
from gpuhub.config.machines.guests import SSH_PORT, GuestSettings
from gpuhub.ops.guests.registry import Guest

#: MTU of WireGuard over Ethernet, bytes. Routes to guests with a smaller one have their own.
MTU = 1420
_COMMAND_S = 20.0
_READY_S = 10.0
#: Connections that one guest may have to the service.
MAX_CONNECTIONS = 16


def run(*command: str, text: str | None = None) -> str:
    """Run a command and return its output.

    Raises:
        SetupError: It is missing or fails; the text has its last line.
    """
    try:
        return subprocess.run(
            command, input=text, check=True, capture_output=True, text=True, timeout=_COMMAND_S
        ).stdout.strip()
    except FileNotFoundError:
        raise SetupError(f"{command[0]} is missing: `apt-get install wireguard-tools nftables iproute2`") from None
    except subprocess.TimeoutExpired:
        raise SetupError(f"{command[0]} did not end within {_COMMAND_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines()
        raise SetupError(f"{' '.join(command[:3])}: {lines[-1] if lines else 'failed'}") from None


def make_key_pair() -> tuple[str, str]:
    """Return a new private key and its public key."""
    private = run("wg", "genkey")
    return private, run("wg", "pubkey", text=private)


def interface_name(instance: str) -> str:
    return f"{instance}-guests"


def table_name(instance: str) -> str:
    return f"gpuhub_{instance}_guests"


class HeadInterface:
    """The head node's interface, its peers and its packet filter."""

    def __init__(self, paths: Paths, settings: GuestSettings) -> None:
        self.name = interface_name(paths.instance)
        self._paths, self._settings = paths, settings
        self._program: subprocess.Popen[bytes] | None = None
        self._peers: dict[str, str] = {}

    @property
    def key_file(self) -> Path:
        return self._paths.secrets / "guests-wireguard.key"

    def read_public_key(self) -> str:
        """Return the head node's public key; the pair is made if it is missing."""
        # An earlier version left an empty file where wg was missing.
        if not self.key_file.exists() or not self.key_file.stat().st_size:
            key = run("wg", "genkey")
            self.key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.key_file, key)
        return run("wg", "pubkey", text=self.key_file.read_text(encoding="ascii"))

    def start(self) -> None:
        """Create the interface with its packet filter, which is there first, and no peers.

        Raises:
            SetupError: A program is missing, or fails.
        """
        self.read_public_key()
        run("nft", "-f", "-", text=format_filter(self._paths.instance, self._settings))
        if not self._exists():
            self._create()
        run("wg", "set", self.name, "listen-port", str(self._settings.port), "private-key", str(self.key_file))
        for key in run("wg", "show", self.name, "peers").split():
            run("wg", "set", self.name, "peer", key, "remove")
        prefix = self._settings.network.prefixlen
        run("ip", "address", "replace", f"{self._settings.head_address}/{prefix}", "dev", self.name)
        run("ip", "link", "set", self.name, "mtu", str(MTU), "up")

    def stop(self) -> None:
        """Remove the interface, and then the packet filter."""
        if self._program is not None:
            self._program.send_signal(signal.SIGTERM)
            self._program.wait(_COMMAND_S)
        elif self._exists():
            run("ip", "link", "delete", self.name)
        run("nft", "-f", "-", text=format_removal(self._paths.instance))

    def is_alive(self) -> bool:
        """Return whether the interface is there and, in user space, its program runs."""
        return self._exists() and (self._program is None or self._program.poll() is None)

    def set_peers(self, guests: Iterable[Guest]) -> None:
        """Let exactly these guests in, each with its own address alone."""
        wanted = {guest.public_key: guest for guest in guests}
        for key in set(self._peers) - set(wanted):
            run("wg", "set", self.name, "peer", key, "remove")
            del self._peers[key]
        for key, guest in wanted.items():
            if self._peers.get(key) != guest.address:
                run("wg", "set", self.name, "peer", key, "allowed-ips", f"{guest.address}/32")
                self._peers[key] = guest.address
            if guest.mtu:
                # Both directions: TCP takes the smaller segment of the two ends, and UDP is not used.
                run("ip", "route", "replace", f"{guest.address}/32", "dev", self.name, "mtu", "lock", str(guest.mtu))

    def _exists(self) -> bool:
        return Path("/sys/class/net", self.name).exists()

    def _create(self) -> None:
        try:
            run("ip", "link", "add", self.name, "type", "wireguard")
        except SetupError as error:
            if shutil.which("wireguard-go") is None:
                raise SetupError(
                    f"this kernel has no WireGuard ({error}): load its module, or `apt-get install wireguard-go`"
                ) from None
            self._program = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "wireguard-go", "-f", self.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            end = time.monotonic() + _READY_S
            while not Path(f"/var/run/wireguard/{self.name}.sock").exists() or not self._exists():
                if self._program.poll() is not None or time.monotonic() > end:
                    raise SetupError("wireguard-go did not start: is /dev/net/tun there?") from None
                time.sleep(0.05)


def format_filter(instance: str, settings: GuestSettings) -> str:
    """Return the script for `nft -f` that replaces the table of the interface."""
    interface, table = interface_name(instance), table_name(instance)
    chains = {
        "input": (
            "type filter hook input priority filter - 5; policy accept;",
            f'iifname "{interface}" jump from_guests',
            # Somebody with the same addresses elsewhere, or a route that is missing for a moment.
            f'ip saddr {settings.subnet} iifname != {{ "{interface}", "lo" }} counter drop',
        ),
        "from_guests": (
            "ct state established,related accept",
            f"ip daddr {settings.head_address} tcp dport {settings.service_port} ct state new "
            f"add @connections {{ ip saddr ct count over {MAX_CONNECTIONS} }} counter drop",
            f"ip daddr {settings.head_address} tcp dport {settings.service_port} accept",
            "counter drop",
        ),
        "forward": (
            "type filter hook forward priority filter - 5; policy accept;",
            f'iifname "{interface}" counter drop',
            f'oifname "{interface}" counter drop',
        ),
        "output": (
            "type filter hook output priority filter - 5; policy accept;",
            f'oifname "{interface}" jump to_guests',
        ),
        "to_guests": (
            "ct state established,related accept",
            f"tcp dport {SSH_PORT} accept",
            "counter reject",
        ),
    }
    body = "\n".join(
        "\tchain {} {{\n{}\n\t}}".format(name, "\n".join(f"\t\t{rule}" for rule in rules))
        for name, rules in sorted(chains.items(), key=lambda chain: "hook" in chain[1][0])
    )
    counted = "\tset connections {\n\t\ttype ipv4_addr\n\t\tflags dynamic\n\t}\n"
    return f"{format_removal(instance)}table inet {table} {{\n{counted}{body}\n}}\n"


def format_removal(instance: str) -> str:
    """Return the script that removes the table if it exists."""
    table = table_name(instance)
    return f"table inet {table}\ndelete table inet {table}\n"
