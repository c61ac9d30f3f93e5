"""`gpu_launch` in a real notebook container: failures, refusals, ipyparallel and a killed kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import nbformat
import pytest

from tests.acceptance.notebook_container import Notebook
from tests.acceptance.process_output import ProcessOutput
from tests.support.hub.browser import Product, User
from tests.support.launch.rank_scripts import count_ranks
from tests.support.product import wait_for

ALL_REDUCE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    print("sum", total.item())
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def notebook(product: Product, make_user: Callable[[str], User]) -> Iterator[Notebook]:
    """ada's notebook on the RTX 5070."""
    started = Notebook(product, make_user("ada"), "rtx5070")
    started.write("reduce.py", ALL_REDUCE)
    yield started
    started.stop()


def has_only_own_gpu(notebook: Notebook) -> bool:
    """Return whether the user has only the notebook's GPU."""
    return notebook.user.holders() == {"RTX 5070": "ada"}


def test_notebook_has_no_docker_and_no_cluster_secrets(notebook: Notebook):
    """The notebook has no Docker socket, capability or setuid root program, and only the leased GPU."""
    output = notebook.run(
        """
        import os, pathlib, subprocess
        status = pathlib.Path("/proc/self/status").read_text()
        print([line for line in status.splitlines() if line.startswith(("CapEff", "CapBnd", "NoNewPrivs", "Uid"))])
        print(os.path.exists("/var/run/docker.sock"), os.path.exists("/run/docker.sock"))
        print(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout)
        try: open("/datasets/x", "w")
        except OSError as error: print("datasets:", error.strerror)
        """
    )
    assert "CapEff:\\t0000000000000000" in output
    assert "CapBnd:\\t0000000000000000" in output
    assert "NoNewPrivs:\\t1" in output
    assert "Uid:\\t20" in output
    assert "False False" in output
    assert output.count("GPU 0") == 1
    assert "GPU 1" not in output
    assert "RTX 5070" in output
    assert "datasets: Read-only file system" in output


def test_a_failing_ranks_own_traceback_comes_first(notebook: Notebook):
    """The failing rank is named with its own error, the others take one line each, and the GPUs are released."""
    notebook.write(
        "fail.py",
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("rank one is unwell")
        time.sleep(60)
        """,
    )
    output = notebook.run(
        """
        import gpu_launch
        try: gpu_launch.run("fail.py", nnodes=3)
        except gpu_launch.LaunchFailed as error: print("FAILED", error)
        """
    )
    failure = output[output.index("FAILED") :]
    assert failure.startswith("FAILED rank 1 on rig")
    assert "ValueError: rank one is unwell" in failure
    assert failure.index("fail.py") < failure.index("ValueError") < failure.index("were stopped")
    assert "torch/distributed" not in failure
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--nnodes 4 reduce.py", "3 nodes"),
        ("--nnodes 0 reduce.py", "--nnodes"),
        ("--nnodes 2 nothing.py", "nothing.py"),
        ("--nodes 2 reduce.py", "--nnodes"),
        ("--nnodes two reduce.py", "two"),
        ("--nnodes 2 --model RTX9090 reduce.py", "RTX9090"),
        ("--nnodes 2", "script"),
        ("--nnodes 2 --nproc-per-node 99 reduce.py", "99"),
    ],
)
def test_invalid_launch_is_refused_before_a_request(notebook: Notebook, words: str, expected: str):
    """A mistake in the magic's line gives one or two lines with the remedy and no traceback."""
    output = notebook.run(
        f"""
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "gpu_launch")
        shell.run_cell("%gpu_launch {words}")
        """
    )
    assert expected in output
    assert "gpu_launch/" not in output, "a traceback of ours"
    assert len([line for line in output.splitlines() if line.strip()]) <= 4, output
    assert has_only_own_gpu(notebook)


def test_ipyparallel_engines_on_three_nodes(notebook: Notebook):
    """`ipp.Cluster(engines="gpuhub", n=3)` gives an engine on each node and releases its GPUs at the end."""
    output = notebook.run(
        """
        import ipyparallel as ipp
        cluster = ipp.Cluster(engines="gpuhub", n=3)
        rc = cluster.start_and_connect_sync()
        nodes = rc[:].apply_sync(lambda: __import__("os").environ["GPUHUB_NODE"])
        print("NODES", sorted(nodes))
        cluster.stop_cluster_sync()
        """
    )
    assert "NODES ['rig1', 'rig2', 'rig3']" in output
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free")


def test_displays_of_ranks_have_tabs(notebook: Notebook):
    """Ranks on two nodes show HTML, each under its own title, and their variables stay for the next cell."""
    cells = (
        "%load_ext gpu_launch",
        "%%gpu_ranks --nnodes 2\nfrom IPython.display import HTML\nnumber = rank + 1",
        "%%gpu_ranks\ndisplay(HTML(f'<b>of rank {rank}</b>'))\nnumber",
        "%gpu_ranks --stop\n%gpu_release",
    )
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.write("tabs.ipynb", nbformat.writes(written))
    output = notebook.execute("tabs", folder=".")
    assert "rank 0: 1 display, rank 1: 1 display" in output, output
    assert re.search(r"\[rank 1 · rig\d\] 2\n", output), output
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPU is free")


def test_ranks_of_a_terminals_ipython_display_text(notebook: Notebook):
    """Where nothing else can be shown."""
    [output, _] = notebook.cells("%%gpu_ranks\ndisplay(rank + 41)", "%gpu_ranks --stop")
    assert re.search(r"\[rank 0 · rig\d\] 41\n", output), output


def test_elastic_launch_takes_a_node_that_becomes_free(
    product: Product, make_user: Callable[[str], User], notebook: Notebook
):
    """`--nnodes 1:3` begins beside another user's notebook, and starts its ranks again on its GPU once that has ended."""
    notebook.write(
        "grow.py",
        """
        import os, time
        print("world of", os.environ["WORLD_SIZE"], flush=True)
        time.sleep(0 if os.environ["WORLD_SIZE"] == "3" else 600)
        """,
    )
    ben = Notebook(product, make_user("ben"), "rtx5060")
    with notebook.start_cells("%gpu_launch --nnodes 1:3 --keep 0s grow.py") as process:
        output = ProcessOutput(process)
        output.wait("world of 2")
        ben.stop()
        output.wait("world of 3", 120)
        assert "Error" not in output.rest()
    wait_for(lambda: has_only_own_gpu(notebook), "the other GPUs are free")


def test_killed_kernel_releases_its_gpus(notebook: Notebook):
    """After SIGKILL of the launching process its GPUs are released when the heartbeats time out."""
    notebook.write("sleep.py", "import time; print('sleeping', flush=True); time.sleep(600)")
    process = notebook.start("import gpu_launch; gpu_launch.run('sleep.py', nnodes=3)")
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if "sleeping" in line:
            break
    assert len(notebook.user.holders()) == 3, seen
    notebook.kill("gpu_launch.run('sleep.py'")
    process.communicate(timeout=60)
    wait_for(lambda: has_only_own_gpu(notebook), "the GPUs of the dead kernel are free", deadline_s=45)


def test_a_launch_from_a_notebook_without_a_gpu(product: Product, make_user: Callable[[str], User], notebook: Notebook):
    """A CPU-only notebook launches on the two free nodes while another user has the third."""
    ben = Notebook(product, make_user("ben"), "cpu")
    try:
        ben.write("reduce.py", ALL_REDUCE)
        output = ben.run("import gpu_launch; gpu_launch.run('reduce.py', nnodes=2)")
        assert count_ranks(output, "sum 3.0") == 2, output
        assert "rig1" in output
        assert "rig3" in output
        wait_for(lambda: has_only_own_gpu(notebook), "ben's GPUs are free")
    finally:
        ben.user.click_stop()
        ben.user.page.wait_for_selector("#stop", state="hidden")
