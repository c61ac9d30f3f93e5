"""Measure the network between the nodes of a launch: `network.py SECONDS`, one rank on each node.

Every pair is measured in both directions, one after the other, between the addresses that ranks use.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist

_ECHOES, _FULL_ECHOES = 50, 5
_ECHO_TIMEOUT_S = 1.0
_BLOCK = bytes(1 << 20)
#: Headers of IPv4 and UDP, bytes.
_HEADERS = 28
#: Linux's numbers for "do not fragment" and for the path's MTU; the socket module lacks the names.
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_MTU = 10, 2, 14


def main(arguments: list[str]) -> None:
    """Measure all pairs; rank 0 writes the result."""
    seconds = float(arguments[0])
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    address = find_source_address(os.environ["MASTER_ADDR"])
    with closing(EchoServer(address)) as server:
        mine = describe_interface(address) | {
            "node": os.environ.get("GPUHUB_NODE", ""),
            "host": socket.gethostname(),
            "ports": server.ports,
        }
        nodes: list[dict[str, Any]] = [{}] * count
        dist.all_gather_object(nodes, mine)
        measured = []
        for first in range(count):
            for second in range(count):
                if rank == first != second:
                    measured.append(measure_path(mine, nodes[second], seconds))
                dist.barrier()
        paths: list[list[dict[str, Any]]] = [[]] * count
        dist.all_gather_object(paths, measured)
    if rank == 0:
        result = {"nodes": nodes, "paths": [path for of_rank in paths for path in of_rank]}
        (Path(__file__).parent / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def find_source_address(target: str) -> str:
    """Return the address that this container sends from towards a target; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])


def describe_interface(address: str) -> dict[str, Any]:
    """Return the interface with an address, and its MTU."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return {"address": address, "interface": name, "mtu": psutil.net_if_stats()[name].mtu}
    return {"address": address, "interface": "", "mtu": 0}


def find_gateway(address: str, table: str) -> str:
    """Return the gateway to an address by the text of /proc/net/route; empty for a direct neighbour or no route."""
    target = int.from_bytes(socket.inet_aton(address), "little")
    best, gateway = -1, ""
    for line in table.splitlines()[1:]:
        words = line.split()
        network, hop, mask = int(words[1], 16), int(words[2], 16), int(words[7], 16)
        if target & mask == network and mask.bit_count() > best:
            best, gateway = mask.bit_count(), socket.inet_ntoa(hop.to_bytes(4, "little")) if hop else ""
    return gateway


class EchoServer:
    """Sends datagrams back, and counts the bytes of connections, until it is closed."""

    def __init__(self, address: str) -> None:
        self._echo = open_datagram_socket(address)
        self._sink = socket.create_server((address, 0))
        self.ports = {"echo": self._echo.getsockname()[1], "sink": self._sink.getsockname()[1]}
        for work in (self._send_back, self._receive):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """Stop; the threads end with the process."""
        self._echo.close()
        self._sink.close()

    def _send_back(self) -> None:
        while True:
            try:
                data, sender = self._echo.recvfrom(1 << 16)
                self._echo.sendto(data, sender)
            except OSError:
                if self._echo.fileno() < 0:
                    return

    def _receive(self) -> None:
        while True:
            try:
                connection, _ = self._sink.accept()
            except OSError:
                return
            with connection:
                received, began = 0, time.perf_counter()
                while size := len(connection.recv(1 << 20)):
                    received += size
                took = time.perf_counter() - began
                connection.sendall(json.dumps({"bytes": received, "seconds": took}).encode())


def open_datagram_socket(address: str) -> socket.socket:
    """Return a UDP socket whose packets are never divided into fragments."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
    opened.bind((address, 0))
    opened.settimeout(None)
    return opened


def measure_path(source: dict[str, Any], target: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return round-trip time, bandwidth, MTU and gateway from this node to another."""
    with closing(open_datagram_socket(source["address"])) as probe:
        probe.connect((target["address"], target["ports"]["echo"]))
        probe.settimeout(_ECHO_TIMEOUT_S)
        trips = [trip for _ in range(_ECHOES) if (trip := send_echo(probe, 56)) is not None]
        full = [send_echo(probe, source["mtu"] - _HEADERS) for _ in range(_FULL_ECHOES)]
        mtu = probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    sent = measure_bandwidth(source["address"], (target["address"], target["ports"]["sink"]), seconds)
    return {
        "from": source["node"],
        "to": target["node"],
        "gateway": find_gateway(target["address"], Path("/proc/net/route").read_text()),
        "round_trip_ms": statistics.median(trips) * 1e3 if trips else None,
        "lost": _ECHOES - len(trips),
        "mtu": mtu,
        "full_packets_lost": full.count(None),
        "gbit_per_s": sent["bytes"] * 8 / sent["seconds"] / 1e9,
    }


def send_echo(probe: socket.socket, size: int) -> float | None:
    """Return the seconds until a datagram comes back; None for a lost one, and for one that is too large to send."""
    began = time.perf_counter()
    payload = os.urandom(8) + bytes(max(0, size - 8))
    try:
        probe.send(payload)
        while probe.recv(1 << 16) != payload:
            pass
    except OSError:
        return None
    return time.perf_counter() - began


def measure_bandwidth(address: str, target: tuple[str, int], seconds: float) -> dict[str, float]:
    """Send over one TCP connection for some seconds; return the receiver's count of bytes and seconds."""
    with socket.create_connection(target, timeout=30, source_address=(address, 0)) as connection:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            connection.sendall(_BLOCK)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    counted: dict[str, float] = json.loads(answer)
    return counted


if __name__ == "__main__":
    main(sys.argv[1:])
