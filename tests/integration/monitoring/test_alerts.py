"""The alert rules and examples of docs/monitoring with Debian's promtool, amtool, Prometheus and Alertmanager."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuhub.ops.deploy.monitoring import TARGETS
from tests.support.broker.in_process import Setting, served_broker
from tests.support.broker.rights import MODELS
from tests.support.monitoring.processes import run_alertmanager, run_prometheus
from tests.support.product import wait_for

EXAMPLES = Path(__file__).parents[3] / "docs" / "monitoring"
RULES = yaml.safe_load((EXAMPLES / "alerts.yml").read_text(encoding="utf-8"))
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
RULE_TESTS = Path(__file__).with_name("alerts.test.yml")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    """`promtool test rules` on the rules as they are installed."""
    for file in (EXAMPLES / "alerts.yml", RULE_TESTS):
        shutil.copy(file, tmp_path)
    assert "SUCCESS" in run("promtool", "test", "rules", RULE_TESTS.name, cwd=tmp_path)


def test_every_alert_is_tested() -> None:
    """At least once as firing, with the texts that people get."""
    tests = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == ALERTS.keys()
    assert {rule["labels"]["severity"] for rule in ALERTS.values()} == {"critical", "warning", "info"}


def test_examples_are_valid(tmp_path: Path) -> None:
    """Also that of a Prometheus elsewhere, which scrapes the same two services."""
    run("amtool", "check-config", EXAMPLES / "alertmanager.yml")
    run("promtool", "check", "config", "--syntax-only", EXAMPLES / "prometheus.yml")
    scraped = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert {one["job_name"]: one["metrics_path"] for one in scraped} == TARGETS


@contextmanager
def receive_alerts() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a webhook and the alerts that it got."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.extend(json.loads(body)["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/alerts", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    setting = Setting(tmp_path)
    setting.hub.models |= MODELS
    return setting


def test_xid_error_reaches_the_owner(setting: Setting, tmp_path: Path) -> None:
    """From a GPU agent's line through broker, Prometheus and Alertmanager to a webhook, with its texts."""
    with served_broker(setting) as running, receive_alerts() as (url, received):
        routes = yaml.safe_load((EXAMPLES / "alertmanager.yml").read_text(encoding="utf-8"))
        routes["route"] |= {"group_wait": "0s"}
        routes["receivers"] = [{"name": "owner", "webhook_configs": [{"url": url}]}]
        token = tmp_path / "token"
        token.write_text("metrics")
        with run_alertmanager(tmp_path, routes) as alertmanager:
            config = {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(EXAMPLES / "alerts.yml")],
                "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
                "scrape_configs": [
                    {
                        "job_name": "gpuhub-broker",
                        "metrics_path": TARGETS["gpuhub-broker"],
                        "authorization": {"type": "token", "credentials_file": str(token)},
                        "static_configs": [{"targets": [running.url.split("/")[2]]}],
                    }
                ],
            }
            with run_prometheus(tmp_path, config) as prometheus:
                wait_for(lambda: prometheus.query("gpuhub_node_up"), prometheus.targets().__str__)
                assert received == []
                now = float(prometheus.query("vector(time())")[0]["value"][1])
                setting.nodes["rig2"].xids["GPU-rig2-0"] = [(79, 1, now)]
                alert = wait_for(lambda: next(iter(received), None), "the webhook gets the alert")
    assert (alert["status"], alert["labels"]["alertname"]) == ("firing", "GpuhubGpuXidCritical")
    assert alert["annotations"]["summary"] == "Xid 79 on GPU 0 (RTX 5070) of rig2"
