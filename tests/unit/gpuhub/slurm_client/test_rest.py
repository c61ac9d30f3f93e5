"""SlurmRest with an answer of a test's own in the place of slurmrestd; and its tokens."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuhub.common.errors import SetupError
from gpuhub.config.slurm import SlurmSettings
from gpuhub.slurm_client import rest
from gpuhub.slurm_client.cli import SlurmCliClient
from gpuhub.slurm_client.factory import make_client
from gpuhub.slurm_client.interface import SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.models import SlurmJobState, SlurmSubmission, Submitter
from gpuhub.slurm_client.rest import TOKEN_LIFETIME_S, SlurmRestClient, TokenKey
from gpuhub.slurm_client.submission import HOLDER_SCRIPT

DATA = Path(__file__).parent / "data"
META = {"Slurm": {"version": {"major": 22, "minor": 5, "micro": 8}}}
SUBMISSION = SlurmSubmission(
    name="gh-lease-1", submitter=Submitter(name="ada", uid=71001, gid=71001), script=HOLDER_SCRIPT, gpus_per_node=1
)
Answer = tuple[int, Any]


def server(
    answers: dict[str, Answer], *, version: int = 38, seen: list[httpx.Request] | None = None
) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(request)
        path = request.url.path
        if not path.startswith(f"/slurm/v0.0.{version}/"):
            return httpx.Response(404, text="Unable find requested URL.")
        key = f"{request.method} {path.partition(f'v0.0.{version}/')[2]}"
        if key == "GET ping" and key not in answers:
            return httpx.Response(200, json={"meta": META, "errors": []})
        status, document = answers.get(key, (404, "Unable find requested URL."))
        return httpx.Response(status, **({"text": document} if isinstance(document, str) else {"json": document}))

    return answer


def build_client(answers: dict[str, Answer], **further: Any) -> SlurmRestClient:
    return SlurmRestClient("http://slurm", TokenKey(b"key"), transport=httpx.MockTransport(server(answers, **further)))


def build_error(number: int, error: str, **further: Any) -> dict[str, Any]:
    return {"meta": META, "errors": [{"error_number": number, "error": error}], **further}


def build_running_job(user_id: int = 71001) -> dict[str, Any]:
    return {"errors": [], "jobs": [{"job_id": 5, "name": "n", "user_id": user_id, "job_state": "RUNNING"}]}


def test_rest_token_is_a_signed_jwt() -> None:
    token = TokenKey(b"key").create_token("ada", 1000.7)
    head, claims, signature = token.split(".")

    def decode(part: str) -> bytes:
        return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))

    assert json.loads(decode(head)) == {"alg": "HS256", "typ": "JWT"}
    assert json.loads(decode(claims)) == {"exp": 1000 + TOKEN_LIFETIME_S, "iat": 970, "sun": "ada"}
    assert decode(signature) == hmac.digest(b"key", f"{head}.{claims}".encode(), hashlib.sha256)
    assert "key" not in repr(TokenKey(b"key")).removeprefix("Key")


def test_jwt_key_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "jwt.key"
    with pytest.raises(SetupError, match="cannot be read"):
        TokenKey.read(path)
    path.touch()
    with pytest.raises(SetupError, match="is empty"):
        TokenKey.read(path)
    path.write_bytes(b"k")
    path.chmod(0o600)
    assert TokenKey.read(path) == TokenKey(b"k")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_jwt_key_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "jwt.key"
    path.write_bytes(b"k")
    path.chmod(mode)
    with pytest.raises(SetupError, match=f"mode {mode:04o}, so others may read it: chmod 600 {path}"):
        TokenKey.read(path)


def test_jwt_key_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "jwt.key"
    path.write_bytes(b"k")
    path.chmod(0o600)
    status = os.stat_result((*path.stat()[:4], 71001, *path.stat()[5:]))
    monkeypatch.setattr(os, "fstat", lambda _file: status)
    monkeypatch.setattr(rest, "find_account_name", lambda _uid: "ada")
    with pytest.raises(SetupError, match=r"belongs to ada, .* it must belong to root, slurm"):
        TokenKey.read(path, "root", "slurm")
    assert TokenKey.read(path, "ada") == TokenKey(b"k")


async def test_client_is_chosen_by_the_api_setting(tmp_path: Path) -> None:
    path = tmp_path / "jwt.key"
    path.write_bytes(b"k")
    path.chmod(0o600)
    by_rest = make_client(SlurmSettings(api="rest", rest_url="unix:///run/slurmrestd.sock", rest_key=path))
    by_commands = make_client(SlurmSettings())
    assert isinstance(by_rest, SlurmRestClient)
    assert isinstance(by_commands, SlurmCliClient)
    await by_rest.close()
    await by_commands.close()


async def test_snapshot_uses_the_newest_common_api_version() -> None:
    seen: list[httpx.Request] = []
    answers = {
        "GET jobs": (200, json.loads((DATA / "squeue-22.05.json").read_text())),
        "GET nodes": (200, json.loads((DATA / "sinfo-22.05.json").read_text())),
    }
    api = build_client(answers, seen=seen, version=40)
    look = await api.read_snapshot()
    assert (len(look.jobs), len(look.nodes)) == (9, 3)
    assert {request.headers["X-SLURM-USER-NAME"] for request in seen} == {"root"}
    seen.clear()
    await api.read_snapshot()
    assert sorted(request.url.path for request in seen) == ["/slurm/v0.0.40/jobs", "/slurm/v0.0.40/nodes"]
    with pytest.raises(SlurmRefused, match="supports none"):
        await build_client({}, version=36).read_snapshot()


async def test_job_is_submitted_as_its_owner() -> None:
    seen: list[httpx.Request] = []
    answers = {"POST job/submit": (200, {"errors": [], "job_id": 5}), "GET job/5": (200, build_running_job())}
    assert await build_client(answers, seen=seen).submit(SUBMISSION) == 5
    posted = next(request for request in seen if request.method == "POST")
    assert posted.headers["X-SLURM-USER-NAME"] == "ada"
    assert json.loads(posted.content)["job"]["gres"] == "gpu:1"


async def test_job_submitted_under_another_uid_is_cancelled() -> None:
    seen: list[httpx.Request] = []
    answers = {
        "POST job/submit": (200, {"errors": [], "job_id": 5}),
        "GET job/5": (200, build_running_job(99)),
        "DELETE job/5": (200, {"errors": []}),
    }
    with pytest.raises(SlurmRefused, match="to user 99"):
        await build_client(answers, seen=seen).submit(SUBMISSION)
    assert seen[-1].method == "DELETE"


@pytest.mark.parametrize(
    ("answer", "kind", "word"),
    [
        ((500, build_error(2000, "Invalid partition name specified")), SlurmRefused, "Invalid partition"),
        ((400, {"errors": [{"error_code": 9001, "error": "Failure during parsing"}]}), SlurmRefused, "parsing"),
        ((500, build_error(1800, "Unable to contact slurm controller (connect failure)")), SlurmUnreachable, "contact"),
        ((500, build_error(-1, "Unspecified error")), SlurmUnreachable, "refuses the token"),
        ((401, "Authentication failure"), SlurmRefused, "refuses the token"),
        ((500, "oops"), SlurmUnreachable, "an unknown form"),
        ((200, []), SlurmUnreachable, "an unknown form"),
        ((500, {"errors": []}), SlurmRefused, "without a message"),
    ],
)
async def test_rest_error_responses_are_classified(answer: Answer, kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        await build_client({"POST job/submit": answer}).submit(SUBMISSION)


async def test_snapshot_with_errors_counts_as_unreachable() -> None:
    answers = {
        "GET jobs": (200, build_error(-1, "Unspecified error", jobs=[])),
        "GET nodes": (200, {"errors": [], "nodes": []}),
    }
    with pytest.raises(SlurmUnreachable):
        await build_client(answers).read_snapshot()


async def test_operations_on_ended_jobs_succeed() -> None:
    seen: list[httpx.Request] = []
    gone = (500, build_error(2017, "Invalid job id specified"))
    waits = (500, build_error(2020, "Job can not be altered now, try again later"))
    api = build_client({"DELETE job/5": gone, "DELETE job/6": waits, "GET job/5": gone, "POST job/5": gone}, seen=seen)
    assert await api.find_job(5) is None
    await api.cancel(5, at_once=True)
    await api.cancel(6)
    await api.persist_job(5)
    assert [request.url.path for request in seen if request.method == "DELETE"] == [
        "/slurm/v0.0.38/job/5",
        "/slurm/v0.0.38/job/6",
    ]
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        await api.set_time_limit(5, 60)


async def test_script_is_signalled_before_its_job_is_cancelled() -> None:
    seen: list[httpx.Request] = []
    await build_client(
        {"GET job/5": (200, build_running_job()), "DELETE job/5": (200, {"errors": []})}, seen=seen
    ).cancel(5, at_once=True)
    queries = [request.url.query for request in seen if request.method == "DELETE"]
    assert len(queries) > 2
    assert set(queries[:-1]) == {b"signal=USR1"}
    assert queries[-1] == b""


async def test_only_a_job_of_the_same_name_is_changed() -> None:
    """A slurmctld that crashed gives numbers again."""
    seen: list[httpx.Request] = []
    api = build_client({"GET job/5": (200, build_running_job())}, seen=seen)
    await api.cancel(5, name="another", at_once=True)
    await api.persist_job(5, name="another")
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        await api.set_time_limit(5, 60, name="another")
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        await api.shrink(5, ["sx1"], name="another")
    assert {request.method for request in seen} == {"GET"}


async def test_a_site_without_accounts() -> None:
    partitions = json.loads((DATA / "rest-partitions-22.05.json").read_text())
    answers = {
        "GET partitions": (200, partitions),
        "GET nodes": (200, json.loads((DATA / "sinfo-22.05.json").read_text())),
        "GET jobs": (200, {"errors": [], "jobs": [{"cluster": "lab"}]}),
        "GET reservations": (200, {"errors": [], "reservations": [{"name": "course"}]}),
    }
    api = build_client(answers)
    site = await api.read_site()
    assert (site.version, site.cluster, site.reservations) == ((22, 5, 8), "lab", ("course",))
    assert (site.has_accounting, site.accounts, site.qos) == (False, (), ())
    with pytest.raises(SlurmRefused, match="without slurmdbd"):
        await api.read_gpu_time(0, 1)
    old = {"meta": {"Slurm": {"version": {"major": 21, "minor": 8, "micro": 8}}}, "errors": []}
    with pytest.raises(SetupError, match="too old"):
        await build_client({**answers, "GET ping": (200, old)}).read_site()
    with pytest.raises(SetupError, match="cannot be used"):
        await build_client({"GET ping": (401, "no")}).read_site()


async def test_rest_client_connects_over_a_unix_socket(tmp_path: Path) -> None:
    body = json.dumps(build_running_job()).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    path = tmp_path / "s"
    listener = await asyncio.start_unix_server(serve, path)
    async with listener:
        api = SlurmRestClient(f"unix://{path}", TokenKey(b"key"))
        job = await api.find_job(5)
        await api.close()
    assert job is not None
    assert job.state is SlurmJobState.RUNNING
    silent = SlurmRestClient(f"unix://{tmp_path}/nothing", TokenKey(b"key"))
    with pytest.raises(SlurmUnreachable, match="slurmrestd does not answer"):
        await silent.read_snapshot()
    await silent.close()


async def test_drains_need_a_newer_slurmrestd() -> None:
    """That of Slurm 22.05 has no request that changes a node."""
    client = build_client({})
    with pytest.raises(SlurmRefused, match=r"slurmrestd of Slurm 22\.05 cannot drain nodes"):
        await client.drain_node("sx1", "gpuhub: GPU 0: Xid 79")
    seen: list[httpx.Request] = []
    client = build_client({"POST node/sx1": (200, {"errors": []})}, version=42, seen=seen)
    await client.drain_node("sx1", "gpuhub: GPU 0: Xid 79")
    await client.undrain_node("sx1")
    assert [json.loads(request.content) for request in seen if request.method == "POST"] == [
        {"state": ["DRAIN"], "reason": "gpuhub: GPU 0: Xid 79"},
        {"state": ["UNDRAIN"], "reason": "gpuhub: all GPUs work again"},
    ]
