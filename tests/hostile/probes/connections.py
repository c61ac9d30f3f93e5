"""Hold connections to hub or broker and misuse them; print what became of them.

Arguments: base (hub, broker), kind: "idle" (open and say nothing), "header" (one header without end), "headers" (many
headers), "body" (a body that comes a byte at a time); count: connections; seconds: how long they are kept.
"""

import json
import os
import resource
import selectors
import socket
import ssl
import sys
import time
from urllib.parse import urlsplit

wanted = json.load(sys.stdin)
is_hub = wanted["base"] == "hub"
url = urlsplit(os.environ["JUPYTERHUB_API_URL" if is_hub else "GPUHUB_BROKER_URL"])
tls = ssl.create_default_context(cafile=os.environ["JUPYTERHUB_SSL_CLIENT_CA" if is_hub else "GPUHUB_BROKER_CA"])
tls.load_cert_chain(os.environ["JUPYTERHUB_SSL_CERTFILE"], os.environ["JUPYTERHUB_SSL_KEYFILE"])
path = f"{url.path}/" if is_hub else f"{url.path}/health"
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
CHUNK = b"a" * 16384


def connect():
    plain = socket.create_connection((url.hostname, url.port), timeout=10)
    return tls.wrap_socket(plain, server_hostname=url.hostname)


def send_header(limit):
    """Send one header until the other side has had enough; return the bytes that it took."""
    sent = 0
    with connect() as wire:
        wire.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Long: ".encode())
        try:
            while sent < limit:
                if wanted["kind"] == "header":
                    wire.sendall(CHUNK)
                else:
                    wire.sendall(b"".join(b"x-%d-%d: a\r\n" % (sent, number) for number in range(1000)))
                sent += len(CHUNK)
            wire.settimeout(15)
            return {"sent": sent, "answer": wire.recv(100).decode(errors="replace")}
        except OSError as error:
            return {"sent": sent, "answer": type(error).__name__}


def hold(count, seconds):
    """Open as many connections as are given, without TLS and without a word, and watch which are closed."""
    held, refused, closed = [], 0, 0
    watch = selectors.DefaultSelector()
    for _ in range(count):
        try:
            wire = socket.create_connection((url.hostname, url.port), timeout=2)
        except OSError:
            refused += 1
            continue
        watch.register(wire, selectors.EVENT_READ)
        held.append(wire)
    end = time.monotonic() + seconds
    while held and time.monotonic() < end:
        for key, _ in watch.select(0.5):
            try:
                gone = key.fileobj.recv(1000) == b""
            except OSError:
                gone = True
            if gone:
                watch.unregister(key.fileobj)
                held.remove(key.fileobj)
                closed += 1
    return {"opened": count - refused, "refused": refused, "closed": closed}


def drip(seconds):
    """Send a body a byte at a time; return the seconds until the other side closes."""
    began = time.monotonic()
    with connect() as wire:
        wire.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n".encode())
        wire.settimeout(0.5)
        try:
            while time.monotonic() - began < seconds:
                wire.sendall(b"a")
                try:
                    if wire.recv(1000) == b"":
                        break
                except TimeoutError:
                    continue
        except OSError:
            pass
    return {"seconds": time.monotonic() - began}


match wanted["kind"]:
    case "header" | "headers":
        print(json.dumps(send_header(wanted["bytes"])))
    case "idle":
        print(json.dumps(hold(wanted["count"], wanted["seconds"])))
    case "body":
        print(json.dumps(drip(wanted["seconds"])))
