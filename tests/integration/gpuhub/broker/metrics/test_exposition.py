"""The broker's metrics are read by Prometheus' own tool."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.broker.calls import ask, post, run_notebook
from tests.support.broker.in_process import Setting, asgi_broker, until
from tests.support.broker.metrics import scrape, scrape_text
from tests.support.broker.rights import MODELS

#: DCGM's own label `modelName`, which people's dashboards use.
NAME_OF_DCGM = re.compile("DCGM_FI_DEV_[A-Z_]+ label names should be written in 'snake_case' not 'camelCase'$")


async def test_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    """All families at once: a notebook, a job, a waiting request, an Xid error, and a GPU that is slowed down."""
    setting = Setting(tmp_path)
    setting.hub.models |= MODELS
    setting.nodes["rig3"].xids["GPU-rig3-0"] = [(79, 1, 1795459261.5)]
    setting.nodes["rig3"].clocks_event_reasons[0] = 0x40
    setting.nodes["rig3"].remap_failed.add(0)
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        await post(running, "ada", "/jobs", {"run_id": "run-000001", "detached": True, "name": 'a "b"\\'}, 201)
        await ask(running, "ben")

        async def has_job() -> bool:
            return bool((await scrape(running)).list("gpuhub_job_start_timestamp_seconds"))

        await until(has_job, "the job is exported")
        text = await scrape_text(running)
    assert [line for line in check_metrics(text) if not NAME_OF_DCGM.match(line)] == []


def check_metrics(text: str) -> list[str]:
    """Return the lines that `promtool check metrics` writes."""
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, check=False, capture_output=True, text=True, timeout=60
    )
    return (done.stdout + done.stderr).splitlines()


def test_promtool_finds_mistakes() -> None:
    """It would name a counter without its suffix."""
    assert check_metrics("# HELP requests All.\n# TYPE requests counter\nrequests 1\n") == [
        'requests counter metrics should have "_total" suffix'
    ]
