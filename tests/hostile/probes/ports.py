"""Connect to TCP ports and send to UDP ports; print what answers.

Arguments: tcp and udp, lists of [address, port]. What refuses says so at once; what drops is given up after some seconds.
"""

import asyncio
import json
import socket
import sys

AT_ONCE = 50


async def is_open(gate, host, port):
    async with gate:
        try:
            async with asyncio.timeout(3):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True


async def scan(targets):
    gate = asyncio.Semaphore(AT_ONCE)
    opened = await asyncio.gather(*(is_open(gate, *target) for target in targets))
    return [target for target, ok in zip(targets, opened, strict=True) if ok]


def answers(host, port):
    """Return "refused" when the network says so, "answered" for an answer, else "silent"."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.settimeout(1)
        try:
            sender.connect((host, port))
            for _ in range(3):
                sender.send(b"\x08\x00\x00\x00\x00\x00\x01\x00")
            sender.recv(1500)
        except TimeoutError:
            return "silent"
        except OSError:
            return "refused"
        return "answered"


wanted = json.load(sys.stdin)
tcp = asyncio.run(scan(wanted.get("tcp", [])))
udp = {f"{host} {port}": answers(host, port) for host, port in wanted.get("udp", [])}
print(json.dumps({"tcp": tcp, "udp": udp}))
