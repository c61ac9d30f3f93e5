"""A stand-in for Hugging Face's hub with one model: the requests of `huggingface_hub` 2.4 and olah 0.5 for a download."""

from __future__ import annotations

import hashlib
import http.server
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.closet import internet

PORT = 8098
NETLOC = f"{internet.ADDRESS}:{PORT}"
MODEL = "tiny/model"
FILES = {"config.json": b'{"model_type": "tiny"}', "model.safetensors": bytes(range(256)) * 4096}
_COMMIT = "1" * 40


class _Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    #: Bytes of each file that were sent.
    sent: dict[str, int]

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        api, file = path.removeprefix(f"/api/models/{MODEL}"), path.removeprefix(f"/{MODEL}/resolve/").partition("/")[2]
        if api != path:
            self._send_json(_list_files(FILES) if api.startswith("/tree/") else _describe_model())
        elif file in FILES:
            self._send_file(file)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        assert f"/api/models/{MODEL}/paths-info/" in self.path
        self._send_json(_list_files(form["paths"]))

    def _send_file(self, name: str) -> None:
        content, status = FILES[name], HTTPStatus.OK
        headers = {"X-Repo-Commit": _COMMIT, "ETag": f'"{_hash(content)}"', "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[int(first) : int(last) + 1], HTTPStatus.PARTIAL_CONTENT
        if self.command == "GET":
            self.sent[name] = self.sent.get(name, 0) + len(content)
        self._send(status, content, **headers)

    def _send_json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _send(self, status: HTTPStatus, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _hash(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _list_files(names: Any) -> list[dict[str, Any]]:
    return [{"type": "file", "path": name, "size": len(FILES[name]), "oid": _hash(FILES[name])} for name in names]


def _describe_model() -> dict[str, Any]:
    siblings = [{"rfilename": name} for name in FILES]
    return {"id": MODEL, "sha": _COMMIT, "private": False, "tags": [], "siblings": siblings}


@contextmanager
def served_hub(closet: Any) -> Iterator[dict[str, int]]:
    """Serve the hub until the end of the block; yield the bytes of each file that it has sent."""
    sent: dict[str, int] = {}
    with internet.served(closet, PORT, type("Hub", (_Hub,), {"sent": sent})):
        yield sent
