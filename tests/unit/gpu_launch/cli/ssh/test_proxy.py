"""What the hosts of the settings lead to, and the errors that ssh shows, against a hub over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from gpu_launch.cli.context import Context
from gpu_launch.cli.ssh.files import SshFiles
from gpu_launch.cli.ssh.proxy import find_target
from gpu_launch.errors import BrokerError, UsageError
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in

KEY = "ssh-ed25519 AAAA+/"
RUN = "run-20260101-000000-abc123"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with servers and a running job."""
    with logged_in(tmp_path, monkeypatch, {"train.py": ""}) as hub:
        hub.add_server("")
        hub.add_server("big")
        hub.add_server("slow", ready=False, pending="spawn")
        hub.add_server("ends", ready=False, pending="stop")
        hub.add(RUN, name="train")
        hub.run()
        yield hub


@pytest.mark.parametrize(
    ("host", "path"),
    [
        ("gpuhub", "/user/ada/gpu-launch/ssh?key="),
        ("gpuhub-big", "/user/ada/big/gpu-launch/ssh?key="),
        ("gpuhub-train", f"/services/broker/api/v1/jobs/job-{RUN}/ssh?worker=0&key="),
        ("gpuhub-abc123", f"/services/broker/api/v1/jobs/job-{RUN}/ssh?worker=0&key="),
        ("gpuhub-train.0", f"/services/broker/api/v1/jobs/job-{RUN}/ssh?worker=0&key="),
    ],
)
def test_hosts(hub: FakeHub, host: str, path: str) -> None:
    """An instance, or a job by name, run id or the end of it, with the number of a worker."""
    target = find_target(Context(), SshFiles.locate("gpuhub"), host, KEY)
    assert target == f"ws{hub.url.removeprefix('http')}{path}ssh-ed25519+AAAA%2B%2F"


def test_instance_comes_before_a_job_of_its_name(hub: FakeHub) -> None:
    """Both may have any name."""
    hub.add_server("train")
    assert "/user/ada/train/" in find_target(Context(), SshFiles.locate("gpuhub"), "gpuhub-train", KEY)


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("gpuhub-slow", "Instance slow is still starting.\nIts place in the queue: gpu-launch instance list"),
        ("gpuhub-ends", "Instance ends is being stopped.\nWhat runs: gpu-launch instance list, ps"),
        ("gpuhub-train.7", f"{RUN} has no worker 7; its workers are 0.\nThe first one: ssh gpuhub-abc123"),
        (
            "gpuhub-abc",
            "You have no running instance or job abc.\n"
            "Start one: gpu-launch instance start --name abc --profile PROFILE; "
            "what runs: gpu-launch instance list, ps",
        ),
        (
            "gpuhub-x.y",
            "You have no running instance or job x.y.\n"
            "Start one: gpu-launch instance start --profile PROFILE; what runs: gpu-launch instance list, ps",
        ),
        (
            "gpuhub-x-1",
            "You have no running instance or job x-1.\nStart one: gpu-launch instance start --name x-1 --profile PROFILE; "
            "what runs: gpu-launch instance list, ps",
        ),
    ],
)
def test_nothing_to_connect_to(hub: FakeHub, host: str, text: str) -> None:
    """Two lines: what is wrong, and what would work."""
    with pytest.raises(UsageError) as error:
        find_target(Context(), SshFiles.locate("gpuhub"), host, KEY)
    assert str(error.value) == text


def test_ended_job_is_no_host(hub: FakeHub) -> None:
    """Its containers are gone."""
    hub.end()
    with pytest.raises(UsageError, match="You have no running instance or job train"):
        find_target(Context(), SshFiles.locate("gpuhub"), "gpuhub-train", KEY)


def test_other_hosts_are_refused(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings that were changed by hand."""
    assert main.run_command(["ssh-proxy", "--prefix", "gpuhub", "elsewhere"]) == 1
    assert "elsewhere is not a host of ssh-config: such are gpuhub and gpuhub-NAME." in capsys.readouterr().err


def test_unknown_token_is_refused(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub, which is asked first, has another status for it than the broker, with which the way to a new one is shown."""
    monkeypatch.setenv("GPUHUB_TOKEN", "the-token-of-ben")
    with pytest.raises(BrokerError, match="refuses this token") as error:
        find_target(Context(), SshFiles.locate("gpuhub"), "gpuhub", KEY)
    assert error.value.status == 401
