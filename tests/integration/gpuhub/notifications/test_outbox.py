"""Notifications of a real broker to real receivers, with kills of the broker in between."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.support.broker.process import Served, serving
from tests.support.docker.simulated_nodes import wait_until
from tests.support.receivers import Webhook, webhook

SECRET = "s3cret-topic"
ENDED = {"kinds": ["job-ended", "job-failed"]}
REMARK = "gpuhub restarted while it sent this"


def send(served: Served, method: str, path: str, **arguments: Any) -> Any:
    headers = {"Authorization": "token ada"}
    answer = httpx.request(method, f"{served.url}{path}", headers=headers, trust_env=False, timeout=60, **arguments)
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


def add(served: Served, hook: Webhook, path: str = SECRET, **wanted: Any) -> Any:
    url = f"json://{hook.address}/{path}"
    return send(served, "POST", "/destinations", json={"url": url, **(wanted or ENDED)})


def stop_job(served: Served, run_id: str) -> str:
    """Begin a detached job and stop it; return its id."""
    job: str = send(served, "POST", "/jobs", json={"run_id": run_id, "detached": True})["id"]
    send(served, "DELETE", f"/jobs/{job}")
    return job


def run_job(served: Served, run_id: str) -> str:
    """Run a detached job and stop it; return its id when it has ended."""
    job = stop_job(served, run_id)
    wait_until(lambda: send(served, "GET", f"/jobs/{job}")["state"] == "ended", "the job has ended")
    return job


def wait_for(hook: Webhook, count: int) -> list[str]:
    """Return the texts of the messages when there are `count`."""
    wait_until(lambda: len(hook.received) >= count, f"{count} messages", deadline_s=90)
    return [str(message["message"]) for message in hook.received]


def test_nothing_is_lost_by_kills_and_only_what_is_unknown_is_sent_again(tmp_path: Path) -> None:
    """First an event whose message never began to be sent, then a message that arrived and could not be noted."""
    with webhook() as hook:
        with serving(tmp_path, nodes=1, gpus=2, notifies=hook.address, is_killed=True) as served:
            add(served, hook)
            run_job(served, "run-000001")
            # The event is stored; whether the outbox was looked at in that second does not matter.
            os.kill(served.pid, signal.SIGKILL)
        with serving(tmp_path, nodes=1, gpus=2, notifies=hook.address, is_killed=True) as served:
            texts = wait_for(hook, 1)
            wait_until(lambda: not send(served, "GET", "/destinations")[0]["waiting"], "its result is noted", 60)
            if len(texts) == 1:
                assert "run-000001" in hook.received[0]["title"]
            known = len(hook.received)
            hook.answers.clear()
            # Another destination, since this one got a message a moment ago.
            add(served, hook, "second")
            stop_job(served, "run-000002")
            # Nothing else is waited for: the sender gives up when the answer takes long.
            wait_until(lambda: "/second" in hook.paths[known:], "the message arrives", 90)
            os.kill(served.pid, signal.SIGKILL)
        hook.answers.set()
        with serving(tmp_path, nodes=1, gpus=2, notifies=hook.address) as served:
            wait_until(
                lambda: not any(row["waiting"] for row in send(served, "GET", "/destinations")), "all is sent", 90
            )
        second = [str(row["message"]) for row, path in zip(hook.received, hook.paths, strict=True) if path == "/second"]
        assert [REMARK in text for text in second] == [False, True]
        first = [row for row, path in zip(hook.received, hook.paths, strict=True) if path != "/second"]
        assert [REMARK in str(row["message"]) for row in first if "run-000001" in row["title"]][:1] == [False]
        assert sum("run-000002" in str(row) and REMARK not in str(row) for row in first) == 1


def test_one_slow_destination_delays_no_other(tmp_path: Path) -> None:
    """The slow one answers only at the end."""
    with webhook(holds=True) as slow, webhook() as quick:
        with serving(tmp_path, nodes=1, gpus=2, notifies="127.0.0.0/8") as served:
            add(served, slow)
            add(served, quick)
            run_job(served, "run-000001")
            assert "Run-000001" not in wait_for(quick, 1)[0]
            states = send(served, "GET", "/destinations")
            wait_until(lambda: slow.received, "the slow one has got its message too", 60)
            slow.answers.set()
            wait_until(
                lambda: all(row["sent_at"] for row in send(served, "GET", "/destinations")), "both are noted", 60
            )
        assert [SECRET in str(states)] == [False]


def test_urls_are_nowhere_in_clear(tmp_path: Path) -> None:
    """Neither in the store, nor in the log, nor in answers and metrics; also after failures and refusals."""
    with webhook() as hook:
        hook.status = 500
        with serving(tmp_path, nodes=1, gpus=2, notifies=hook.address) as served:
            made = add(served, hook)
            send(served, "POST", f"/destinations/{made['id']}/test")
            shown = wait_until(
                lambda: [row for row in send(served, "GET", "/destinations") if row["failed_at"]], "it has failed", 60
            )
            assert shown[0]["error"] == "the destination answered with status 500"
            headers = {"Authorization": "token ada"}
            texts = [str(shown), str(made)]
            for body in (
                {"url": f"exec://{SECRET}", "kinds": []},
                {"url": f"json://10.0.0.1/{SECRET}", "kinds": []},
                {"url": f"json://{SECRET}\n", "kinds": ["granted"]},
                {"url": f"ntfy://x/{SECRET}?attach={SECRET}", "kinds": ["granted"]},
                {"url": f"tgram://{SECRET}", "kinds": ["granted"]},
            ):
                answer = httpx.post(
                    f"{served.url}/destinations", json=body, headers=headers, trust_env=False, timeout=60
                )
                assert answer.status_code == 422
                texts.append(answer.text)
            metrics = httpx.get(
                f"{served.url.removesuffix('/api/v1')}/metrics",
                headers={"Authorization": "token root"},
                trust_env=False,
            )
            texts.append(metrics.text)
    texts += [path.read_bytes().decode("latin-1") for path in tmp_path.iterdir() if path.is_file()]
    assert [text for text in texts if SECRET in text] == []
