"""`gpu-launch instance` against a hub over real HTTP; its answers are JupyterHub 6.1's."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in
from tests.support.product import wait_for

PROFILES = [
    {"name": "cpu", "title": "CPU", "gpu_count": 0, "models": [], "image": "gpuhub/notebook:latest"},
    {"name": "big", "title": "RTX 5090", "gpu_count": 1, "models": ["RTX 5090"], "image": "gpuhub/notebook:latest"},
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with two profiles."""
    monkeypatch.setenv("COLUMNS", "100")
    with logged_in(tmp_path, monkeypatch, {"train.py": ""}) as hub:
        hub.profiles = PROFILES
        yield hub


def do_when(condition: Callable[[], object], act: Callable[[], None]) -> threading.Thread:
    """Act in a thread as soon as the condition is true, while the command waits."""

    def run() -> None:
        wait_for(condition, "the condition", every_s=0.01)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def finish(hub: FakeHub, name: str) -> None:
    """Grant the lease, and have the server answer."""
    hub.grant(name)
    hub.servers[name] |= {"ready": True, "pending": None}


def was_polled(hub: FakeHub) -> bool:
    """Return whether the command waits for a change of the lease."""
    return any(request.startswith("GET /leases/lease-") for request in hub.requests)


def test_start_shows_the_place_in_the_queue(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends when the instance is ready, and says where it is."""
    thread = do_when(lambda: was_polled(hub), lambda: finish(hub, "a"))
    assert main.run_command(["instance", "start", "--model", "rtx5090", "--name", "a"]) == 0
    thread.join()
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        "gpu-launch: Instance a is requested with profile big",
        "gpu-launch: waiting for GPUs: position 2; waits for 1 × RTX 5090: held by ben",
    ]
    assert shown.out.splitlines() == [
        "Instance a is ready on rig1 with RTX 5090.",
        f"Open {hub.url}/user/ada/a/lab or: gpu-launch instance ssh a",
    ]


def test_start_of_the_default_instance_as_json(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout has one document."""
    thread = do_when(lambda: was_polled(hub), lambda: finish(hub, ""))
    assert main.run_command(["instance", "start", "--profile", "big", "--json"]) == 0
    thread.join()
    assert json.loads(capsys.readouterr().out) == {
        "name": "",
        "state": "ready",
        "profile": "big",
        "url": f"{hub.url}/user/ada/",
        "ssh_host": "gpuhub",
        "node": "rig1",
        "gpus": ["RTX 5090"],
        "position": None,
        "waiting_for": None,
        "expected_start": None,
        "expires_at": None,
    }


def test_interrupt_leaves_it_waiting(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends the command alone, says so, and the same command waits again without a second request."""
    thread = do_when(lambda: was_polled(hub), lambda: os.kill(os.getpid(), signal.SIGINT))
    assert main.run_command(["instance", "start", "--profile", "big", "--name", "a"]) == 130
    thread.join()
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "",
        "gpu-launch: Instance a continues without this command: waiting for GPUs: position 2; "
        "waits for 1 × RTX 5090: held by ben",
        "gpu-launch: wait again: gpu-launch instance start --name a; give it up: gpu-launch instance stop a",
    ]
    assert hub.servers["a"]["pending"] == "spawn"
    hub.requests.clear()
    thread = do_when(lambda: was_polled(hub), lambda: finish(hub, "a"))
    assert main.run_command(["instance", "start", "--name", "a"]) == 0
    thread.join()
    assert not any(request.startswith("POST") for request in hub.requests)


def test_detach_does_not_wait(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the state at once."""
    assert main.run_command(["instance", "start", "--profile", "big", "-d"]) == 0
    assert capsys.readouterr().out == "The default instance: waiting\n"


def test_failed_start_has_the_hubs_reason(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is the one that the hub's page shows."""
    hub.failure = "The wait for a GPU has ended: stopped."

    def fail() -> None:
        del hub.servers["a"]
        hub.leases[0]["version"] += 1

    thread = do_when(lambda: was_polled(hub), fail)
    assert main.run_command(["instance", "start", "--profile", "big", "--name", "a"]) == 1
    thread.join()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "gpu-launch: Instance a did not start: The wait for a GPU has ended: stopped."
    )


def test_image_that_a_profile_offers_is_chosen(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the spawn form: one of several; the profile's own is not sent."""
    hub.profiles = [{**PROFILES[1], "images": ["gpuhub/notebook:latest", "gpuhub/llm:latest"]}]
    assert main.run_command(["instance", "start", "--image", "gpuhub/llm", "-d"]) == 0
    assert hub.servers[""]["user_options"] == {"profile": "big", "image": "gpuhub/llm:latest"}
    assert main.run_command(["instance", "start", "--image", "gpuhub/notebook", "--name", "a", "-d"]) == 0
    assert hub.servers["a"]["user_options"] == {"profile": "big"}
    assert main.run_command(["instance", "start", "--image", "lab/jax", "--name", "b"]) == 2
    assert capsys.readouterr().err.endswith("images: gpuhub/llm:latest, gpuhub/notebook:latest\n")


@pytest.mark.parametrize(("flag", "option"), [("--keep", {"keep": "yes"}), ("--no-suspend", {"suspend": "no"})])
def test_flag_is_an_option_of_the_start(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], flag: str, option: dict[str, str]
) -> None:
    """The hub passes it to the broker; one that starts already cannot get it."""
    assert main.run_command(["instance", "start", "--profile", "big", "--name", "a", flag, "-d"]) == 0
    assert hub.servers["a"]["user_options"] == {"profile": "big"} | option
    assert main.run_command(["instance", "start", "--profile", "big", "--name", "b", "-d"]) == 0
    assert hub.servers["b"]["user_options"] == {"profile": "big"}
    capsys.readouterr()
    assert main.run_command(["instance", "start", "--name", "b", flag]) == 2
    assert capsys.readouterr().err == (
        f"gpu-launch: Instance b is starting already.\n{flag} is for a new start: gpu-launch instance stop b\n"
    )


def test_refusals_before_anything_is_requested(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options end the command with status 2, in two lines, and nothing is sent to the hub."""
    hub.add_server("runs")
    hub.add_server("ends", ready=False, pending="stop")
    for words, first in (
        (["--profile", "huge"], "There is no profile huge for you."),
        ([], "Which profile? Name it, or a GPU model with --model."),
        (["--model", "H100"], "--model H100: the cluster has RTX 5070, RTX 5090."),
        (
            ["--profile", "cpu", "--name", "A b"],
            "--name A b: 1 to 32 of a-z, 0-9 and - are needed, with a letter or digit",
        ),
        (["--profile", "cpu", "--name", "runs"], "Instance runs runs already."),
        (["--profile", "cpu", "--name", "ends"], "Instance ends is being stopped."),
    ):
        assert main.run_command(["instance", "start", *words]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith(f"gpu-launch: {first}"), lines
        assert len(lines) <= 2
    assert not any(request.startswith("POST") for request in hub.requests)
    hub.refusal = "There is no profile 'cpu'; choose one of: big"
    assert main.run_command(["instance", "start", "--profile", "cpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().err.splitlines()[-1]) == {"error": hub.refusal}


def test_list_extend_stop_and_rm(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """All states are listed, with the time that is left or the place in the queue."""
    # JupyterHub lists a default server that never ran as a stopped one.
    hub.add_server("", ready=False, stopped=True)
    assert main.run_command(["instance", "list"]) == 0
    assert "You have no instances." in capsys.readouterr().out
    for name in ("a", "b"):
        assert main.run_command(["instance", "start", "--profile", "big", "--name", name, "-d"]) == 0
    finish(hub, "a")
    hub.add_server("old", ready=False, stopped=True)
    assert main.run_command(["instance", "extend", "a", "--time-limit", "4h"]) == 2
    assert "Instance a has no time limit." in capsys.readouterr().err
    hub.leases[0]["expires_at"] = "2026-01-01T00:00:00+00:00"
    assert main.run_command(["instance", "extend", "a", "--time-limit", "4h"]) == 0
    assert capsys.readouterr().out == "Instance a ends in 4 h.\n"
    assert main.run_command(["instance", "list"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["NAME", "a", "b", "old"]
    assert main.run_command(["instance", "list", "--json"]) == 0
    listed = {found["name"]: found for found in json.loads(capsys.readouterr().out)}
    assert {name: found["state"] for name, found in listed.items()} == {"a": "ready", "b": "waiting", "old": "stopped"}
    assert (listed["b"]["position"], listed["a"]["gpus"]) == (2, ["RTX 5090"])
    assert main.run_command(["instance", "extend", "b", "--time-limit", "4h"]) == 2
    assert "Its time begins when it has its GPUs." in capsys.readouterr().err
    assert main.run_command(["instance", "stop", "b"]) == 0
    assert hub.servers["b"]["stopped"]
    assert main.run_command(["instance", "rm", "b"]) == 0
    assert "b" not in hub.servers
    capsys.readouterr()
    assert main.run_command(["instance", "stop", "b"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "gpu-launch: There is no instance b.",
        "Your instances: a. Start one: gpu-launch instance start --name b",
    ]
    assert main.run_command(["instance", "rm"]) == 2


def test_suspend_and_resume(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The state is shown by both and in the list; what waits cannot be suspended, and the broker says why."""
    assert main.run_command(["instance", "start", "--profile", "big", "--name", "a", "-d"]) == 0
    assert main.run_command(["instance", "suspend", "a"]) == 1
    assert "only a notebook that runs can be suspended" in capsys.readouterr().err
    finish(hub, "a")
    assert main.run_command(["instance", "suspend", "a"]) == 0
    assert capsys.readouterr().out == "Instance a: suspended\n"
    assert main.run_command(["instance", "list"]) == 0
    assert "suspended" in capsys.readouterr().out
    assert main.run_command(["instance", "resume", "a"]) == 0
    assert capsys.readouterr().out == "Instance a: resuming\n"
    hub.leases.clear()
    assert main.run_command(["instance", "suspend", "a"]) == 2
    assert "has no GPU to lend" in capsys.readouterr().err


def test_another_token_is_refused(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token that the hub does not know says how to get one."""
    monkeypatch.setenv("GPUHUB_TOKEN", "the-token-of-ben")
    assert main.run_command(["instance", "list"]) == 1
    assert "Log in again with a new token" in capsys.readouterr().err


def test_notebooks_own_token_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a notebook's terminal the commands say what is missing."""
    for name in ("GPUHUB_URL", "GPUHUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "token")
    monkeypatch.setenv("GPUHUB_BROKER_URL", "http://127.0.0.1:9/services/broker")
    assert main.run_command(["instance", "list"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "On your own machine: gpu-launch login https://YOUR-HUB"
