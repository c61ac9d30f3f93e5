"""An image that starts within a second: its server only answers, and its workers only wait.

The cases test everything around the notebook. JupyterLab in each container would make a case take minutes on two cores;
the acceptance tests use it.
"""

from __future__ import annotations

import io
import tarfile
from contextlib import closing

import docker
import jupyterhub

from gpuhub.common.paths import Paths
from gpuhub.docker.containers.container_spec import BASE_IMAGE as BASE
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetNode

IMAGE = "gpuhub/light:faults"

_SERVER = """\
#!/usr/bin/env python3
import http.server, os, ssl

class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = b'{"version": "light"}'
        self.send_response(200)
        version_file = os.path.expanduser("~/.reported-version")
        version = open(version_file).read() if os.path.exists(version_file) else "@VERSION@"
        self.send_header("X-JupyterHub-Version", version)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        return

server = http.server.ThreadingHTTPServer(("0.0.0.0", 8888), Answer)
if os.environ.get("JUPYTERHUB_SSL_KEYFILE"):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(os.environ["JUPYTERHUB_SSL_CERTFILE"], os.environ["JUPYTERHUB_SSL_KEYFILE"])
    context.load_verify_locations(os.environ["JUPYTERHUB_SSL_CLIENT_CA"])
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
server.serve_forever()
"""
_WORKER = """\
#!/bin/sh
trap 'exit 0' TERM
while :; do sleep 1; done
"""


def ensure_image(paths: Paths, node: ClosetNode) -> None:
    """Build the image on a node from the base image there."""
    with closing(docker.APIClient(base_url=node_paths(paths, node).docker_url, version="auto", timeout=60)) as client:
        container = client.create_container(BASE, command=["true"])
        try:
            client.put_archive(container["Id"], "/usr/local/bin", _archive())
            repository, tag = IMAGE.split(":")
            client.commit(container["Id"], repository=repository, tag=tag, changes=["CMD []"])
        finally:
            client.remove_container(container["Id"], force=True, v=True)


def _archive() -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, text in {
            "jupyterhub-singleuser": _SERVER.replace("@VERSION@", jupyterhub.__version__),
            "gpu-launch-worker": _WORKER,
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o755
            tar.addfile(entry, io.BytesIO(text.encode()))
    return output.getvalue()
