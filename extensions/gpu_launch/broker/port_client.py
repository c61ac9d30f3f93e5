"""A client of a job's server through the broker's ports, with the notebook's own token."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from gpu_launch.broker.client import NoRedirect
from gpu_launch.common.client_tls import load_own_tls
from gpu_launch.environment import Environment
from gpu_launch.errors import BrokerError

#: Maximum silence of a server, seconds.
_SILENCE_S = 600.0
#: Time limit of the check whether a server answers, seconds.
_PROBE_S = 10.0
#: Maximum length of a line that is read, bytes.
_MAX_LINE = 1 << 20
#: Maximum length of an error that is read, bytes.
_MAX_ERROR = 1 << 16


class PortClient:
    """Requests to the port of one job."""

    def __init__(self, env: Environment, job_id: str) -> None:
        """Connect nowhere yet.

        Raises:
            BrokerError: The notebook's certificates cannot be read.
        """
        tls = load_own_tls(env)
        self._token = env.token or ""
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), NoRedirect, urllib.request.HTTPSHandler(context=tls)
        )
        #: The server's address.
        self.url = f"{env.broker_url}/ports/{job_id}"

    def is_answering(self, path: str) -> bool:
        """Return whether the server answers well."""
        try:
            with self._open(path, None, _PROBE_S):
                return True
        except BrokerError:
            return False

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """Send a request, and return the lines of the answer as they come.

        Raises:
            BrokerError: The broker or the server refuses it, or the connection breaks.
        """
        with self._open(path, body, _SILENCE_S) as response:
            while line := self._read_line(response):
                yield line.decode().rstrip("\r\n")

    def _read_line(self, response: Any) -> bytes:
        try:
            line: bytes = response.readline(_MAX_LINE)
        except (OSError, http.client.HTTPException) as error:
            raise BrokerError(f"The connection to the server broke: {error}.") from None
        return line

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        request = urllib.request.Request(  # noqa: S310 - the URL comes from the container's own environment
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self._token}", "Content-Type": "application/json"},
        )
        try:
            return self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise BrokerError(_describe(error.code, error.read(_MAX_ERROR)), status=error.code) from None
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise BrokerError(f"{self.url} cannot be reached: {reason}.") from None


def _describe(status: int, body: bytes) -> str:
    """Return the text of the broker's problem, or of an error in OpenAI's form."""
    try:
        value = json.loads(body)
        return str(value["detail"] if "detail" in value else value["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered with HTTP status {status}."
