"""What `gpuhub bench` measured, over the broker's API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.broker.bench import build_bench
from tests.support.broker.calls import read
from tests.support.broker.in_process import Running, Setting, asgi_broker

MEASURED = {
    "measured_at": "2026-11-28 10:15",
    "device": "NVIDIA GeForce RTX 5090",
    "flops": 6.12e13,
    "read_bytes_s": 1.1e8,
    "link_bytes_s": [3.0e8, 3.0e8],
}


async def put(running: Running, caller: str, body: Any, status: int) -> str:
    async with running.client(caller) as client:
        answer = await client.put("/api/v1/bench", json=body)
    assert answer.status_code == status, answer.text
    return answer.text


async def test_figures_are_kept_and_shown_with_their_node(setting: Setting) -> None:
    """For all users, after a restart as well; a later bench replaces all of them."""
    async with asgi_broker(setting) as running:
        assert "`gpuhub bench`" in (await read(running, "ada", "/bench", 404))["detail"]
        assert [node["bench"] for node in await read(running, "ada", "/nodes")] == [None, None, None]
        await put(running, "root", build_bench(), 200)
    async with asgi_broker(setting) as running:
        assert await read(running, "ben", "/bench") == build_bench()
        first, second, third = [node["bench"] for node in await read(running, "ada", "/nodes")]
        assert first == MEASURED
        assert (second["flops"], third) == (2.9e13, None)
        await put(running, "root", build_bench(cards=[build_bench()["cards"][1]], links=[], gang=None), 200)
        cluster = await read(running, "ada", "/cluster")
        assert [node["bench"] and node["bench"]["link_bytes_s"] for node in cluster["nodes"]] == [None, None, None]
        assert [node["bench"] is None for node in cluster["nodes"]] == [True, False, True]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cards": [{**build_bench()["cards"][0], "node": "rig9"}], "links": []}, "there is no node 'rig9'"),
        ({"cards": build_bench()["cards"][:1]}, "a link names a rank that is not one of the 1 cards"),
        ({"cards": []}, "at least 1 item"),
        ({"backend": "mpi"}, "'nccl' or 'gloo'"),
        ({"cards": [{**build_bench()["cards"][0], "flops": 0}], "links": []}, "greater than 0"),
    ],
)
async def test_what_cannot_be_right_is_refused(setting: Setting, changes: dict[str, Any], reason: str) -> None:
    async with asgi_broker(setting) as running:
        assert reason in await put(running, "root", build_bench(**changes), 422)
        await read(running, "ada", "/bench", 404)


async def test_only_administrators_say_what_nodes_are_capable_of(setting: Setting) -> None:
    async with asgi_broker(setting) as running:
        assert "ada is not an administrator" in await put(running, "ada", build_bench(), 403)


async def test_a_damaged_file_is_reported_and_measured_again(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker starts without the figures, and its log says what to do."""
    setting.bench_file.write_text('{"cards": 3}', encoding="utf-8")
    async with asgi_broker(setting) as running:
        await read(running, "ada", "/bench", 404)
        await put(running, "root", build_bench(), 200)
    assert "`gpuhub bench` measures them again" in caplog.text
