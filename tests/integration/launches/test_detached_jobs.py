"""Detached jobs on this machine: the real driver, workers, engines and ranks over loopback, without broker or Docker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_launch.common import exchange, job_manifest
from gpu_launch.common.job_manifest import TaskCommands
from gpu_launch.output import stack_request
from tests.support.launch.detached_jobs import Job
from tests.support.launch.rank_scripts import CHECKPOINTED, count_ranks

ALL_REDUCE = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    print("sum", value.item(), "of", dist.get_world_size(), os.environ["SIZE"], *sys.argv[1:])
    print("own", dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[[int], Job]]:
    """Return a factory of jobs with a number of nodes, and clean up after them."""
    jobs: list[Job] = []

    def make(nodes: int) -> Job:
        job = Job(tmp_path / "home", nodes)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.close()


def test_job_runs_to_its_end_unattended(make_job):
    """The order's variables reach the ranks, output and state are written, and the workers' order does not matter."""
    job = make_job(2)
    job.write("train.py", ALL_REDUCE)
    job.send("--nnodes=2", "--", "train.py", "--epochs", "2", SIZE="large")
    job.start()
    assert job.end() == 0, job.output
    lines = job.output.splitlines()
    assert lines[0] == "gpu_launch: train.py starts on rig1 RTX 5090, rig2 RTX 5090"
    assert count_ranks(job.output, "sum 3.0 of 2 large --epochs 2") == 2
    assert {"[rank 0 · rig1] own 0", "[rank 1 · rig2] own 1"} <= set(lines)
    assert lines[-1].startswith("gpu_launch: done in ")
    state = job.state
    assert (state.state, state.attempt, state.exit_code, state.error) == ("done", 0, 0, "")
    assert state.started_at is not None and state.ended_at is not None and state.ended_at > state.started_at
    assert not list(job.run.root.glob("engine*")), "the way to the controller is a secret of the running job"


def test_a_failing_rank_gives_the_job_its_exit_code(make_job):
    """The failing rank's own traceback is the job's error and ends its output."""
    job = make_job(2)
    job.write(
        "train.py",
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise SystemExit("no data in /datasets") if os.environ.get("WORDS") else OSError(5, "disk")
        time.sleep(600)
        """,
    )
    job.send("--nnodes=2", "--", "train.py")
    job.start()
    assert job.end() == 1
    state = job.state
    assert (state.state, state.exit_code) == ("failed", 1)
    assert state.error.startswith("rank 1 on rig2 failed: exit code 1\n")
    assert 'raise SystemExit("no data in /datasets") if' in state.error and "OSError: [Errno 5] disk" in state.error
    assert job.output.count("OSError: [Errno 5] disk") == 1
    assert job.output.splitlines()[-1].startswith("gpu_launch: failed with exit code 1 after ")


@pytest.mark.parametrize(("how", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)])
def test_exit_codes_are_the_first_failing_ranks_own(make_job, how, code):
    """The job has the first failing rank's exit code, 128 + N for a signal."""
    job = make_job(1)
    job.write("train.py", f"import os, signal, sys\n{how}\n")
    job.send("--", "train.py")
    job.start()
    assert job.end() == code
    assert job.state.exit_code == code


@pytest.mark.parametrize("way", [(), ("--cold",)])
def test_a_cancelled_job_writes_its_checkpoint(make_job, way):
    """SIGTERM to all containers reaches all ranks once, and they may use their grace period."""
    job = make_job(2)
    job.write("train.py", CHECKPOINTED)
    job.send("--nnodes=2", *way, "--", "train.py")
    job.start()
    job.await_output("began at 0 of 2")
    job.until(lambda: job.state.state == "running", "the status file shows it")
    assert job.stop() == 143
    assert (job.state.state, job.state.exit_code) == ("cancelled", 143)
    saved = int((job.work / "step").read_text())
    assert f"saved {saved}" in job.output
    assert job.output.splitlines()[-1].startswith("gpu_launch: ended by SIGTERM after ")


def test_job_is_cancelled_before_it_begins(make_job):
    """A job that is cancelled before it begins starts no rank."""
    job = make_job(2)
    job.write("train.py", "open('ran', 'w')")
    job.send("--nnodes=2", "--", "train.py")
    job.start()
    job.until(job.run.status.exists, "a state")
    assert job.stop() == 143
    assert (job.state.state, job.state.exit_code) == ("cancelled", 143)
    assert not (job.work / "ran").exists()


def test_container_that_gets_sigterm_before_the_driver(make_job):
    """The ranks of a container that gets SIGTERM first end at once; the others keep their grace period and do not fail."""
    job = make_job(2)
    job.write(
        "train.py",
        """
        import os, signal, sys, time
        from pathlib import Path
        def save(*_):
            time.sleep(5)
            Path("saved").write_text("yes")
            sys.exit(0)
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, save)
        print("at work")
        time.sleep(600)
        """,
    )
    job.send("--nnodes=2", "--", "train.py")
    job.start()
    job.until(lambda: count_ranks(job.output, "at work") == 2, "both at work")
    job.processes[1].terminate()
    assert job.processes[1].wait(60) == 143
    assert job.stop() == 143
    assert job.state.state == "cancelled" and (job.work / "saved").exists()


def test_preempted_job_continues_from_its_checkpoint(make_job):
    """The job continues in new containers, with one output, and the attempt count increases."""
    job = make_job(2)
    job.write("train.py", CHECKPOINTED)
    job.send("--nnodes=2", "--", "train.py")
    job.start()
    job.await_output("began at 0 of 2")
    stale, began = job.run.connection.read_bytes(), job.state.started_at
    assert job.stop() == 143
    # Files of a killed driver must not mislead the next one.
    job.run.connection.write_bytes(stale)
    job.preemptions += 1
    job.start()
    assert job.end() == 0, job.output
    saved = int((job.work / "step").read_text())
    order_of = [job.output.index(text) for text in (
        "began at 0 of 2 preempted 0", f"saved {saved}", "train.py starts again, preempted once,",
        f"began at {saved} of 2 preempted 1", f"finished at {saved + 5}",
    )]  # fmt: skip
    assert order_of == sorted(order_of)
    assert (job.state.state, job.state.attempt, job.state.started_at) == ("done", 1, began)


def test_secrets_are_removed_when_the_job_has_ended(make_job):
    """A preempted job still needs them; afterwards their names alone remain, and other variables."""
    job = make_job(1)
    again = job.work / "again"
    task = TaskCommands(run=f'echo "size $SIZE, token $TOKEN"; [ -f {again} ] && exit 3; touch {again}; sleep 600')
    job.send(task=task, secret_names=("TOKEN",), SIZE="large", TOKEN="0x5ec7e7")
    job.start()
    job.until(again.exists, "the first start")
    assert job.stop() == 143
    assert "0x5ec7e7" in job.run.manifest.read_text()
    job.preemptions += 1
    job.start()
    assert job.end() == 3, job.output
    assert count_ranks(job.output, "size large, token 0x5ec7e7") == 2
    manifest = job_manifest.parse_manifest(job.run.manifest.read_text())
    assert (manifest.environ, manifest.secret_names, manifest.task) == ({"SIZE": "large"}, ("TOKEN",), task)
    assert job.run.manifest.stat().st_mode & 0o777 == 0o600


def test_cell_has_the_notebooks_variables(make_job):
    """The cell has its variables, and its own lines in tracebacks."""
    job = make_job(1)
    cell = "print('given', value)\nraise KeyError(value)"
    text = exchange.CellSource(label="Cell In[7]", source=cell, skipped=0)
    given = exchange.build_exchange(send={"value": 5}, cell=text)
    job.send("--", cell=cell)
    given.write(job.run.exchange)
    job.start()
    assert job.end() == 1
    assert "] given 5" in job.output
    assert "Cell In[7]" in job.state.error and "raise KeyError(value)" in job.state.error


def test_failure_is_restarted_up_to_the_limit(make_job):
    """Every restart has its own logs and knows its attempt, as in a notebook."""
    job = make_job(2)
    job.write(
        "train.py",
        """
        import os, sys
        print("restart", os.environ["TORCHELASTIC_RESTART_COUNT"])
        sys.exit(5 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" else 0)
        """,
    )
    job.send("--nnodes=2", "--max-restarts=1", "--", "train.py")
    job.start()
    assert job.end() == 0, job.output
    assert "rank 1 on rig2 failed: exit code 5" in job.output and "restart 1" in job.output
    assert job.state.attempt == 1
    assert (job.run.logs / "node0").is_dir() and (job.run.logs / "node0-restart1").is_dir()


def test_elastic_job_continues_without_a_lost_worker(make_job):
    """Losing a node uses one restart; the job continues from its last checkpoint."""
    job = make_job(3)
    job.write(
        "train.py",
        """
        import time
        from pathlib import Path
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print("here are", dist.get_world_size())
        while dist.get_world_size() == 3:
            time.sleep(0.1)
        dist.barrier()
        print("finished with", dist.get_world_size())
        dist.destroy_process_group()
        """,
    )
    job.send("--nnodes=2:3", "--max-restarts=1", "--", "train.py")
    job.start()
    job.await_output("here are 3")
    job.lose(2)
    assert job.end() == 0, job.output
    assert "rig3 is lost; continuing with 2 nodes" in job.output
    assert count_ranks(job.output, "finished with 2") == 2


def test_elastic_job_releases_a_worker(make_job):
    """A worker that gets SIGTERM has its checkpoint written, and no restart is used."""
    job = make_job(2)
    job.write("train.py", CHECKPOINTED)
    job.send("--nnodes=1:2", "--", "train.py")
    job.start()
    job.await_output("began at 0 of 2")
    job.processes[1].terminate()
    assert job.end() == 0, job.output
    saved = int((job.work / "step").read_text())
    assert "rig2 is released, others need the GPUs; continuing with 1 node" in job.output
    assert f"began at {saved} of 1" in job.output and f"finished at {saved + 5}" in job.output


def test_a_lost_worker_ends_a_job_that_needs_it(make_job):
    """The error names the lost worker."""
    job = make_job(2)
    job.write("train.py", "import time\nprint('here')\ntime.sleep(600)\n")
    job.send("--nnodes=2", "--", "train.py")
    job.start()
    job.await_output("here")
    job.lose(1)
    assert job.end() == 1
    assert job.state.state == "failed" and "rig2" in job.state.error and "has not sent a message" in job.state.error


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_worker_lost_before_the_ranks_start_is_named(make_job, nodes):
    """A lost agent is not reported as the agent's error, and an elastic job continues without it."""
    job = make_job(2)
    job.write(
        "slow.py",
        "import os, time\nif os.environ['GPUHUB_NODE'] == 'rig2':\n    open(__file__ + '.at', 'w')\n    time.sleep(600)\n",
    )
    job.write("train.py", "print('begun')\n")
    job.send(f"--nnodes={nodes}", "--max-restarts=1", "--preload=slow", "--", "train.py", PYTHONPATH=str(job.work))
    job.start()
    job.until((job.work / "slow.py.at").exists, "the import on rig2")
    job.lose(1)
    code = job.end()
    if nodes == "2":
        assert code == 1 and job.state.error.startswith("rig2: it does not respond any more")
    else:
        assert code == 0 and "rig2 is lost; continuing with 1 node" in job.output and "begun" in job.output


def test_a_task_file_runs_on_every_node(make_job):
    """`setup` runs on all nodes before `run` on any, in the job's folder, with SkyPilot's variables and not torch's."""
    job = make_job(2)
    task = TaskCommands(
        setup='sleep "$SKYPILOT_NODE_RANK"; touch ready-$SKYPILOT_NODE_RANK; echo "set up $SIZE"',
        run='ls ready-* | wc -l; echo "$SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES with $SKYPILOT_NUM_GPUS_PER_NODE,'
        ' ${RANK:-no rank}"; echo "$SKYPILOT_NODE_IPS" | wc -l',
    )
    job.send(task=task, SIZE="large")
    job.start()
    assert job.end() == 0, job.output
    assert "set up large" in job.output
    for rank in range(2):
        assert f"[rank {rank} · rig{rank + 1}] {rank} of 2 with 1, no rank" in job.output
    assert count_ranks(job.output, "2") == 4


def test_the_first_failing_node_gives_a_task_its_exit_code(make_job):
    """The task has the exit code of the first failing node, and the other nodes are ended."""
    job = make_job(2)
    job.send(task=TaskCommands(run='if [ "$SKYPILOT_NODE_RANK" = 1 ]; then echo broken >&2; exit 9; fi; sleep 600'))
    job.start()
    assert job.end() == 9
    assert job.state.error.startswith("rank 1 on rig2 failed: exit code 9") and "broken" in job.state.error


def test_task_has_its_grace_period(make_job):
    """Bash ends at once; its children get SIGTERM as well and may use the grace period."""
    job = make_job(1)
    job.write(
        "train.py",
        """
        import pathlib, signal, sys, time
        def save(*_):
            time.sleep(1)
            pathlib.Path("saved").write_text("yes")
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("at work", flush=True)
        time.sleep(600)
        """,
    )
    job.send(task=TaskCommands(run="python train.py; echo not reached"))
    job.start()
    job.await_output("at work")
    assert job.stop() == 143
    assert (job.work / "saved").read_text() == "yes"
    assert "] saved" in job.output and "not reached" not in job.output


def test_output_is_complete(make_job):
    """No line is lost of 100,000 written at full speed, nor bytes that are not UTF-8."""
    job = make_job(1)
    job.write(
        "train.py",
        r"""
        import os, sys
        sys.stdout.flush()
        os.write(1, b"\xff\xfe\x00binary\n")
        os.write(1, "".join(f"line {number}\n" for number in range(100_000)).encode())
        """,
    )
    job.send("--", "train.py")
    job.start()
    assert job.end() == 0, job.output[-2000:]
    lines = [line.partition("] ")[2] for line in job.output.splitlines() if line.startswith("[rank 0")]
    assert [line for line in lines if line.startswith("line ")] == [f"line {number}" for number in range(100_000)]
    assert any("binary" in line for line in lines)


def test_full_disk_ends_the_job_with_an_error(make_job):
    """The job ends with an error instead of continuing without output or waiting for space."""
    job = make_job(1)
    job.write("train.py", "import time\nprint('here')\ntime.sleep(600)\n")
    job.send("--", "train.py")
    job.run.output.symlink_to("/dev/full")
    job.start()
    assert job.end() == 1
    assert job.state.state == "failed"
    assert job.state.error == f"output.log of this job cannot be written in {job.run.root}: No space left on device."


def test_driver_refuses_an_invalid_manifest(make_job):
    """The driver refuses an invalid order with the exit code of a wrong command line."""
    job = make_job(1)
    job.send("--", "missing.py")
    job.start()
    assert job.end() == 2
    assert job.state.state == "failed" and job.state.error.startswith("There is no script missing.py in ~/work.")
    assert job.run.output.stat().st_mode & 0o777 == 0o600


HANGING = """
    import os, time
    def load():
        time.sleep(600)
    def reduce():
        time.sleep(601)
    print("at work", flush=True)
    load() if os.environ["RANK"] == "1" else reduce()
"""


def test_stacks_of_a_silent_job_are_shown_once_and_on_request(make_job):
    """Without output and reports they come by themselves; a request in the job's folder is answered there."""
    job = make_job(2)
    job.write("train.py", HANGING)
    job.send("--nnodes=2", "--stacks-after=2s", "--", "train.py")
    job.start()
    job.await_output("rank 1: at train.py:4 in load")
    lines = job.output.splitlines()
    first = next(number for number, line in enumerate(lines) if "where the 2 ranks are" in line)
    assert lines[first:] == [
        "gpu_launch: no rank has written or reported anything for 2 s (--stacks-after sets the time, 0s for never); "
        "where the 2 ranks are:",
        "  rank 0: at train.py:6 in reduce",
        "      time.sleep(601)",
        "  rank 1: at train.py:4 in load",
        "      time.sleep(600)",
    ]
    answer = stack_request.ask(job.run)
    assert [group["ranks"] for group in answer["groups"]] == [[0], [1]]
    assert answer["text"].startswith("where the 2 ranks are:\n  rank 0: at train.py:6 in reduce\n")
    assert "rank 1 on rig2\n" in answer["full"]
    assert job.output.count("where the 2 ranks are") == 1
    assert not job.run.stacks.exists() and not job.run.stacks_request.exists()
    job.stop()


def test_a_job_that_sleeps_keeps_its_secrets_for_the_next_start(make_job):
    """Its good end is not the last one: readers see that it is asleep, and then that it wakes."""
    job = make_job(1)
    job.write("serve.py", "import os; print('token', len(os.environ['TOKEN']), flush=True)")
    job.send("--", "serve.py", secret_names=("TOKEN",), TOKEN="hunter2")
    for job.sleeps, start in (("0", "starts"), ("1", "wakes")):
        job.start()
        assert job.end() == 0, job.output
        assert (job.state.state, job.state.exit_code) == ("asleep", 0)
        assert f"gpu_launch: train.py {start} on rig1" in job.output
    assert job.output.count("token 7") == 2
    assert job.output.count(": it starts again at the next request to its port\n") == 2
    assert "hunter2" in job.run.manifest.read_text()


def test_a_failed_job_with_tries_left_keeps_its_secrets_for_the_next_start(make_job):
    """Readers do not take its failure for the end; the last try's failure is."""
    job = make_job(1)
    job.write("train.py", "import os; print('token', len(os.environ['TOKEN']), flush=True); raise SystemExit(3)")
    job.send("--", "train.py", secret_names=("TOKEN",), TOKEN="hunter2")
    for retries, state, line in (
        ("0/1", "cancelled", "gpu_launch: failed with exit code 3 after "),
        ("1/1", "failed", "gpu_launch: train.py starts again, attempt 2 of 2, on rig1"),
    ):
        job.retries = retries
        job.start()
        assert job.end() == 3, job.output
        assert (job.state.state, job.state.exit_code) == (state, 3)
        assert line in job.output
    assert job.output.count("token 7") == 2
    assert job.output.count("; it is started again\n") == 1
    assert "hunter2" not in job.run.manifest.read_text()
