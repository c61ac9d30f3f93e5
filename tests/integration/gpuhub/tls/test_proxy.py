"""Flags and environment of JupyterHub's proxy that concern browsers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.proxy import build_proxy_command, build_proxy_environment
from gpuhub.tls.internal_certificates import CertificateFiles
from tests.support.product import wait_for
from tests.support.tls import make_certificate

OURS = CertificateFiles(Path("/secrets/https.pem"), Path("/secrets/https.pem"))


def build(**more: Any) -> list[str]:
    return build_proxy_command(
        "chp", public=("0.0.0.0", 443), api_port=8001, hub_url="http://10.0.0.1:8081", internal=None, **more
    )


def test_plain_http_sets_no_https_options() -> None:
    """No setting of HTTPS is present."""
    assert not any(word.startswith("--ssl") or word == "--host-routing" for word in build())
    environment = build_proxy_environment(None, Paths(), Path("/c.toml"), is_ours=False)
    options, _, hook = environment["NODE_OPTIONS"].partition(" --require ")
    assert (options, set(environment)) == ("--tls-min-v1.2", {"NODE_OPTIONS"})
    assert Path(json.loads(hook)).is_file()


def test_https_sets_certificate_and_host_routing() -> None:
    """The certificate's files and routing by host name are set."""
    command = build(https=OURS, has_subdomains=True)
    assert command[command.index("--ssl-key") + 1] == command[command.index("--ssl-cert") + 1] == str(OURS.key)
    assert "--host-routing" in command


def test_own_certificate_is_renewed_and_reloaded() -> None:
    """gpuhub's own certificate is renewed twice a day; an administrator's is only reloaded."""
    environment = build_proxy_environment(OURS, Paths("ghunit"), Path("/c.toml"), is_ours=True)
    options, *hooks = environment["NODE_OPTIONS"].split(" --require ")
    assert options == "--tls-min-v1.2"
    assert [Path(json.loads(hook)).name for hook in hooks] == ["limits.cjs", "certificate.cjs"]
    renew = json.loads(environment["GPUHUB_HTTPS_RENEW"])
    assert renew[1:] == ["certificate", "--instance", "ghunit", "--cluster-file", "/c.toml"]
    given = build_proxy_environment(OURS, Paths("ghunit"), Path("/c.toml"), is_ours=False)
    assert given["GPUHUB_HTTPS_RENEW"] == ""


#: Shortens all timers.
HASTE = """
const { setInterval: every, setTimeout: once } = globalThis;
globalThis.setInterval = (act, ms, ...words) => every(act, 500, ...words);
globalThis.setTimeout = (act, ms, ...words) => once(act, 200, ...words);
"""
#: A server in place of the proxy.
SERVE = """
const https = require("node:https"), fs = require("node:fs");
https.createServer({{ cert: fs.readFileSync({certificate}), key: fs.readFileSync({key}) }}).listen(0, "127.0.0.1");
"""


@pytest.fixture
def node(tmp_path: Path) -> Any:
    """Return a function that runs a Node.js script with the hook, and with short timers."""
    (tmp_path / "haste.cjs").write_text(HASTE)
    files = CertificateFiles(*make_certificate(tmp_path))

    def run(script: str) -> subprocess.Popen[str]:
        (tmp_path / "script.cjs").write_text(
            script.format(certificate=json.dumps(str(files.certificate)), key=json.dumps(str(files.key)))
        )
        environment = build_proxy_environment(files, Paths("ghunit"), Path("/c.toml"), is_ours=True)
        environment["NODE_OPTIONS"] = environment["NODE_OPTIONS"].replace(
            "--require", f"--require {tmp_path / 'haste.cjs'} --require", 1
        )
        touch = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
        environment["GPUHUB_HTTPS_RENEW"] = json.dumps([sys.executable, "-c", touch, str(tmp_path / "renewed")])
        command = ["node", str(tmp_path / "script.cjs")]
        return subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)

    return run


def test_proxy_runs_the_certificate_command_repeatedly(node: Any, tmp_path: Path) -> None:
    """The proxy runs the given command repeatedly."""
    with node(SERVE) as running:
        try:
            wait_for((tmp_path / "renewed").exists, "the command")
            (tmp_path / "renewed").unlink()
            wait_for((tmp_path / "renewed").exists, "the command, again")
        finally:
            running.kill()


def test_unknown_proxy_version_exits(node: Any) -> None:
    """Otherwise it would serve an old certificate without an error."""
    with node("setInterval(() => 0, 1000)") as running:
        assert running.wait(timeout=60) == 1
        assert "it serves HTTPS in another way" in running.stderr.read()
