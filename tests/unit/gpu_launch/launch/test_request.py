"""Network choice, torchrun's command line, wire parsing, run folders and the working folder's checks."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import stat
from datetime import UTC, datetime
from unittest import mock

import pytest

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.problems import parse_problem
from gpu_launch.common import network, run_folder
from gpu_launch.common.launch_spec import Channel, LaunchSpec, Membership, NodeInfo
from gpu_launch.common.network import Interface
from gpu_launch.errors import GpuLaunchError, NetworkError, UsageError
from gpu_launch.launch import request
from gpu_launch.launch.request import LaunchRequest, validate
from gpu_launch.launch.workers.worker_group import check_job
from gpu_launch.options import command
from gpu_launch.prediction import figures, report
from gpu_launch.training import diloco
from gpu_launch.worker import main as worker
from gpu_launch.worker.runners import torchrun
from gpu_launch.worker.runners.base import build_node_environ
from tests.support.launch import measured

INTERFACES = [
    Interface(name="lo", address="127.0.0.1"),
    Interface(name="eth0", address="172.18.0.2"),
    Interface(name="eth1", address="10.0.1.5"),
]
SPEC = LaunchSpec(
    run_id="run-1",
    attempt=0,
    membership=Membership(
        includes_notebook=True, workers=(0, 1), nodes=("rig1", "rig2"), nproc_per_node=1, preemptions=2
    ),
    master_addr="10.0.1.2",
    master_port=4711,
    coordinator_port=4712,
    command=("it's; a train.py", "--epochs", "2"),
    module=False,
    no_python=False,
    torchrun_flags=("--role=x",),
    shutdown_s=None,
    cwd="/home/ada/my work",
    log_dir="/home/ada/logs",
    environ={"NCCL_DEBUG": "INFO"},
    python_path="",
    channel=Channel(url="tcp://10.0.1.2:1", server_public=b"s", client_public=b"c", client_secret=b"hidden"),
)


def test_the_address_on_the_users_network_is_chosen():
    """Whatever other networks the container is on."""
    assert network.choose_interface(INTERFACES, "10.0.1.0/24") == INTERFACES[2]
    assert network.choose_interface(INTERFACES, "10.9.0.0/24") is None
    with pytest.raises(NetworkError, match="not a subnet"):
        network.choose_interface(INTERFACES, "rig1")


def test_a_node_without_containers_is_reached_at_its_own_address():
    """Of the loopback every address is there."""
    own = INTERFACES[2]
    assert network.choose_interface(INTERFACES, f"{own.address}/32") == own
    assert network.choose_interface(INTERFACES, "10.9.0.1/32") is None
    assert network.choose_interface(INTERFACES, "127.0.0.11/32") == Interface(name="lo", address="127.0.0.11")


def test_free_port_is_outside_the_ephemeral_range(monkeypatch, tmp_path):
    """Unless it may give nearly all; one in use is passed over."""
    given = tmp_path / "range"
    monkeypatch.setattr(network, "_PORT_RANGE_FILE", given)
    for text in ("32768\t60999\n", "nonsense", ""):
        given.write_text(text)
        assert network.find_free_port() in range(20000, 32768)
    given.write_text("1024\t65535\n")
    assert len({network.find_free_port() for _ in range(20)}) > 1
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        taken = used.getsockname()[1]
        monkeypatch.setattr(network, "_LOWEST_PORT", taken)
        monkeypatch.setattr(network, "_ENOUGH", 1)
        given.write_text(f"{taken + 1}\t60999\n")
        assert network.find_free_port() != taken


def test_build_torchrun_command():
    """Golden: static rendezvous, all streams to files, the script's words as they are."""
    assert torchrun.build_arguments(SPEC, node_rank=1, local_addr="10.0.1.3") == [
        "--nnodes=3",
        "--node-rank=1",
        "--nproc-per-node=1",
        "--master-addr=10.0.1.2",
        "--master-port=4711",
        "--local-addr=10.0.1.3",
        "--rdzv-id=run-1",
        "--max-restarts=0",
        "--log-dir=/home/ada/logs/node1",
        "--redirects=3",
        "--role=x",
        "it's; a train.py",
        "--epochs",
        "2",
    ]


def test_restarts_have_separate_folders_and_modules_their_flag():
    """Logs of a start are never mixed with those of another."""
    again = dataclasses.replace(SPEC, attempt=2, module=True, command=("pkg.train",))
    arguments = torchrun.build_arguments(again, node_rank=0, local_addr="10.0.1.2")
    assert "--log-dir=/home/ada/logs/node0-restart2" in arguments
    assert arguments[-2:] == ["--module", "pkg.train"]


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, ["--module", "gpu_launch.worker.rank_main", "it's; a train.py", "--epochs", "2"]),
        ({"module": True}, ["--module", "gpu_launch.worker.rank_main", "-m", "it's; a train.py", "--epochs", "2"]),
        ({"no_python": True}, ["--role=x", "--no-python", "it's; a train.py", "--epochs", "2"]),
    ],
)
def test_ranks_with_a_gpu_share_run_with_the_memory_cap(changes, end):
    """All but programs that are not Python."""
    spec = dataclasses.replace(SPEC, **changes)
    arguments = torchrun.build_arguments(spec, node_rank=0, local_addr="10.0.1.2", capped=True)
    assert arguments[-len(end) :] == end


@pytest.mark.parametrize("changes", [{"comm": "bf16"}, {"predict": "key"}])
def test_ranks_with_another_communication_or_a_profile_are_prepared(changes):
    """Under torchrun too, and by variables."""
    spec = dataclasses.replace(SPEC, **changes)
    arguments = torchrun.build_arguments(spec, node_rank=0, local_addr="10.0.1.2")
    assert arguments[-5:-3] == ["--module", "gpu_launch.worker.rank_main"]
    environ = build_node_environ({}, spec, worker=None, settings={}, progress_file="")
    set_here = {name: environ[name] for name in ("GPU_LAUNCH_COMM", "GPU_LAUNCH_PREDICT") if name in environ}
    assert set_here == {f"GPU_LAUNCH_{name.upper()}": value for name, value in changes.items()}


def test_prediction_and_automatic_communication_need_figures(tmp_path):
    """The first a bench, the second a prediction of this script for this number of ranks."""
    env = environment.read({"HOME": str(home(tmp_path)), "GPUHUB_GPU_UUIDS": "GPU-1,GPU-2", "GPUHUB_NODE": "rig1"})

    def check(line):
        wanted = LaunchRequest(options=command.parse(line), cell=None, cwd=tmp_path, env=env, environ={})
        checked = validate(wanted, None)
        run = run_folder.open_run(tmp_path, "run-1")
        node = NodeInfo(worker=None, node="rig1", address="", interface="", port=1)
        return request.build_spec(checked, run, membership=SPEC.membership, first=node, attempt=0, channel=SPEC.channel)

    with pytest.raises(UsageError, match="Measure them with %gpu_bench"):
        check("--predict train.py")
    with pytest.raises(UsageError, match=r"there is none\. Make one with"):
        check("--nproc-per-node 2 --comm auto train.py")
    bench = measured.build_bench(1e13, 1e13)
    figures.write_json(figures.get_bench_path(tmp_path), bench)
    key = check("--predict train.py").predict
    report.publish(measured.PROFILE, bench, home=tmp_path, key=key)
    assert check("--nproc-per-node 2 --comm auto train.py").comm == "bf16"
    assert check("--comm auto train.py").comm == "exact"
    assert check("--comm local train.py").comm == "local"


def test_prediction_takes_the_administrators_bench_where_the_user_has_none(tmp_path):
    """As it is at each prediction; the user's own figures come first, and a broker without any changes nothing."""
    env = environment.read({"HOME": str(home(tmp_path)), "GPUHUB_GPU_UUIDS": "GPU-1", "GPUHUB_NODE": "rig1"})
    wanted = LaunchRequest(options=command.parse("--predict train.py"), cell=None, cwd=tmp_path, env=env, environ={})
    broker = mock.create_autospec(BrokerClient, instance=True)
    broker.get_bench.return_value = None
    with pytest.raises(UsageError, match="Measure them with %gpu_bench"):
        validate(wanted, broker)
    for flops in (1e13, 2e13):
        broker.get_bench.return_value = dataclasses.asdict(measured.build_bench(flops))
        validate(wanted, broker)
        assert figures.read_bench(tmp_path).cards[0].flops == flops
    broker.get_bench.return_value = {"cards": "many"}
    with pytest.raises(UsageError, match="what the cluster's administrator measured is not a bench of this version"):
        validate(wanted, broker)
    own = measured.build_bench(3e13)
    figures.write_json(figures.get_bench_path(tmp_path), own)
    validate(wanted, broker)
    assert figures.read_bench(tmp_path) == own


def test_diloco_needs_torchft(tmp_path, monkeypatch):
    """Before anything is requested, with how to install it; with it, the launch is planned."""
    env = environment.read({"HOME": str(home(tmp_path)), "GPUHUB_GPU_UUIDS": "GPU-1", "GPUHUB_NODE": "rig1"})
    wanted = LaunchRequest(
        options=command.parse("--comm diloco train.py"), cell=None, cwd=tmp_path, env=env, environ={}
    )
    monkeypatch.setattr(diloco, "is_installed", lambda: False)
    with pytest.raises(UsageError, match=r"--comm diloco cannot be used: torchft is not installed .*pip install"):
        validate(wanted, None)
    monkeypatch.setattr(diloco, "is_installed", lambda: True)
    assert validate(wanted, None).plan.workers == 0


def test_manual_command_is_quoted_for_a_shell():
    """One line a node."""
    text = torchrun.format_commands(SPEC, ["10.0.1.2", "10.0.1.3"])
    assert text.startswith("# in '/home/ada/my work', one line a node\ntorchrun --nnodes=3 --node-rank=0 ")
    assert "'it'\"'\"'s; a train.py' --epochs 2\n" in text


def test_build_rank_environment():
    """The node's settings, the user's last, no credentials; a cell's folder to import from."""
    base = {"PATH": "/bin", "JUPYTERHUB_API_TOKEN": "t", "IPP_CONNECTION_INFO": "{}", "PYTHONPATH": "/x"}
    environ = build_node_environ(
        base,
        dataclasses.replace(SPEC, python_path="/w"),
        worker=1,
        settings={"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "=eth1"},
        progress_file="/run/progress-{rank}.json",
    )
    assert (environ["NCCL_DEBUG"], environ["NCCL_SOCKET_IFNAME"]) == ("INFO", "=eth1")
    assert environ["GPU_LAUNCH_RANKS"] == "run-1/1"
    assert (environ["GPU_LAUNCH_ATTEMPT"], environ["GPU_LAUNCH_PREEMPTIONS"]) == ("0", "2")
    assert environ["PYTHONPATH"] == f"/w{os.pathsep}/x"
    assert (environ["JAX_COORDINATOR_ADDRESS"], environ["JAX_NUM_PROCESSES"]) == ("10.0.1.2:4712", "3")
    assert not {"JUPYTERHUB_API_TOKEN", "IPP_CONNECTION_INFO"} & environ.keys()


def test_repr_does_not_contain_keys():
    """Not even in a representation that lands in a log."""
    assert "hidden" not in repr(SPEC)


JOB = {
    "id": "j1",
    "run_id": "run-1",
    "state": "running",
    "version": 3,
    "lease": {"position": None, "waiting_for": None, "new field": 1},
    "workers": [
        {"index": 1, "node": "rig3", "gpus": [], "state": "exited", "exit_code": 137, "message": "out of memory"},
        {"index": 0, "node": "rig2", "gpus": [{"uuid": "u", "node": "rig2", "model": "RTX 5070"}], "state": "running"},
    ],
    "reason": None,
    "renew_within_s": 30,
    "unknown": {},
}


def test_jobs_are_parsed_leniently():
    """Unknown fields are ignored and absent ones stay empty."""
    job = models.parse_job(JOB)
    assert [worker.node for worker in job.workers] == ["rig2", "rig3"]
    assert job.workers[0].exit_code is None
    assert job.renew_within_s == 30


def test_failed_worker_is_reported_with_its_reason():
    """As is a job that was stopped for us."""
    with pytest.raises(GpuLaunchError, match="The worker on rig3 ended: out of memory"):
        check_job(models.parse_job(JOB), logs="~/logs", may_lose=False)
    ended = JOB | {"workers": [], "state": "ended", "reason": "not renewed for 30 s"}
    with pytest.raises(GpuLaunchError, match="not renewed for 30 s"):
        check_job(models.parse_job(ended), logs="~/logs", may_lose=True)


def test_workers_may_end_while_their_job_is_preempted_or_shrinks():
    """Nothing is wrong then, nor in a state that this client does not know."""
    for state in ("waiting", "preempting", "a state of tomorrow"):
        job = models.parse_job(JOB | {"state": state})
        check_job(job, logs="~/logs", may_lose=False)
        assert not job.is_granted
    elastic = models.parse_job(JOB)
    check_job(elastic, logs="~/logs", may_lose=True)
    assert elastic.is_granted


def test_times_are_read_leniently():
    """Any ISO spelling with or without a zone; what is none is not known."""
    lease = {"expected_start": "2026-11-21T12:25:00Z", "note": "mixed cards"}
    job = models.parse_job(JOB | {"lease": lease, "checkpoint_until": "2026-11-21T13:00:00+01:00", "preemptions": 2})
    assert job.expected_start == datetime(2026, 11, 21, 12, 25, tzinfo=UTC)
    assert job.checkpoint_until == datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    assert (job.note, job.preemptions) == ("mixed cards", 2)
    assert models.parse_time("2026-11-21T12:00:00") == datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    assert models.parse_time("soon") is None
    assert models.parse_time(None) is None


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"detail": "Only 3 nodes."}', "Only 3 nodes."),
        (b"<html>Bad gateway</html>", "HTTP status 502"),
        (b"[]", "HTTP status 502"),
        (b"\xff", "HTTP status 502"),
    ],
)
def test_problem_documents_are_shown_as_text(body, text):
    """Whatever a proxy in between may answer."""
    assert text in parse_problem(502, body)


def test_run_folders_are_private_and_old_ones_are_pruned(tmp_path):
    """Folders 0700, secrets 0600, the latest runs and those alive stay."""
    jobs = run_folder.jobs_folder(tmp_path)
    for number in range(25):
        (jobs / f"run-20200101-{number:06}-aaaaaa").mkdir(parents=True)
    (jobs / "run-20200101-000000-aaaaaa" / "engine.json").write_text("{}")
    run = run_folder.create_run(tmp_path)
    run_folder.write_secret_json(run.connection, {"key": "k"})
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(jobs.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.connection.stat().st_mode) == 0o600
    assert json.loads(run.connection.read_text()) == {"key": "k"}
    left = {path.name for path in jobs.iterdir()}
    assert len(left) == run_folder.KEPT_RUNS + 1
    assert {"run-20200101-000000-aaaaaa", run.run_id} <= left


def home(tmp_path):
    """A home with a script."""
    (tmp_path / "train.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["trian.py"], r"There is no script trian\.py in ~/\.\. Did you mean train\.py\?|Did you mean train.py"),
        (["."], "is a folder"),
        (["-m", "no_such_module_here"], "There is no module"),
        (["-m", "os;x"], "There is no module"),
        (["--no-python", "no-such-program-here"], "There is no program"),
        (["new\nline.py"], "There is no script"),
    ],
)
def test_missing_scripts_are_refused(tmp_path, words, right):
    """With what was looked for, and where."""
    wanted = command.parse_words(words)
    with pytest.raises(UsageError, match=right):
        request.check_command(wanted, cwd=home(tmp_path), home=tmp_path, shared=True)


def test_paths_that_other_nodes_lack_are_refused(tmp_path):
    """A folder or script outside home and datasets, also behind a link."""
    inside, outside = home(tmp_path / "home" if (tmp_path / "home").mkdir() is None else tmp_path), tmp_path / "tmp"
    outside.mkdir()
    (outside / "x.py").write_text("")
    (inside / "link.py").symlink_to(outside / "x.py")
    assert request.check_command(command.parse("train.py"), cwd=inside, home=inside, shared=True) == "train.py"
    assert request.check_command(command.parse("link.py"), cwd=inside, home=inside, shared=False) == "link.py"
    with pytest.raises(UsageError, match="other nodes do not have"):
        request.check_command(command.parse("link.py"), cwd=inside, home=inside, shared=True)
    with pytest.raises(UsageError, match="This notebook's folder"):
        request.check_shared(outside, home=inside, what="This notebook's folder")


def test_launch_on_the_own_gpu_needs_no_broker(tmp_path):
    """No broker is needed, nor looked for."""
    env = environment.read({"HOME": str(home(tmp_path)), "GPUHUB_GPU_UUIDS": "GPU-1", "GPUHUB_NODE": "rig1"})
    checked = validate(
        LaunchRequest(options=command.parse("train.py"), cell=None, cwd=tmp_path, env=env, environ={}), None
    )
    assert (checked.plan.workers, checked.script, checked.notebook_text) == (0, "train.py", "rig1")


@pytest.mark.parametrize(
    ("number", "is_launch", "is_detached", "grace_s"),
    [
        ("3", True, False, None),
        ("3", False, False, 2.0),
        ("", True, False, 0.0),
        # Whoever ends a detached job may tell every process of it at once: its leader's own ranks have time, too.
        ("", True, True, None),
    ],
)
def test_grace_period_of_an_engine_after_sigterm(number, is_launch, is_detached, grace_s):
    env = environment.read({"GPU_LAUNCH_WORKER": number, "HOME": "/home/ada"})
    assert worker._choose_grace_s(env, is_launch=is_launch, is_detached=is_detached) == grace_s
