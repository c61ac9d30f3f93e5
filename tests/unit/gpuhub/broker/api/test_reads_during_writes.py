"""Reads of the broker while a change is being written: the ledger's index already has what its snapshot does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpuhub.broker.api.dependencies import PREFIX
from gpuhub.broker.db.writer import Changes
from tests.support.broker.calls import ask, post, run_notebook, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, held_writes, until


def find_owners(held: list[Changes]) -> set[str]:
    """Return whose leases and jobs are being written."""
    return {row.owner for changes in held for _, row in (*changes.leases, *changes.jobs)}


async def send(running: Running, caller: str, method: str, path: str, body: Any) -> int:
    """Send a request; return the status."""
    async with running.client(caller) as client:
        return (await client.request(method, f"/api/v1{path}", json=body)).status_code


async def list_failures(running: Running, ids: dict[str, str]) -> dict[str, str]:
    """Return the responses of all GET routes that are errors of the broker, by caller and path."""
    paths = [path for path, methods in running.app.openapi()["paths"].items() if "get" in methods]
    assert f"{PREFIX}/api/v1/cluster" in paths
    failures = {}
    for caller in ("ada", "ben", "root"):
        async with running.client(caller) as client:
            for path in paths:
                # Streams end after their first view.
                answer = await client.get(path.removeprefix(PREFIX).format(**ids), params={"for_s": "0"})
                if answer.status_code == 422:
                    answer = await client.get(path.removeprefix(PREFIX).format(**ids))
                if answer.status_code >= 500:
                    failures[f"{caller} {path}"] = answer.text
    return failures


@pytest.mark.parametrize(
    ("caller", "method", "path", "body"),
    [
        ("ben", "POST", "/leases", {"profile": "rtx5090", "key": "k9"}),
        ("ben", "POST", "/jobs", {"run_id": "run-000002"}),
        ("ada", "DELETE", "/leases/{lease_id}", None),
        ("ada", "DELETE", "/jobs/{job_id}", None),
    ],
)
async def test_every_read_answers_while_a_change_is_being_written(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, caller: str, method: str, path: str, body: Any
) -> None:
    """Requests that begin or end while their transaction is stored are no errors to anybody."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        job = await post(running, "ada", "/jobs", {"run_id": "run-000001"}, 201)
        await wait_for_state(running, f"/jobs/{job['id']}", "running")
        ids = {"lease_id": lease["id"], "job_id": job["id"], "notebook_id": "nb-0a1b2c", "name": "rig1"}
        with held_writes(running, monkeypatch) as held:
            change = asyncio.ensure_future(send(running, caller, method, path.format(**ids), body))
            await until(lambda: find_owners(held) == {caller}, "the change is being written")
            assert await list_failures(running, ids) == {}
            assert not change.done()
        assert await change in {200, 201}
