"""`gpu_launch.serve` from a notebook: what it refuses, what it asks for, and the conversation with what it started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpu_launch
from gpu_launch.common import job_manifest, run_folder
from gpu_launch.errors import BrokerError, GpuLaunchError, UsageError
from gpu_launch.serving import settings
from gpuhub.broker_api import schemas
from tests.support.launch.answering_server import AnsweringServer
from tests.support.launch.model_folders import write_folder

PORT = "/ports/job-0"


class Broker(AnsweringServer):
    """Two nodes with a GPU each, and a job whose server answers as the test says."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.chats: list[dict] = []
        self.deleted: list[str] = []
        #: States of the job, one for each look; the last one stays.
        self.states = ["waiting", "running"]
        self.is_listening = False
        self.events: list[str] = []
        self.refusal = b""
        super().__init__()

    def handle(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        match method, path.removeprefix("/api/v1"):
            case "GET", "/cluster":
                gpus = [
                    {"uuid": f"GPU-{node}", "node": node, "model": "RTX 5070", "memory_mib": 12_227, "state": "free"}
                    for node in ("rig1", "rig2")
                ]
                return 200, json.dumps({"nodes": [{"name": gpu["node"], "gpus": [gpu]} for gpu in gpus]}).encode()
            case "POST", "/jobs":
                self.asked.append(json.loads(body))
                return 201, self.describe("waiting")
            case "GET", "/jobs/job-0":
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                self.is_listening = state == "running"
                return 200, self.describe(state)
            case "DELETE", "/jobs/job-0":
                self.deleted.append("job-0")
                return 200, self.describe("stopping")
            case "GET", _ if path == f"{PORT}/health":
                return (200, b"{}") if self.is_listening else (502, b"{}")
            case "POST", _ if path == f"{PORT}/v1/chat/completions":
                self.chats.append(json.loads(body))
                return (400, self.refusal) if self.refusal else (200, "\n\n".join(self.events).encode())
        return 404, b"{}"

    def describe(self, state: str) -> bytes:
        lease = {"position": 2, "waiting_for": "2 GPUs"} if state == "waiting" else None
        job = {"id": "job-0", "run_id": self.asked[0]["run_id"], "state": state, "version": 1, "lease": lease}
        return json.dumps(job | {"detached": True, "reason": "exit code 2" if state == "ended" else None}).encode()

    def say(self, *parts: str) -> None:
        """Answer the next chats with these parts."""
        deltas = [{"role": "assistant", "content": parts[0]}, *({"content": part} for part in parts[1:])]
        self.events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}" for delta in deltas] + [
            "data: [DONE]",
            "",
        ]


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A notebook on rig1 asks it; its home has a model."""
    made, home = Broker(), tmp_path / "ada"
    write_folder(home / "Tiny")
    monkeypatch.chdir(home)
    monkeypatch.setattr("gpu_launch.detached.endpoint._POLL_S", 0.0)
    for name, value in {
        "HOME": str(home), "GPUHUB_BROKER_URL": made.url, "JUPYTERHUB_API_TOKEN": "secret", "GPUHUB_NODE": "rig1",
        "GPUHUB_GPU_UUIDS": "GPU-rig1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def test_job_has_the_port_and_the_settings(broker, tmp_path, capsys):
    """The schema is the broker's own; the notebook's node may take part."""
    endpoint = gpu_launch.serve("Tiny", nnodes=2, slots=2, idle="0s", allow_users=["ben"], gpu_model="rtx 5070")
    request = schemas.JobRequest.model_validate(broker.asked[0])
    assert (request.nnodes, request.detached, request.port, request.port_users) == (2, True, 8000, ("ben",))
    assert (request.name, request.models, request.exclude_nodes) == ("serve Tiny", ("RTX 5070",), ())
    assert request.least_memory_mib == 12_227
    (run,) = run_folder.jobs_folder(tmp_path / "ada").iterdir()
    manifest = job_manifest.parse_manifest((run / "job.json").read_text())
    assert "--stacks-after=0s" in manifest.words
    served = settings.read_arguments(manifest.words[manifest.words.index(settings.MODULE) + 1 :])
    assert (served.model, served.slots, served.idle_s) == (str(tmp_path / "ada" / "Tiny"), 2, 0)
    assert "divided between 2 cards with at least 11.9 GiB each" in capsys.readouterr().out
    assert endpoint.base_url == f"{broker.url}{PORT}/v1"
    assert "secret" not in repr(endpoint)


def test_chat_waits_shows_parts_and_continues(broker, capsys):
    """The second question has the first one's answer before it."""
    endpoint = gpu_launch.serve("Tiny")
    capsys.readouterr()
    broker.say("Hel", "lo")
    assert endpoint.chat("Hi", temperature=0) == "Hello"
    assert capsys.readouterr().out == "gpu_launch: Tiny: 2 GPUs\ngpu_launch: Tiny: it is running\nHello\n"
    broker.say("Fine")
    assert endpoint.chat("And you?", show=False) == "Fine"
    assert broker.chats[0] == {
        "model": "Tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "temperature": 0,
    }  # fmt: skip
    assert [message["content"] for message in broker.chats[1]["messages"]] == ["Hi", "Hello", "And you?"]
    endpoint.reset()
    endpoint.chat("New", show=False)
    assert len(broker.chats[2]["messages"]) == 1
    endpoint.stop()
    assert broker.deleted == ["job-0"]


def test_refused_and_broken_chats_are_not_remembered(broker):
    """With what the server says."""
    endpoint = gpu_launch.serve("Tiny")
    broker.refusal = json.dumps({"error": {"message": "too long"}}).encode()
    with pytest.raises(BrokerError, match="too long"):
        endpoint.chat("Hi", show=False)
    broker.refusal, broker.events = b"", ['data: {"error": {"message": "a part of the model failed"}}', ""]
    with pytest.raises(BrokerError, match="a part of the model failed"):
        endpoint.chat("Hi", show=False)
    assert endpoint.messages == []


def test_ended_job_and_time_limit_end_the_wait(broker):
    """With the reason, and where the output is."""
    endpoint = gpu_launch.serve("Tiny")
    broker.states = ["waiting"]
    with pytest.raises(GpuLaunchError, match=r"Tiny is not served after 0 s: 2 GPUs"):
        endpoint.wait(timeout_s=0)
    broker.states = ["ended"]
    with pytest.raises(
        GpuLaunchError, match=rf"the job has ended \(exit code 2\). Its output: %gpu_logs {endpoint.run_id}"
    ):
        endpoint.wait()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"model": "None"}, "there is no such folder"),
        ({"nnodes": 5}, "5 cards are more than Tiny has layers, 4"),
        ({"nnodes": "1:2"}, "one number of nodes is needed"),
        ({"nnodes": 3}, "--nnodes 3 is more than the cluster has"),
        ({"engine": "tgi"}, "engine='tgi': one of auto, vllm, transformers"),
        ({"idle": "soon"}, "idle soon: a span of time"),
        ({"slots": 0}, "--slots 0: a number from 1"),
        ({"port": 80}, "--port 80: a number from 1024"),
        ({"context": 10_000}, "--context 10000: Tiny has sequences of 4096 tokens at most"),
        ({"allow_users": "ben"}, "allow_users: a list"),
        ({"gpu_model": "RTX 3090"}, "the cluster has RTX 5070"),
    ],
)
def test_refusals_come_before_anything_is_asked_for(broker, keywords, message):
    with pytest.raises(UsageError, match=message):
        gpu_launch.serve(**{"model": "Tiny"} | keywords)
    assert not broker.asked


def test_vllm_alone_may_serve_what_is_not_divided_here(broker, tmp_path, capsys):
    write_folder(tmp_path / "ada" / "Other", model_type="mamba")
    with pytest.raises(UsageError, match="architecture mamba are not served"):
        gpu_launch.serve("Other")
    gpu_launch.serve("Other", engine="vllm")
    assert "Other: vLLM checks whether it fits" in capsys.readouterr().out
