r"""The hub and token to use: from the environment, or from a file that only its owner can read.

The file is `hubs.json` in the platform's folder for settings: `~/.config/gpu-launch` on Linux, `~/Library/Application
Support/gpu-launch` on macOS, `%APPDATA%\gpu-launch` on Windows.
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

from gpu_launch.common import run_folder
from gpu_launch.errors import GpuLaunchError, UsageError

_SERVICE = "/services/broker"


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A hub and the access to it."""

    #: Without a trailing slash; empty in a notebook's container, which only knows the broker.
    url: str
    broker_url: str
    token: str = field(repr=False)
    #: The token's user, empty if unknown.
    user: str = ""
    #: Trusted certificates in PEM form, used instead of the system's; empty for the system's.
    ca: str = field(default="", repr=False)
    #: Files in a notebook's container: trusted certificates, and the client's certificate and key; empty elsewhere.
    ca_file: str = ""
    certificate: str = ""
    key: str = ""
    #: An address of the hub for browsers; empty if it is not known.
    page_url: str = ""


@dataclass(frozen=True, kw_only=True)
class KnownHubs:
    """The hubs that the user is logged in to."""

    hubs: tuple[Hub, ...] = ()
    #: URL of the hub to use by default, empty if there is none.
    default: str = ""

    def find(self, url: str) -> Hub | None:
        """Return the hub at this URL, None if there is none."""
        return next((hub for hub in self.hubs if hub.url == url), None)

    def with_hub(self, hub: Hub) -> KnownHubs:
        """Return a copy with this hub added as the default."""
        return KnownHubs(hubs=(*(other for other in self.hubs if other.url != hub.url), hub), default=hub.url)

    def without_hub(self, url: str) -> KnownHubs:
        """Return a copy without this hub; if it was the default, another one takes its place."""
        remaining = tuple(hub for hub in self.hubs if hub.url != url)
        first = remaining[0].url if remaining else ""
        return KnownHubs(hubs=remaining, default=first if self.default == url else self.default)


def parse_url(text: str) -> str:
    """Return a hub's URL in its normal form.

    Raises:
        UsageError: It is not a URL, or plain http to another machine.
    """
    url = text.strip()
    url = url if "://" in url else f"https://{url}"
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise UsageError(f"{text}: the port is not a number from 1 to 65535.") from None
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"{text}: the hub's URL is needed, such as https://gpu.example.org.")
    if parts.username or parts.password:
        raise UsageError("The hub's URL has a name or a password in it; leave them out: gpu-launch uses a token.")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise UsageError(f"{text}: a token must not go over plain http; use https://{parts.netloc}.")
    # Browsers show these pages' paths after the login, so people copy URLs with them.
    path = parts.path
    for page in ("/hub", "/user"):
        head, separator, rest = path.partition(page)
        if separator and rest[:1] in ("", "/"):
            path = head
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path.rstrip('/')}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def build_broker_url(url: str) -> str:
    """Return the URL of the broker behind a hub's proxy."""
    return url + _SERVICE


def get_config_file() -> Path:
    """Return the path of the file with the logins."""
    return Path(click.get_app_dir("gpu-launch")) / "hubs.json"


def load_hubs(path: Path) -> KnownHubs:
    """Load the saved hubs.

    Raises:
        GpuLaunchError: The file cannot be read or has another format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        hubs = tuple(
            Hub(
                url=url,
                broker_url=build_broker_url(url),
                token=saved["token"],
                user=saved.get("user", ""),
                ca=saved.get("ca", ""),
            )
            for url, saved in data["hubs"].items()
        )
        return KnownHubs(hubs=hubs, default=data.get("default", ""))
    except FileNotFoundError:
        return KnownHubs()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise GpuLaunchError(f"{path} cannot be read: remove it and log in again.") from None
    except OSError as error:
        raise GpuLaunchError(f"{path} cannot be read: {error.strerror}.") from None


def save_hubs(path: Path, known_hubs: KnownHubs) -> None:
    """Save the hubs in a file readable by its owner alone; on Windows the folder's rights ensure that."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    hubs = {hub.url: {"token": hub.token, "user": hub.user, "ca": hub.ca} for hub in known_hubs.hubs}
    run_folder.write_secret_json(path, {"default": known_hubs.default, "hubs": hubs})


def choose_hub(wanted: str | None, environ: Mapping[str, str] | None = None, path: Path | None = None) -> Hub:
    """Return the hub to use: `wanted` (from `--hub`), the environment's, or the saved default.

    `GPUHUB_URL` with `GPUHUB_TOKEN` come first; a notebook's container uses its own token.

    Raises:
        UsageError: The user is not logged in to a hub.
    """
    env = os.environ if environ is None else environ
    url, token = wanted or env.get("GPUHUB_URL", ""), env.get("GPUHUB_TOKEN", "")
    if url and token:
        url = parse_url(url)
        kept = load_hubs(path or get_config_file()).find(url)
        return Hub(url=url, broker_url=build_broker_url(url), token=token, ca=kept.ca if kept else "")
    if token:
        raise UsageError(
            "GPUHUB_TOKEN is set, but GPUHUB_URL is not: set it to the URL of the hub that the token is for."
        )
    inside = find_notebook_hub(env)
    if inside is not None and not url:
        return inside
    hubs = load_hubs(path or get_config_file())
    if url:
        url = parse_url(url)
    elif not hubs.default:
        raise UsageError("You are not logged in: gpu-launch login https://YOUR-HUB")
    hub = hubs.find(url or hubs.default)
    if hub is None:
        raise UsageError(f"You are not logged in to {url}: gpu-launch login {url}")
    return hub


def find_notebook_hub(env: Mapping[str, str]) -> Hub | None:
    """Return the notebook's own access in its container; None elsewhere."""
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
        page_url=env.get("JUPYTERHUB_PUBLIC_HUB_URL", ""),
    )
