"""`gpu-launch serve`'s ranks over gloo: OpenAI's API with answers equal to the whole model's in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_launch.common.network import find_free_port
from gpu_launch.options import command
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.serving import settings
from tests.support.launch import served_ranks, tiny_model
from tests.support.launch.detached_jobs import Job

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[4]
START_S = 180
#: Five layers of a model that needs little: the third card has the most memory.
MEMORY = "1034,1034,1300"
PROMPTS = ["a", "Where is the lease?", "two words", "x" * 60, "Zebra 123"]


class Server:
    """The ranks of one server."""

    def __init__(self, port: int, ranks: list[subprocess.Popen[str]]) -> None:
        self.port, self.ranks = port, ranks

    def open(self, path: str, body: object = None):
        """Return the response."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=60)

    def ask(self, path: str, body: object = None):
        """Return the status and the value of the answer."""
        try:
            with self.open(path, body) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def complete(self, prompt: str, number: int, **more: object) -> str:
        """Return the most probable continuation."""
        body = {"prompt": prompt, "max_tokens": number, "temperature": 0} | more
        return self.ask("/v1/completions", body)[1]["choices"][0]["text"]


@contextmanager
def serving(folder: Path, ranks: int, *words: str, **environ: str):
    """Start the ranks, and wait until rank 0 listens."""
    port = find_free_port()
    common = os.environ | {
        "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    } | environ  # fmt: skip
    words_of_rank = [sys.executable, "-m", "gpu_launch.worker.rank_main", "-m", served_ranks.__name__]
    words_of_rank += ["--port", str(port), "--name", "tiny", *words, "--", str(folder)]
    started = [
        subprocess.Popen(
            words_of_rank, cwd=ROOT, env=common | {"RANK": str(rank), "GROUP_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        server = Server(port, started)
        deadline = time.monotonic() + START_S
        while True:
            try:
                assert server.ask("/health")[0] == 200
                break
            except OSError:
                ended = [rank.stdout.read() for rank in started if rank.poll() is not None]
                assert not ended, ended[0]
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield server
    finally:
        for rank in started:
            rank.kill()
            rank.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The whole model, with its folder as `path`."""
    folder = tmp_path_factory.mktemp("tiny")
    whole = tiny_model.write_model(folder, shards=True)
    whole.path = folder
    return whole


@pytest.fixture(scope="module")
def server(model):
    """Three ranks with cards of different size, and two slots."""
    with serving(model.path, 3, "--slots", "2", "--idle", "0", SERVED_MEMORY=MEMORY) as server:
        yield server


def expect(model, prompt: str, number: int) -> str:
    return tiny_model.write_text(tiny_model.generate(model, tiny_model.read_tokens(prompt), number))


def test_batch_of_different_lengths_equals_one_process_token_by_token(server, model):
    """More requests than slots, all at once, with prompts and answers of different lengths."""
    numbers = [40, 3, 25, 60, 12]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(server.complete, PROMPTS, numbers))
    assert texts == [expect(model, prompt, number) for prompt, number in zip(PROMPTS, numbers, strict=True)]
    assert all(texts)


def test_chat_streams_the_same_tokens(server, model):
    """With the role first, the reason of the end, and the numbers of tokens where they are asked for."""
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 9, "temperature": 0,
    }  # fmt: skip
    whole = server.ask("/v1/chat/completions", body)[1]
    expected = expect(model, "<user>Hi<assistant>", 9)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert whole["usage"] == {"prompt_tokens": 19, "completion_tokens": 9, "total_tokens": 28}
    with server.open(
        "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
    ) as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        lines = [line.decode().strip().removeprefix("data: ") for line in stream if line.strip()]
    assert lines.pop() == "[DONE]"
    *parts, usage = map(json.loads, lines)
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == expected
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert len(parts) > 9
    assert usage["usage"] == whole["usage"]


def test_stop_and_seed(server, model):
    """An answer ends before a stop string; draws repeat with their seed."""
    expected = expect(model, "stop", 30)
    status, answer = server.ask(
        "/v1/completions", {"prompt": "stop", "max_tokens": 30, "temperature": 0, "stop": expected[7:9]}
    )
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    assert answer["choices"][0]["text"] == expected[: expected.index(expected[7:9])]
    draws = [server.complete("draw", 20, temperature=2, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_cancelled_request_frees_its_slot(server, model):
    """A client that leaves while its answer is streamed, and one that leaves while it waits."""
    body = {"prompt": "long", "max_tokens": 120, "temperature": 0, "stream": True}
    streams = [server.open("/v1/completions", body) for _ in range(2)]
    waiting = threading.Thread(target=lambda: server.complete("after", 4))
    waiting.start()
    for stream in streams:
        assert stream.readline()
        stream.close()
    assert server.complete("next", 15) == expect(model, "next", 15)
    waiting.join(60)
    deadline = time.monotonic() + 60
    while server.ask("/health")[1]["open_requests"]:
        assert time.monotonic() < deadline
    assert not waiting.is_alive()


def test_models_and_errors_have_openais_form(server):
    """What does not exist, is too long, too large or no JSON."""
    listed = server.ask("/v1/models")[1]["data"]
    assert [(item["id"], item["max_model_len"]) for item in listed] == [("tiny", 128)]
    assert server.ask("/v1/models/tiny")[1] == listed[0]
    for path, body, status, code in (
        ("/v1/models/large", None, 404, "model_not_found"),
        ("/v1/engines", None, 404, None),
        ("/v1/completions", b"no", 400, None),
        ("/v1/completions", {"prompt": "x" * 128}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 128}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x", "model": "large"}, 404, "model_not_found"),
        ("/v1/completions", {"prompt": "x" * (1 << 20)}, 413, None),
        ("/v1/chat/completions", {"messages": []}, 400, None),
    ):
        answered, value = server.ask(path, body)
        assert (answered, value["error"]["code"]) == (status, code), value
        assert value["error"]["message"]


def test_failed_rank_ends_all_and_open_requests_say_why(model):
    """The second rank fails in its sixth step, in the middle of an answer."""
    with serving(model.path, 2, "--idle", "0", SERVED_FAILURE="1:5") as server:
        status, answer = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 50, "temperature": 0})
        assert status == 503
        assert "a part of the model failed" in answer["error"]["message"]
        outputs = [rank.communicate(timeout=60)[0] for rank in server.ranks]
    assert [rank.returncode for rank in server.ranks] == [1, 1], outputs
    assert "this card fell off the bus" in outputs[1]


def test_job_of_two_nodes_serves_and_ends_when_nobody_asks(model, tmp_path):
    """The job that the command submits, with its driver and workers: it answers, and ends well by itself."""
    port = find_free_port()
    asked = settings.ServerSettings(model="./tiny", name="tiny", port=port, idle_s=3)
    options = LaunchOptions(
        module=True, nnodes=2, stacks_after_s=0, script=settings.MODULE, arguments=settings.write_arguments(asked)
    )
    job = Job(tmp_path / "ada", 2)
    (job.work / "tiny").symlink_to(model.path)
    job.send(*command.format_words(options), GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    job.start()
    try:
        job.await_output("tiny is served on port")
        assert Server(port, []).complete("a job", 20) == expect(model, "a job", 20)
        assert job.end() == 0
    finally:
        job.close()
    assert "no request for 3 s: the cards are free" in job.output
    assert "card 1: layers" in job.output
    assert job.state.state == "done"


def test_too_small_card_ends_the_job_with_the_reason(model):
    """In one line, before any weight is read."""
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    done = subprocess.run(
        [sys.executable, "-m", served_ranks.__name__, "--", str(model.path)], cwd=ROOT, check=False,
        env=os.environ | environ | {"SERVED_MEMORY": "1024"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "GiB are short" in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
