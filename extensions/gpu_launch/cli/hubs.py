"""Which hub, and the token for it: from the environment, or from a file that only its owner can read.

The file is `hubs.json` in the platform's folder for settings: `~/.config/gpu-launch` on Linux,
`~/Library/Application Support/gpu-launch` on macOS, `%APPDATA%\\gpu-launch` on Windows.
"""

from __future__ import annotations

import ipaddress
import json
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from gpu_launch import runs
from gpu_launch.errors import GpuLaunchError, UsageError

_SERVICE = "/services/broker"


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A hub that one may use."""

    #: Without a slash at its end; empty within a notebook's container, which knows its broker alone.
    url: str
    broker_url: str
    token: str = field(repr=False)
    #: Who the token belongs to; empty for not known.
    user: str = ""
    #: The certificates that are trusted instead of the system's, as PEM; empty for the system's.
    ca: str = field(default="", repr=False)
    #: Within a notebook's container: files with whom to trust, and with what is shown; empty elsewhere.
    ca_file: str = ""
    certificate: str = ""
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The hubs that were logged in to."""

    hubs: tuple[Hub, ...] = ()
    #: The URL of the one that is used when none is named; empty for none.
    default: str = ""

    def find(self, url: str) -> Hub | None:
        """The one at this URL."""
        return next((hub for hub in self.hubs if hub.url == url), None)

    def having(self, hub: Hub) -> Known:
        """With this one, as the default."""
        return Known(hubs=(*(other for other in self.hubs if other.url != hub.url), hub), default=hub.url)

    def without(self, url: str) -> Known:
        """Without this one; another becomes the default where it was."""
        left = tuple(hub for hub in self.hubs if hub.url != url)
        first = left[0].url if left else ""
        return Known(hubs=left, default=first if self.default == url else self.default)


def parse_url(text: str) -> str:
    """A hub's URL in its one spelling. Raises UsageError for what is none, and for plain http beyond this machine."""
    url = text.strip()
    url = url if "://" in url else f"https://{url}"
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise UsageError(f"{text}: the port is no number from 1 to 65535.") from None
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"{text}: the hub's URL is needed, such as https://gpu.example.org.")
    if parts.username or parts.password:
        raise UsageError("The hub's URL has a name or a password in it; leave them out: gpu-launch uses a token.")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise UsageError(f"{text}: a token must not go over plain http; use https://{parts.netloc}.")
    # What a browser shows in its address line after the login, and the pages that people copy it from.
    path = parts.path
    for page in ("/hub", "/user"):
        head, found, rest = path.partition(page)
        if found and rest[:1] in ("", "/"):
            path = head
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path.rstrip('/')}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def broker_url(url: str) -> str:
    """The broker behind a hub's proxy."""
    return url + _SERVICE


def config_file() -> Path:
    """Where logins are kept."""
    return Path(click.get_app_dir("gpu-launch")) / "hubs.json"


def load(path: Path) -> Known:
    """What was kept. Raises GpuLaunchError for a file that is not ours."""
    try:
        data = json.loads(path.read_text())
        hubs = tuple(
            Hub(
                url=url,
                broker_url=broker_url(url),
                token=kept["token"],
                user=kept.get("user", ""),
                ca=kept.get("ca", ""),
            )
            for url, kept in data["hubs"].items()
        )
        return Known(hubs=hubs, default=data.get("default", ""))
    except FileNotFoundError:
        return Known()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise GpuLaunchError(f"{path} cannot be read: remove it and log in again.") from None
    except OSError as error:
        raise GpuLaunchError(f"{path} cannot be read: {error.strerror}.") from None


def save(path: Path, known: Known) -> None:
    """Keep it, readable by its owner alone (on Windows: in the folder that only its owner can read)."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    hubs = {hub.url: {"token": hub.token, "user": hub.user, "ca": hub.ca} for hub in known.hubs}
    runs.write_secret(path, {"default": known.default, "hubs": hubs})


def choose(wanted: str | None, environ: Mapping[str, str] | None = None, path: Path | None = None) -> Hub:
    """The hub to use: `wanted` (from `--hub`), the environment, or the kept default.

    `GPUHUB_URL` with `GPUHUB_TOKEN` come first; within a notebook's container its own token is used. Raises UsageError
    where there is none.
    """
    env = os.environ if environ is None else environ
    url, token = wanted or env.get("GPUHUB_URL", ""), env.get("GPUHUB_TOKEN", "")
    if url and token:
        url = parse_url(url)
        kept = load(path or config_file()).find(url)
        return Hub(url=url, broker_url=broker_url(url), token=token, ca=kept.ca if kept else "")
    if token:
        raise UsageError("GPUHUB_TOKEN is set and GPUHUB_URL is not: say which hub the token is for.")
    inside = inside_notebook(env)
    if inside is not None and not url:
        return inside
    known = load(path or config_file())
    if url:
        url = parse_url(url)
    elif not known.default:
        raise UsageError("You are not logged in: gpu-launch login https://YOUR-HUB")
    found = known.find(url or known.default)
    if found is None:
        raise UsageError(f"You are not logged in to {url}: gpu-launch login {url}")
    return found


def inside_notebook(env: Mapping[str, str]) -> Hub | None:
    """The notebook's own access, in its container; None elsewhere."""
    token, url = env.get("JUPYTERHUB_API_TOKEN"), env.get("GPUHUB_BROKER_URL")
    if not (token and url):
        return None
    return Hub(
        url="",
        broker_url=url.rstrip("/"),
        token=token,
        user=env.get("JUPYTERHUB_USER", ""),
        ca_file=env.get("GPUHUB_BROKER_CA", ""),
        certificate=env.get("JUPYTERHUB_SSL_CERTFILE", ""),
        key=env.get("JUPYTERHUB_SSL_KEYFILE", ""),
    )
