"""`gpu-launch` on a laptop without torch: log in, send a folder, wait in the queue, read results."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator

import httpx
import nbformat
import pytest
from playwright.sync_api import expect

from tests.acceptance.notebook_container import Notebook
from tests.acceptance.process_output import ProcessOutput
from tests.support.hub.browser import Product, User, gpuhub
from tests.support.hub.installed_laptop import Laptop, install_laptop
from tests.support.launch.rank_scripts import HANG
from tests.support.product import wait_for

TRAIN = """
    import os, sys, torch, torch.distributed as dist
    from helper import NAME
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", total.item(), "of", NAME, *sys.argv[1:], "seen", os.environ.get("COLOUR"))
    if dist.get_rank() == 0:
        os.makedirs("results", exist_ok=True)
        open("results/out.txt", "w").write("the result")
    dist.barrier()
    dist.destroy_process_group()
"""
COUNT = """
    import time
    for step in range(600):
        print("step", step, flush=True)
        if __import__("os").path.exists("enough"):
            break
        time.sleep(0.5)
    print("counted", flush=True)
"""
SERVE = """
    from http.server import BaseHTTPRequestHandler, HTTPServer
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            body = f"<html><head></head><p id=out>{self.headers['X-Forwarded-User']} {self.path} {self.headers['Cookie']}</p>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body.encode())
    HTTPServer(("localhost", 8000), Page).serve_forever()
"""
#: Ends well after some seconds without a request.
IDLE_SERVER = """
    import sys
    from http.server import HTTPServer, SimpleHTTPRequestHandler
    server = HTTPServer(("localhost", 8000), SimpleHTTPRequestHandler)
    server.timeout, server.handle_timeout = 6, lambda: sys.exit(0)
    while True:
        server.handle_request()
"""
TASK = """
    name: report
    num_nodes: 2
    resources:
      accelerators: {RTX5060: 1, RTX5090: 1}
    workdir: .
    envs:
      GREETING: hello
    setup: |
      echo "set up" > setup-$SKYPILOT_SETUP_NODE_RANK.txt
    run: |
      echo "$GREETING from $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES with $SKYPILOT_NUM_GPUS_PER_NODE"
      echo "head $(echo "$SKYPILOT_NODE_IPS" | head -n1)"
      ls setup-*.txt
"""


@pytest.fixture(scope="module")
def ada(make_user: Callable[[str], User]) -> User:
    """ada in the browser."""
    return make_user("ada")


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory, product: Product, ada: User) -> Iterator[Laptop]:
    """gpu-launch installed by pip from the hub, logged in with a token from the hub's page."""
    folder = tmp_path_factory.mktemp("laptop")
    installed = install_laptop(folder, product)
    # The button works only after the page's scripts have loaded.
    ada.page.goto(f"{ada.address}/hub/token")
    ada.wait_for_scripts()
    ada.page.click("#request-token-form button[type=submit]")
    ada.page.wait_for_selector("#token-result:not(:empty)")
    token = ada.page.inner_text("#token-result").strip()
    secret = folder / "token"
    secret.write_text(token)
    output = installed.run("login", product.address, "--token-file", str(secret))
    assert "ada" in output
    assert token not in output
    installed.write("train.py", TRAIN)
    installed.write("helper.py", "NAME = 'helper'\n")
    installed.write("count.py", COUNT)
    installed.write("serve.py", SERVE)
    installed.write("idle.py", IDLE_SERVER)
    installed.write("hang.py", HANG)
    installed.write("task.yaml", TASK)
    installed.write(".gitignore", "secret.txt\ndata/\n")
    installed.write("secret.txt", "not to be sent\n")
    installed.write("data/large.bin", "x" * 1000)
    yield installed


def is_idle(ada: User) -> bool:
    """Return whether no GPU is leased."""
    return not ada.holders()


def test_job_on_three_nodes(product: Product, laptop: Laptop, ada: User):
    """The folder is sent, three ranks run with live output, and results are in the home, without a notebook."""
    output = laptop.run("run", "--nnodes", "3", "--env", "COLOUR=green", "train.py", "--epochs", "2")
    assert "sum 3.0 of helper --epochs 2 seen green" in output, output
    wait_for(lambda: is_idle(ada), "the GPUs are free")
    listed = json.loads(laptop.run("ps", "-a", "--json"))
    jobs = listed["jobs"] if isinstance(listed, dict) else listed
    # The newest job comes first; jobs of earlier tests can follow.
    assert (jobs[0]["name"], jobs[0]["exit_code"]) == ("train.py", 0), listed
    folders = (product.paths.state / "homes/ada/gpu-launch").iterdir()
    home = max(folders, key=lambda folder: folder.stat().st_mtime)
    assert (home / "results/out.txt").read_text() == "the result"
    assert not (home / "secret.txt").exists()
    assert not (home / "data").exists()
    laptop.run("cp", f"home:gpu-launch/{home.name}/results", "fetched")
    assert (laptop.work / "fetched/out.txt").read_text() == "the result"
    # What it used: for its owner, on the page, and for administrators.
    assert re.match(r"3 GPUs \d+ % busy(, [0-9.]+ of \d+ GB)?, [0-9.]+ k?Wh", jobs[0]["costs"]), jobs[0]["costs"]
    ada.page.goto(f"{ada.address}/hub/gpus")
    expect(ada.page.get_by_role("img", name="GPU-hours by day")).to_be_visible()
    expect(ada.page.locator("section:has(#gpuhub-costs)")).to_contain_text(f"Job train.py: {jobs[0]['costs']}")
    report = ("report", "--by", "profile", "--owner", "ada", "--json")
    energy = wait_for(
        lambda: [row["energy_kwh"] for row in json.loads(gpuhub(*report))["rows"] if row["key"] == "jobs"], "the report"
    )
    assert energy[0] > 0


def test_exit_status_and_error_of_the_failing_rank(laptop: Laptop, ada: User):
    """The command has the job's exit status and shows the failing rank's traceback with the user's line."""
    laptop.write(
        "fail.py", "import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit(7)\nimport time\ntime.sleep(60)\n"
    )
    output = laptop.run("run", "--nnodes", "2", "fail.py", code=7)
    assert "rank 1" in output
    laptop.run("run", "--nnodes", "9", "train.py", code=2)
    wait_for(lambda: is_idle(ada), "the GPUs are free")


def test_a_detached_job_outlives_hub_and_broker(product: Product, laptop: Laptop, ada: User):
    """A job and its logs survive kills of hub and broker; shell and cp reach it, and cancel ends it."""
    started = json.loads(laptop.run("run", "--detach", "--json", "--nnodes", "2", "--name", "count", "count.py"))
    run = started.get("run_id") or started["job"]["run_id"]
    with laptop.start("logs", "-f", run) as process:
        logs = ProcessOutput(process)
        logs.wait("step 3\\b")
        for name in ("hub", "broker"):
            pid = product.supervisor.pid(name)
            assert pid
            os.kill(pid, signal.SIGKILL)
        step = int(logs.wait(r"step (\d\d)\b", 120)[1])
        logs.wait(f"step {step + 10}\\b", 120)
        assert "RTX" in wait_for(lambda: laptop.run("status"), "the cluster's table")
        assert "count" in laptop.run("ps")
        shown = laptop.run("shell", run, "--", "sh", "-c", "echo in $GPUHUB_NODE; exit 3", code=3)
        assert "in rig" in shown
        laptop.write("enough", "")
        laptop.run("cp", "enough", f"{run}:enough")
        logs.wait("counted")
        logs.rest()
        assert process.returncode == 0
    wait_for(lambda: is_idle(ada), "the GPUs are free")
    again = json.loads(laptop.run("run", "--detach", "--json", "count.py"))
    run = again.get("run_id") or again["job"]["run_id"]
    laptop.run("cancel", run)
    wait_for(lambda: is_idle(ada), "a cancelled job's GPU is free")


def test_output_of_a_job_that_hangs(laptop: Laptop, ada: User, make_user: Callable[[str], User]):
    """Its owner asks where its ranks are; a colleague sees its output in a browser, and no more once its owner says so."""
    ben = make_user("ben")
    run = json.loads(laptop.run("run", "--detach", "--json", "--nnodes", "2", "hang.py"))["run_id"]
    wait_for(lambda: "hanging" in laptop.run("logs", run), "the ranks run", 60)

    def has_all_stacks() -> bool:
        stacks = laptop.run("stacks", run)
        return "wait_for_ever" in stacks and "compute" in stacks

    # Each has said so a moment before it is there.
    wait_for(has_all_stacks, "the stacks of both ranks", 30)
    shared = laptop.run("share", run, "--with", "ben")
    [address] = re.findall(r"https?://\S+/hub/gpuhub/shared/\S+", shared)
    ben.page.goto(address)
    expect(ben.page.locator("body")).to_contain_text("[ranks 0-1 ×2] hanging")
    ben.picture("shared-output")
    laptop.run("share", "end", run)
    expect(ben.page.locator("body")).not_to_contain_text("hanging", timeout=30_000)
    response = ben.page.goto(address)
    assert response is not None
    assert response.status == 404
    laptop.run("cancel", run)
    wait_for(lambda: is_idle(ada), "the GPUs are free")


def test_colleague_reads_a_notebook_as_it_was_saved(laptop: Laptop, make_user: Callable[[str], User]):
    """Its owner needs no server of its own for that."""
    ben = make_user("ben")
    cells = [nbformat.v4.new_markdown_cell("# What we found"), nbformat.v4.new_code_cell("loss = 0.25")]
    laptop.write("found.ipynb", nbformat.writes(nbformat.v4.new_notebook(cells=cells)))
    laptop.run("cp", "found.ipynb", "home:found.ipynb")
    [address] = re.findall(r"https?://\S+", laptop.run("share", "home:found.ipynb", "--with", "ben"))
    ben.page.goto(address)
    notebook = ben.page.frame_locator("iframe")
    expect(notebook.locator("h1")).to_contain_text("What we found")
    expect(notebook.locator("body")).to_contain_text("loss = 0.25")
    ben.picture("shared-notebook")
    laptop.run("share", "end", "home:found.ipynb")
    response = ben.page.goto(address)
    assert response is not None
    assert response.status == 404


def test_server_of_a_job_has_an_address_of_the_hub(laptop: Laptop, ada: User, make_user: Callable[[str], User]):
    """Its owner and a named user open it in their browsers, and a program with a token."""
    ben = make_user("ben")
    words = ("--port", "8000", "--allow-user", "ben", "--no-python", "python", "serve.py")
    started = json.loads(laptop.run("run", "--detach", "--json", *words))
    for user in (ada, ben):
        user.page.goto(f"{started['url']}a?b=c")
        # Until the server listens, the page tries again by itself.
        user.page.wait_for_selector("#out", timeout=60_000)
        assert user.page.inner_text("#out") == f"{user.name} /a?b=c None"
        assert user.page.evaluate("window.origin") == "null"
    assert httpx.get(started["url"], trust_env=False).status_code == 401
    token = (laptop.work.parent / "token").read_text()
    answer = httpx.get(f"{started['url']}v1", headers={"Authorization": f"Bearer {token}"}, trust_env=False)
    assert "ada /v1 None" in answer.text
    laptop.run("cancel", started["run_id"])
    wait_for(lambda: is_idle(ada), "the GPU is free")
    assert ben.page.reload().status == 409


def test_request_wakes_a_server_that_sleeps(laptop: Laptop, ada: User):
    """Its GPU is free without requests; the address stays, and a browser's page appears by itself."""
    words = ("--port", "8000", "--sleep", "--no-python", "python", "idle.py")
    started = json.loads(laptop.run("run", "--detach", "--json", *words))

    def is_asleep() -> bool:
        [job] = [job for job in json.loads(laptop.run("ps", "--json")) if job["run_id"] == started["run_id"]]
        return "it is asleep" in (job["waiting_for"] or "")

    wait_for(is_asleep, "the job is asleep", deadline_s=60)
    assert is_idle(ada)
    ada.page.goto(started["url"])
    expect(ada.page.locator("body")).to_contain_text("ask again in a minute")
    ada.picture("job-wakes")
    expect(ada.page.locator("h1")).to_contain_text("Directory listing", timeout=60_000)
    wait_for(is_asleep, "the job is asleep again", deadline_s=60)
    laptop.run("cancel", started["run_id"])
    assert "asleep" not in laptop.run("ps")


def test_skypilot_task_file_runs_unchanged(laptop: Laptop, ada: User):
    """SkyPilot's task YAML runs setup and run on two nodes with the variables it promises."""
    output = laptop.run("run", "task.yaml")
    assert "hello from 0 of 2 with 1" in output, output
    assert "hello from 1 of 2 with 1" in output, output
    laptop.write("bad.yaml", "name: x\nrun: echo\nfile_mounts:\n  /data: s3://bucket\n")
    assert "file_mounts" in laptop.run("run", "bad.yaml", code=2)
    wait_for(lambda: is_idle(ada), "the GPUs are free")


def test_detached_job_outlives_its_notebook(product: Product, laptop: Laptop, ada: User):
    """A job of `%gpu_launch --detach` outlives its notebook and is visible on the laptop and in the next notebook."""
    notebook = Notebook(product, ada, "rtx5070")
    notebook.write("count.py", COUNT)
    shown = notebook.cells("%gpu_launch --detach --nnodes 2 count.py", "%gpu_status")
    assert "run-" in shown[0], shown
    wait_for(lambda: len(ada.holders()) == 3, "the job runs next to the notebook", deadline_s=60)
    notebook.stop(still_holds=2)
    with laptop.start("logs", "-f", "count.py") as process:
        logs = ProcessOutput(process)
        logs.wait(r"step \d+")
        (notebook.home / "enough").touch()
        logs.wait("counted")
        logs.rest()
    wait_for(lambda: is_idle(ada), "the GPUs are free")
    assert "count.py" in laptop.run("ps", "-a")
