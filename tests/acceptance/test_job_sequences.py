"""Arrays, jobs after others, jobs that are tried again, and task files with several tasks, in real containers."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub.browser import Product
from tests.support.hub.installed_laptop import Laptop, install_laptop
from tests.support.hub.users import Client, log_in
from tests.support.product import join_columns, wait_for

#: Records when it ran, for 1.5 s, in a file that its first argument and the task's index name; with a second argument, it
#: fails until it has run more often than this number.
STEP = """
    import os, pathlib, sys, time
    name, index = sys.argv[1], os.environ.get("GPU_LAUNCH_ARRAY_INDEX", "")
    records = pathlib.Path.home() / "sequence" / f"{name}{index}"
    records.parent.mkdir(exist_ok=True)
    begin = time.time()
    time.sleep(1.5)
    with records.open("a") as file:
        print(begin, time.time(), file=file)
    runs = len(records.read_text().splitlines())
    print(f"{name}{index} ran {runs} times", flush=True)
    sys.exit(7 if runs <= int((sys.argv + ["0"])[2]) else 0)
"""
PIPELINE = """
    name: nightly
    ---
    name: prepare
    workdir: .
    run: python step.py {0}-prepare
    ---
    num_nodes: 2
    workdir: .
    run: test $SKYPILOT_NODE_RANK = 1 || python step.py {0}-train {1}
    ---
    name: report
    workdir: .
    run: python step.py {0}-report
"""
#: Of the pipeline's tasks.
STEPS = ("prepare", "train", "report")
#: One task of the job group serves, and the other one asks it, by its name in the network.
GROUP = """
    name: pair
    execution: parallel
    primary_tasks: [right]
    ---
    name: left
    workdir: .
    run: python serve.py
    ---
    name: right
    num_nodes: 2
    workdir: .
    run: test $SKYPILOT_NODE_RANK = 1 || python ask.py http://left-0.$SKYPILOT_JOBGROUP_NAME:8123
"""
SERVE = """
    import http.server

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"weights")

    http.server.HTTPServer(("", 8123), Handler).serve_forever()
"""
ASK = """
    import sys, time, urllib.request
    deadline = time.monotonic() + 60
    while True:
        try:
            print("got", urllib.request.urlopen(sys.argv[1], timeout=10).read().decode(), flush=True)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"{sys.argv[1]}: {error}")
            time.sleep(0.2)
"""


@dataclass(frozen=True, slots=True)
class Records:
    """When steps ran, as they recorded it."""

    folder: Path

    def read(self, name: str) -> list[tuple[float, float]]:
        """Return begin and end of each run of a step."""
        lines = (self.folder / name).read_text().splitlines()
        return [(float(begin), float(end)) for begin, end in map(str.split, lines)]

    def has_run(self, name: str) -> bool:
        return (self.folder / name).exists()


@pytest.fixture(scope="module")
def ada(product: Product) -> Iterator[Client]:
    """ada, with a token of her own; her jobs leave no GPU in use."""
    client = log_in(product.address, "ada", product.password)
    yield client
    wait_for(lambda: not any(gpu["holder"] for gpu in client.gpus()), "all GPUs are free")
    client.close()


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, product: Product, ada: Client) -> Laptop:
    """gpu-launch from the hub, logged in, with a step to run."""
    installed = install_laptop(tmp_path_factory.mktemp("sequence-laptop"), product)
    installed.run("login", product.address, "--token-file", "-", stdin=ada.token)
    installed.write("step.py", STEP)
    return installed


@pytest.fixture(scope="module")
def records(product: Product, laptop: Laptop) -> Records:
    """The records in ada's home."""
    return Records(product.paths.state / "homes/ada/sequence")


def find_jobs(laptop: Laptop, *runs: str) -> list[dict[str, Any]]:
    """Return the jobs of these runs, ended ones too."""
    jobs = {job["run_id"]: job for job in json.loads(laptop.run("ps", "-a", "--json"))}
    return [jobs[run] for run in runs]


def wait_for_end(laptop: Laptop, *runs: str) -> list[dict[str, Any]]:
    """Return the jobs of these runs when all of them have ended."""

    def find_ended() -> list[dict[str, Any]] | None:
        jobs = find_jobs(laptop, *runs)
        return jobs if all(job["ended_at"] for job in jobs) else None

    return wait_for(find_ended, f"{', '.join(runs)} have ended", 240)


def test_array_runs_two_tasks_at_a_time_and_another_job_follows(laptop: Laptop, records: Records):
    """In the order of the indexes; the job after it starts when all have succeeded, and `ps` has one table of them."""
    array = json.loads(laptop.run("run", "--json", "--array", "0-3%2", "step.py", "task"))["array"]
    report = json.loads(laptop.run("run", "-d", "--json", "--after", array, "step.py", "report"))["run_id"]
    assert find_jobs(laptop, report)[0]["waiting_for"] == f"the end of {array}"
    [ended] = wait_for_end(laptop, report)
    assert (ended["exit_code"], ended["after"]) == (0, None)
    lines = join_columns(laptop.run("ps", array)).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [f"{array}-{number}" for number in range(4)]
    assert lines[5:] == [f"4 tasks of {array}: 4 done; 2 at the same time"]
    spans = [
        (datetime.fromisoformat(task["started_at"]), datetime.fromisoformat(task["ended_at"]))
        for task in json.loads(laptop.run("ps", array, "--json"))
    ]
    assert max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans) == 2, spans
    assert spans[2][0] >= min(spans[0][1], spans[1][1])
    last = max(records.read(f"task{index}")[0][1] for index in range(4))
    assert records.read("report")[0][0] > last
    assert "task3 ran 1 times" in laptop.run("logs", f"{array}-3")


def test_failed_job_is_tried_again(laptop: Laptop, records: Records):
    """A job after it waits for the last try."""
    again = json.loads(laptop.run("run", "-d", "--json", "--retry", "1", "step.py", "again", "1"))["run_id"]
    after = json.loads(laptop.run("run", "-d", "--json", "--after", again, "step.py", "later"))["run_id"]
    first, second = wait_for_end(laptop, again, after)
    assert [(job["exit_code"], job["retries"], job["max_retries"]) for job in (first, second)] == [(0, 1, 1), (0, 0, 0)]
    assert re.findall(r"again ran \d times", laptop.run("logs", again)) == ["again ran 1 times", "again ran 2 times"]
    assert records.read("later")[0][0] > records.read("again")[1][1]


def test_tasks_of_a_file_run_one_after_another(laptop: Laptop, records: Records):
    """Without the command, which has ended."""
    laptop.write("pipeline.yaml", PIPELINE.format("good", 0))
    jobs = json.loads(laptop.run("run", "--detach", "--json", "pipeline.yaml"))
    assert [job["exit_code"] for job in wait_for_end(laptop, *(job["run_id"] for job in jobs))] == [0, 0, 0]
    times = [records.read(f"good-{step}") for step in STEPS]
    assert [len(runs) for runs in times] == [1, 1, 1]
    assert all(before[0][1] < after[0][0] for before, after in itertools.pairwise(times))


def test_tasks_of_a_job_group_find_each_other(laptop: Laptop):
    """They start together, with names in their user's network; the one that serves ends with the one that it served."""
    laptop.write("group.yaml", GROUP)
    laptop.write("serve.py", SERVE)
    laptop.write("ask.py", ASK)
    jobs = json.loads(laptop.run("run", "--json", "group.yaml"))
    ended = wait_for_end(laptop, *(job["run_id"] for job in jobs))
    assert [(job["name"], job["gpus"], job["exit_code"]) for job in ended] == [("left", 1, None), ("right", 2, 0)]
    assert ended[0]["reason"] == "the tasks of its job group that it served have ended"
    assert "got weights" in laptop.run("logs", ended[1]["run_id"])
    assert laptop.run("ps", ended[0]["array"]).splitlines()[-1].startswith(f"2 tasks of {ended[0]['array']}: ")
