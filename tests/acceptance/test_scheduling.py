"""The builtin scheduler in use: the page of GPUs, preemption, GPUs in use by other programs, and draining."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.acceptance.notebook_container import Notebook
from tests.acceptance.process_output import ProcessOutput
from tests.support.closet import practice_closet
from tests.support.hub.browser import INSTANCE, Product, User, gpuhub
from tests.support.product import ROOT, wait_for

#: Preemption, draining and parts of GPUs belong to the builtin scheduler. With Slurm, gpuhub refuses each and names Slurm's
#: means: tests/unit/gpuhub/backends/slurm/test_operations_slurm.py.
pytestmark = pytest.mark.backend("builtin")
EXAMPLE = ROOT / "notebooks" / "02-checkpoints.ipynb"


@pytest.fixture(scope="module")
def ada(product: Product, make_user: Callable[[str], User]) -> Iterator[Notebook]:
    """ada's notebook on the RTX 5070, with the example's script in her home."""
    started = Notebook(product, make_user("ada"), "rtx5070")
    started.write("goes_on.py", example_script(EXAMPLE))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def ben(make_user: Callable[[str], User]) -> User:
    """A user who needs a GPU."""
    return make_user("ben")


@pytest.fixture(scope="module")
def launch(ada: Notebook) -> Iterator[ProcessOutput]:
    """A long scavenging launch of ada's over two nodes."""
    wait_for(
        lambda: ada.user.holders() == {"RTX 5070": "ada"}, "earlier leases have released their GPUs", deadline_s=60
    )
    call = "run('goes_on.py', ['--steps', '10000000'], nnodes=2, scavenge=True)"
    with ada.hold_launch(call, "going on from step 0 with 2 ranks") as output:
        yield output
    wait_for(lambda: list(ada.user.holders().values()).count("ada") == 1, "the launch's GPUs are free", deadline_s=60)


def example_script(notebook: Path) -> str:
    """Return the script that the example notebook writes."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    (script,) = ("".join(cell["source"]) for cell in cells if "".join(cell["source"]).startswith("%%writefile"))
    return script.split("\n", 1)[1]


def test_the_checkpoint_example_runs_to_its_end(ada: Notebook):
    """The second launch of `02-checkpoints.ipynb` continues from the first one's checkpoint."""
    output = ada.execute("02-checkpoints")
    assert "going on from step 0 with 2 ranks" in output, output
    assert "going on from step 200 with 1 ranks" in output, output
    assert "step 400 is reached, over two launches" in output, output


def test_scavenging_launch_is_preempted_and_continues(ada: Notebook, ben: User, launch: ProcessOutput):
    """A scavenging launch writes a checkpoint, releases the RTX 5060 to ben, and continues elsewhere."""
    assert ada.user.holders() == {"RTX 5070": "ada", "RTX 5060": "ada"}
    time.sleep(3)  # The launch needs some steps before its checkpoint is worth continuing from.
    ben.open_form()
    ben.choose("rtx5060")
    launch.wait(r"(?i)preempted")
    ben.wait_for_lab()
    assert ben.holders()["RTX 5060"] == "ben"
    went_on = launch.wait(r"going on from step ([1-9]\d*) with 2 ranks")
    assert int(went_on[1]) > 0
    wait_for(
        lambda: ada.user.holders() == {"RTX 5070": "ada", "RTX 5060": "ben", "RTX 5090": "ada"},
        "the launch continues with the RTX 5090",
    )


def test_page_names_the_owner_of_each_lease(launch: ProcessOutput, ben: User):
    """The page of GPUs names the owner of each GPU's lease and is in the navigation."""
    page = ben.page.context.new_page()
    page.goto(f"{ben.address}/hub/home")
    page.click("nav >> text=GPUs")
    page.wait_for_url("**/hub/gpus")
    for model in ("RTX 5090", "RTX 5070"):
        expect(page.locator("body")).to_contain_text(model)
    expect(page.locator("body")).to_contain_text("ada")
    expect(page.locator("body")).to_contain_text("ben")
    ben.page, before = page, ben.page
    ben.picture("gpus-page")
    ben.page = before
    page.close()
    assert "RTX 5060" in gpuhub("node", "list")


def test_gpu_used_by_another_program_is_not_granted(product: Product, ada: Notebook, ben: User, launch: ProcessOutput):
    """A process that gpuhub did not start is shown with NVML's data, and its GPU is not granted."""
    launch.process.send_signal(signal.SIGKILL)
    ada.kill("gpu_launch.run('goes_on.py'")
    wait_for(lambda: "RTX 5090" not in ben.holders(), "the launch's GPU is free", deadline_s=60)
    practice_closet.set_outsiders(product.paths, "rig1", 0, ((4242, 5120),))
    try:

        def state() -> str:
            return str(ben.cluster()["nodes"][0]["gpus"][0]["state"])

        wait_for(lambda: state() == "outside", "the RTX 5090 is in use outside")
        (gpu,) = ben.cluster()["nodes"][0]["gpus"]
        assert "in use outside gpuhub" in gpu["message"]
        assert gpu["outside"] == [{"pid": 4242, "memory_mib": 5120}]
        page = ben.page.context.new_page()
        page.goto(f"{ben.address}/hub/gpus")
        expect(page.locator("body")).to_contain_text("4242")
        page.close()
        (profile,) = [each for each in ben.cluster()["profiles"] if each["name"] == "rtx5090"]
        assert not profile["starts_now"]
        assert profile["free"] == 0
    finally:
        practice_closet.set_outsiders(product.paths, "rig1", 0, ())
    wait_for(lambda: state() == "free", "the RTX 5090 is free again")


def test_gpu_with_an_xid_error_is_blocked_until_it_is_accepted(product: Product, ada: Notebook):
    """A launch that fails on it says so, the holder sees it on the page, and an administrator ends the block."""
    load = practice_closet.read_load(product.paths, "rig2", 0)
    broken = replace(load, xid=79, xid_count=load.xid_count + 1)
    practice_closet.set_gpu_load(product.paths, "rig2", 0, broken)
    why = "Xid 79, it has fallen off the bus: reset the GPU or restart the node"
    ada.write("fails.py", "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')")
    output = ada.run("import gpu_launch; gpu_launch.run('fails.py', nnodes=1)")
    assert f"GPU 0 (RTX 5070) of rig2: {why}\n\nrank 0 on rig2 failed" in output
    assert why in gpuhub("node", "list")
    assert "GPU 0 (RTX 5070) of rig2 failed" in gpuhub("events", "--lines", "100")
    page = ada.user.page.context.new_page()
    page.goto(f"{ada.user.address}/hub/gpus")
    expect(page.locator(".gpuhub-lease", has_text=why)).to_be_visible()
    page.close()
    assert "rig2 is up" in gpuhub("node", "accept", "rig2", "0", "--yes")
    assert why not in gpuhub("node", "list")


def test_drained_node_is_emptied_and_undrained(ben: User):
    """Draining shows what runs on the node, ends it, and starts nothing new until the node is undrained."""
    shown = gpuhub("node", "drain", "rig3", "--reason", "new fan", "--grace", "0s", "--yes")
    assert "ben" in shown
    wait_for(lambda: "RTX 5060" not in ben.holders(), "ben's notebook has ended", deadline_s=90)

    def node() -> dict[str, object]:
        return next(each for each in ben.cluster()["nodes"] if each["name"] == "rig3")

    assert node()["state"] in {"draining", "cordoned"}
    assert "new fan" in str(node()["message"])
    assert "drain" in gpuhub("events")
    gpuhub("node", "undrain", "rig3")
    wait_for(lambda: node()["state"] == "up", "the node takes work again")


def test_gpu_is_shared_by_two_notebooks(product: Product, ada: Notebook, ben: User):
    """Two notebooks have a quarter of one GPU each, with a memory cap, and the whole GPU is not available."""
    ben.open_form()
    ben.choose("part")
    ben.wait_for_lab()
    second = f"{ada.user.address}/hub/api/users/ada/servers/second"
    # The server has a separate _xsrf cookie.
    cookies = ada.user.page.context.cookies()
    token = next(c["value"] for c in cookies if (c["name"], c["path"]) == ("_xsrf", "/hub/"))
    headers = {"X-XSRFToken": token, "Content-Type": "application/json"}
    answer = ada.user.page.request.post(second, data=json.dumps({"profile": "part"}), headers=headers)
    assert answer.ok, answer.text()

    def card() -> dict[str, Any]:
        gpu: dict[str, Any] = ben.cluster()["nodes"][0]["gpus"][0]
        return gpu

    wait_for(lambda: len(card()["holders"]) == 2, "two hold a part", deadline_s=90)
    assert card()["share"] == 4
    assert {holder["owner"] for holder in card()["holders"]} == {"ada", "ben"}
    profiles = {each["name"]: each for each in ben.cluster()["profiles"]}
    assert (profiles["part"]["free"], profiles["rtx5090"]["free"]) == (2, 0)
    shown = subprocess.run(
        ["docker", "-H", product.cluster.nodes[0].docker, "exec", f"{INSTANCE}-nb-ben", "env"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert f"GPUHUB_GPU_MEMORY_CAP_MIB={card()['memory_mib'] // 4}" in shown
    ada.user.page.request.delete(second, headers=headers)
    ben.click_stop()
    wait_for(lambda: card()["holders"] == [], "both parts are free", deadline_s=60)
