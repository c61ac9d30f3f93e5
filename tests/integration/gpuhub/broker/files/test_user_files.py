"""Files, logs and status files over the API: gpu-launch's own courier on simulated nodes, HTTP over a port."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuhub.broker.files.user_files import MAX_STATE, UserFiles
from gpuhub.config.settings import JobSettings
from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.docker.simulated_nodes import build_cluster, wait_until

RUN = "run-000001"
FILES = "/api/v1/files"


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """The practice closet's three nodes, simulated, with a limit of 1 MiB for uploads and downloads."""
    return Setting(tmp_path, cluster=build_cluster(jobs=JobSettings(upload_limit="1M")))


@pytest.fixture
def running(setting: Setting) -> Iterator[Running]:
    """A broker with a port."""
    with served_broker(setting) as found:
        yield found


def tar_of(files: dict[str, bytes], *members: tarfile.TarInfo) -> bytes:
    """Return a tar archive with these files and further members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
        for member in members:
            tar.addfile(member)
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """Return a member that is not a regular file."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def put(running: Running, path: str, content: Any, token: str = "ada") -> httpx.Response:
    return running.send("PUT", FILES, token, params={"path": path}, content=content)


def get(running: Running, path: str, token: str = "ada") -> httpx.Response:
    return running.send("GET", FILES, token, params={"path": path})


#: Reports and sends what the user wants, as any module of the user's does that Python imports at its start.
ENDLESS_COURIER = """
import os, sys
if "gpu_launch.courier" in sys.orig_argv:
    if "put" in sys.orig_argv:
        os.write(2, b'{"ready": true, "done": {"files": "many"}}\\n')
        os._exit(0)
    os.write(2, b'{"ready": true}\\n')
    for _ in range(1024):
        os.write(1, bytes(65536))
"""


def replace_courier(setting: Setting, code: str) -> Path:
    """Write code that runs in place of the courier; return the folder of its module."""
    folder = setting.folder / "user-site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return folder


def names_in(answer: httpx.Response) -> dict[str, bytes | None]:
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/x-tar"), answer.text
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        members = tar.getmembers()
        return {one.name: tar.extractfile(one).read() if one.isreg() else None for one in members}  # type: ignore[union-attr]


def launch(running: Running, **asked: Any) -> dict[str, Any]:
    body = {"run_id": RUN, "detached": True, **asked}
    made = running.send("POST", "/api/v1/jobs", json=body)
    assert made.status_code == 201, made.text
    return dict(made.json())


def stop(running: Running, job: dict[str, Any]) -> None:
    running.send("DELETE", f"/api/v1/jobs/{job['id']}")
    wait_until(lambda: running.send("GET", f"/api/v1/jobs/{job['id']}").json()["state"] == "ended", "the job has ended")


def run_folder(setting: Setting) -> Path:
    folder = setting.home("ada") / ".gpu_launch" / "jobs" / RUN
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_an_archive_with_endless_names_takes_little_memory(setting: Setting, running: Running) -> None:
    """Python's tarfile reads the whole name before anything of the member can be judged."""
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 1024**3
    sent = io.BytesIO()
    with gzip.open(sent, "wb") as packed:
        packed.write(name.tobuf())
        for _ in range(600):
            packed.write(bytes(2**20))
    answer = put(running, "work", sent.getvalue())
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert "a header is too long" in answer.json()["detail"]


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_uploaded_files_can_be_downloaded(setting: Setting, running: Running, packed: Any) -> None:
    """New parent folders belong to the user; a fetched archive begins with the name of the requested path."""
    sent = {"train.py": b"print(1)\n", "data/numbers": os.urandom(300_000), "a name\nwith 'quotes'": b""}
    answer = put(running, "work/train", packed(tar_of(sent, special("latest", tarfile.SYMTYPE, "data"))))
    assert (answer.status_code, answer.json()) == (200, {"files": 4, "bytes": 300_009})
    home = setting.home("ada")
    assert [oct((home / folder).stat().st_mode & 0o777) for folder in ("work", "work/train")] == ["0o700"] * 2
    assert (home / "work/train/data/numbers").read_bytes() == sent["data/numbers"]
    found = names_in(get(running, "work/train"))
    assert found == {f"train/{name}": content for name, content in sent.items()} | {
        "train": None, "train/data": None, "train/latest": None,
    }  # fmt: skip
    assert names_in(get(running, "work/train/train.py")) == {"train.py": b"print(1)\n"}


def test_every_user_has_their_own_home(setting: Setting, running: Running) -> None:
    """A path of ben's is in ben's home."""
    put(running, "work", tar_of({"secret": b"ada's"}))
    answer = get(running, "work/secret", "ben")
    assert (answer.status_code, answer.json()["code"]) == (404, "not-found")
    assert put(running, "work", tar_of({"secret": b"ben's"}), "ben").status_code == 200
    assert (setting.home("ada") / "work/secret").read_bytes() == b"ada's"
    assert len(setting.couriers.specs) == 2


@pytest.mark.parametrize(
    "member",
    [
        special("../outside", tarfile.REGTYPE),
        special("/etc/outside", tarfile.REGTYPE),
        special("link", tarfile.SYMTYPE, "../../outside"),
        special("link", tarfile.SYMTYPE, "/etc/passwd"),
        special("hard", tarfile.LNKTYPE, "../outside"),
        special("device", tarfile.CHRTYPE),
        special("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda member: f"{member.name} {member.type.decode()}",
)
def test_archive_members_outside_the_folder_are_refused(
    setting: Setting, running: Running, member: tarfile.TarInfo
) -> None:
    """The error has the reason, and nothing is written outside the folder."""
    (setting.home("ada") / "outside").write_text("mine")
    answer = put(running, "work", tar_of({}, member))
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert member.name.split("/")[-1] in answer.json()["detail"]
    assert sorted(path.name for path in setting.home("ada").iterdir()) == ["outside", "work"]
    assert list((setting.home("ada") / "work").iterdir()) == []


@pytest.mark.parametrize("path", ["../ben", "/etc", "a/../../b", "nul\0"])
def test_request_paths_outside_the_home_are_refused(running: Running, path: str) -> None:
    """They are refused before a courier is started."""
    for answer in (put(running, path, tar_of({})), get(running, path)):
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert running.setting.couriers.specs == []


def test_symlink_out_of_the_home_is_not_followed(setting: Setting, running: Running) -> None:
    """gpuhub reads and writes only in the home, wherever a user's link points."""
    (setting.home("ada") / "elsewhere").symlink_to("/etc")
    for answer in (put(running, "elsewhere/x", tar_of({})), get(running, "elsewhere/passwd")):
        assert (answer.status_code, answer.json()["detail"].endswith("this leads out of the home")) == (422, True)
    setting.home("ben")


def test_commands_in_a_path_are_not_executed(setting: Setting, running: Running) -> None:
    """No shell is involved: options and commands in a path are part of the name."""
    for name in ("--limit=9", "-h", "$(touch x); `touch y`", "a b"):
        assert put(running, name, tar_of({"f": b"1"})).status_code == 200
        assert names_in(get(running, f"{name}/f")) == {"f": b"1"}
    assert not {"x", "y"} & {path.name for path in setting.home("ada").iterdir()}


@pytest.mark.parametrize(
    "content",
    [b"", b"no tar at all", tar_of({"a": b"1" * 5000})[:3000], gzip.compress(b"x")[:9]],
    ids=["empty", "no tar", "cut tar", "cut gzip"],
)
def test_incomplete_tar_is_refused(running: Running, content: bytes) -> None:
    """The error has the reason."""
    answer = put(running, "work", content)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert answer.json()["detail"].startswith("the upload is not a complete tar archive: ")


def test_upload_over_the_limit_is_refused_while_streaming(setting: Setting, running: Running) -> None:
    """The declared size and compression make no difference; the client reads the reason. Downloads have the same limit."""
    noise = random.Random(1).randbytes(3 * 1024**2)
    packed = gzip.compress(tar_of({"zeros": bytes(3 * 1024**2)}))
    assert len(packed) < 10_000
    for content in (tar_of({"noise": noise}), iter([tar_of({"noise": noise})]), packed):
        answer = put(running, "work", content)
        assert (answer.status_code, answer.json()["code"]) == (413, "too-large")
    (setting.home("ada") / "large").write_bytes(noise)
    answer = get(running, "large")
    assert (answer.status_code, answer.json()["code"]) == (413, "too-large")


def test_full_home_is_reported(running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error is the operating system's message."""
    shim = (
        f"import os; os.mkdir = lambda *_, **__: (_ for _ in ()).throw(OSError({errno.EDQUOT}, 'Disk quota exceeded'))"
    )
    (tmp_path / "sitecustomize.py").write_text(shim)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = put(running, "work", tar_of({"a": b"1"}))
    assert (answer.status_code, answer.json()["code"]) == (507, "no-space")
    assert answer.json()["detail"] == "Disk quota exceeded"


def test_disconnect_during_an_upload_ends_its_process(running: Running) -> None:
    """A client disconnects during an upload: no process is left, and the next transfer is accepted."""

    def half() -> Iterator[bytes]:
        yield tar_of({"a": b"1" * 600_000})[:300_000]
        wait_until(lambda: running.setting.couriers.specs and _programs(running), "the courier runs")
        raise KeyError("the client is gone")

    with pytest.raises(KeyError):
        put(running, "work", half())
    wait_until(lambda: all(one.poll() is not None for one in _programs(running)), "the courier has ended")
    user_files: UserFiles = running.app.state.user_files
    wait_until(lambda: not user_files.streams._open, "the place is free")
    assert put(running, "work", tar_of({"a": b"1"})).status_code == 200


def _programs(running: Running) -> list[Any]:
    return [one for node in running.setting.nodes.values() for one in node.execs.running]


def test_slow_download_is_backpressured(setting: Setting, tmp_path: Path) -> None:
    """A slow download is neither buffered in the broker nor lost, and at most two run at once."""
    setting.cluster = build_cluster(jobs=JobSettings(upload_limit="64M"))
    content = os.urandom(24 * 1024**2)
    (setting.home("ada") / "large").write_bytes(content)
    with (
        served_broker(setting) as running,
        httpx.Client(trust_env=False, headers={"Authorization": "token ada"}, timeout=60) as client,
    ):
        url = f"{running.url}{FILES}"
        with client.stream("GET", url, params={"path": "large"}) as first:
            parts = first.iter_raw()
            head = next(parts)
            (program,) = _programs(running)
            with client.stream("GET", url, params={"path": "large"}) as second:
                assert second.status_code == 200
                refused = get(running, "large")
                assert (refused.status_code, refused.json()["code"]) == (429, "too-many-streams")
                assert get(running, "large", "ben").status_code == 404
            assert program.poll() is None
            whole = head + b"".join(parts)
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        assert tar.extractfile("large").read() == content  # type: ignore[union-attr]


# -- logs and states --------------------------------------------------------------------------------------------------


def test_logs_are_followed_to_the_end_of_the_job(setting: Setting, running: Running) -> None:
    """The stream begins before the job starts and includes the last output."""
    held = running.send("POST", "/api/v1/leases", "ben", json={"profile": "rtx5090", "key": "k"}).json()
    job = launch(running, nnodes=3)
    assert job["state"] == "waiting"
    got: list[bytes] = []
    arrived = threading.Event()

    def follow() -> None:
        headers = {"Authorization": "token ada"}
        with httpx.Client(trust_env=False, headers=headers, timeout=60) as client:
            url = f"{running.url}/api/v1/jobs/{job['id']}/logs"
            with client.stream("GET", url, params={"follow": 1, "offset": 2}) as answer:
                got.append(str(answer.status_code).encode())
                for part in answer.iter_raw():
                    got.append(part)
                    arrived.set()

    reading = threading.Thread(target=follow)
    reading.start()
    wait_until(lambda: got, "the answer begins while the job waits")
    running.send("DELETE", f"/api/v1/leases/{held['id']}", "ben")
    log = run_folder(setting) / "output.log"
    log.write_bytes(b"123 first\n")
    assert arrived.wait(60)
    with log.open("ab") as file:
        file.write(b"last \xff\n")
    stop(running, job)
    reading.join(60)
    assert not reading.is_alive()
    assert (got[0], b"".join(got[1:])) == (b"200", b"3 first\nlast \xff\n")
    again = running.send("GET", f"/api/v1/jobs/{job['id']}/logs", params={"offset": 10})
    assert (again.content, again.headers["Content-Type"]) == (b"last \xff\n", "text/plain; charset=utf-8")
    path = f"/api/v1/jobs/{job['id']}/logs"
    assert running.send("GET", path, params={"tail": 4}).content == b"t \xff\n"
    assert running.send("GET", path, params={"tail": 1000}).content == b"123 first\nlast \xff\n"
    refused = running.send("GET", path, params={"tail": 4, "rank": 0})
    assert (refused.status_code, refused.json()["detail"].partition(":")[0]) == (422, "tail")


def test_disconnected_log_followers_leave_nothing(setting: Setting, running: Running) -> None:
    """Four streams may follow, and the fifth is refused; when they have ended, their couriers end and others may
    follow.
    """
    job = launch(running)
    headers = {"Authorization": "token ada"}
    url = f"{running.url}/api/v1/jobs/{job['id']}/logs"
    with httpx.Client(trust_env=False, headers=headers, timeout=60) as client:
        streams = [client.stream("GET", url, params={"follow": 1}) for _ in range(4)]
        answers = [stream.__enter__() for stream in streams]
        assert [answer.status_code for answer in answers] == [200] * 4
        refused = client.get(url)
        assert refused.status_code == 429
        assert refused.json()["detail"] == "ada: 4 logs being read at once are the limit: end one, or try again later"
        for stream in streams:
            stream.__exit__(None, None, None)
    wait_until(lambda: all(one.poll() is not None for one in _programs(running)), "their couriers have ended")
    wait_until(lambda: running.send("GET", url[len(running.url) :]).status_code == 200, "others may read")


def test_output_of_one_rank_is_of_the_latest_start(setting: Setting, running: Running) -> None:
    """Both streams of a rank can be read; ranks are found by node."""
    job = launch(running, nnodes=1)
    logs = run_folder(setting) / "logs"
    for start, text in (("node0", "old"), ("node0-restart1", "new")):
        for stream in ("stdout", "stderr"):
            file = logs / start / f"{RUN}_x" / "attempt_0" / "0" / f"{stream}.log"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text} {stream}\n")
        os.utime(file.parent, ns=(10**18 + len(start), 10**18 + len(start)))
    path = f"/api/v1/jobs/{job['id']}/logs"
    assert running.send("GET", path, params={"rank": 0}).text == "new stdout\nnew stderr\n"
    assert running.send("GET", path, params={"rank": 1}).text == ""


def test_status_of_a_job_is_returned(setting: Setting, running: Running) -> None:
    """The status is as the job wrote it; there is none before that, and invalid JSON is ignored."""
    job = launch(running)
    path = f"/api/v1/jobs/{job['id']}/state"
    missing = running.send("GET", path)
    assert (missing.status_code, missing.json()["detail"]) == (404, "the job has not written its status yet")
    state = {"state": "running", "attempt": 1, "text": "é"}
    (run_folder(setting) / "state.json").write_text(json.dumps(state))
    assert running.send("GET", path).json() == state
    stop(running, job)
    assert running.send("GET", path).json() == state
    (run_folder(setting) / "state.json").write_text("{")
    assert running.send("GET", path).status_code == 409


@pytest.mark.parametrize(
    ("content", "status"),
    [
        pytest.param(b'"%s"' % (b"x" * (MAX_STATE - 1)), 413, id="one byte too many"),
        pytest.param(b"[[]" + b",[]" * 4 * 1024**2 + b"]", 413, id="many small values"),
        pytest.param(b"[" * 200_000, 409, id="deeply nested"),
        pytest.param(b"\xff", 409, id="not text"),
    ],
)
def test_status_of_any_size_is_refused_or_passed_on(
    setting: Setting, running: Running, content: bytes, status: int
) -> None:
    """The file is the user's own: the courier reads no more than a driver writes, and the broker takes no more."""
    job = launch(running)
    path = f"/api/v1/jobs/{job['id']}/state"
    (run_folder(setting) / "state.json").write_bytes(content)
    refused = running.send("GET", path)
    assert (refused.status_code, len(refused.content) < 1000) == (status, True), refused.text
    assert "another program changed the file" in refused.json()["detail"]


def test_courier_that_sends_a_status_without_end_is_left(
    setting: Setting, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker does not rely on the courier's own limit, nor on the shape of what it reports."""
    job = launch(running)
    monkeypatch.setenv("PYTHONPATH", str(replace_courier(setting, ENDLESS_COURIER)), prepend=os.pathsep)
    refused = running.send("GET", f"/api/v1/jobs/{job['id']}/state")
    assert (refused.status_code, refused.json()["code"]) == (413, "too-large")
    odd = put(running, "work", tar_of({}))
    assert (odd.status_code, odd.json()["detail"]) == (
        500,
        "the courier on the node reported no numbers of files and bytes",
    )


def test_follow_of_a_notebooks_job_ends_at_once(running: Running) -> None:
    """Following it ends at once instead of never."""
    job = launch(running, detached=False)
    for tail in ("logs", "state"):
        answer = running.send("GET", f"/api/v1/jobs/{job['id']}/{tail}")
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
