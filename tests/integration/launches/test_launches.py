"""Successful launches on this machine, forked and under torchrun, as scripts and users see them."""

from __future__ import annotations

import json
import signal

from gpuhub.broker_api import schemas
from tests.support.launch.local_cluster import (
    DEADLINE_S,
    NODES,
    Notebook,
    gpu,
    lines_until,
    until,
    use_image_settings,
)
from tests.support.launch.rank_scripts import ALL_REDUCE, count_ranks

#: Variables that torchrun promises to ranks, and those that a launch adds.
PROMISED = """
    import json, os, sys
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
             "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
             "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "MINE"]
    seen = {name: os.environ.get(name) for name in names}
    seen["argv"], seen["name"], seen["path"] = sys.argv, __name__, sys.path[0]
    seen["secrets"] = [name for name in os.environ if "TOKEN" in name or "IPP_" in name]
    seen["error_file"] = os.path.basename(os.environ["TORCHELASTIC_ERROR_FILE"])
    seen["address"] = os.environ["MASTER_ADDR"]
    print("SEEN", json.dumps(seen))
"""


def test_three_nodes_reduce_and_all_gpus_are_released(either: Notebook) -> None:
    """Three nodes reduce to one value, with ranks and nodes named; every GPU is released, and what they did is shown."""
    either.script("hello.py", ALL_REDUCE + "    print('I am', os.environ['RANK'])\n")
    code, out, err = either.run(either.call("hello.py", arguments=["x y"], nnodes=3))
    assert code == 0, out + err
    assert count_ranks(out, "sum 6.0 of 3 x y") == 3
    assert count_ranks(err, "warned") == 3
    for rank, node in enumerate(NODES):
        assert f"[rank {rank} · {node}] I am {rank}\n" in out
    assert out.endswith("gpu_launch: 2 × 31 % busy, 2 of 12 GB\n")
    (gang,) = either.broker.groups.values()
    assert (gang.request.nnodes, gang.request.exclude_nodes) == (2, ("rig1",))
    assert gang.state is schemas.JobState.ENDED
    until(lambda: not either.left(), "no process left")
    assert not list(either.home.glob(".gpu_launch/jobs/*/engine.json"))
    assert not list(either.home.glob(".gpu_launch/jobs/*/lives"))


def test_scripts_have_torchruns_environment(either: Notebook) -> None:
    """Environment, arguments and paths are as torchrun promises, without the notebook's credentials."""
    either.script("show.py", PROMISED)
    launch = either.call("show.py", nnodes=2, max_restarts=2)
    code, out, err = either.run(f"import os, gpu_launch; os.environ['MINE'] = 'yes'; {launch}", gpus=())
    assert code == 0, out + err
    for rank, node in enumerate(("rig1", "rig2")):
        line = next(line for line in out.splitlines() if line.startswith(f"[rank {rank} · {node}] SEEN "))
        seen = json.loads(line.partition("SEEN ")[2])
        assert seen == {
            "RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank), "ROLE_RANK": str(rank),
            "ROLE_NAME": "default", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": seen["TORCHELASTIC_MAX_RESTARTS"],
            "TORCHELASTIC_USE_AGENT_STORE": seen["TORCHELASTIC_USE_AGENT_STORE"],
            "OMP_NUM_THREADS": seen["OMP_NUM_THREADS"], "MINE": "yes", "argv": ["show.py"], "name": "__main__",
            "path": str(either.home), "secrets": [], "error_file": "error.json", "address": "127.0.0.1",
        }  # fmt: skip
    logs = sorted(path.relative_to(either.home) for path in either.home.glob(".gpu_launch/jobs/*/logs/node*/**/*.log"))
    parts = [(path.parts[4], *path.parts[6:]) for path in logs]
    assert parts == [
        (f"node{node}", "attempt_0", "0", f"{stream}.log") for node in (0, 1) for stream in ("stderr", "stdout")
    ]


def test_ranks_meet_on_the_data_network(either: Notebook) -> None:
    """Where containers have one; what the notebook and its workers say to each other stays on the user's network."""
    either.broker.data_subnet = "127.0.0.9/32"
    either.script(
        "where.py", ALL_REDUCE + "    print('at', os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'])\n"
    )
    code, out, err = either.run(either.call("where.py", nnodes=2))
    assert code == 0, out + err
    assert count_ranks(out, "at 127.0.0.9 lo") == 2


def test_ranks_on_simulated_and_real_gpus_compute_on_the_cpu(either: Notebook) -> None:
    """A note says so; the user's own choice of GPUs takes precedence."""
    either.script("where.py", ALL_REDUCE + "    print('sees', repr(os.environ.get('CUDA_VISIBLE_DEVICES')))\n")
    launch = either.call("where.py", nnodes=2)
    code, out, err = either.run(
        f"""
        import os
        from dataclasses import replace
        from gpu_launch.launch import startup
        describe = startup.describe_mixed_gpus
        startup.describe_mixed_gpus = lambda infos: describe(
            [replace(info, is_simulated=info.node == "rig1") for info in infos]
        )
        {launch}
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        {launch}
        """
    )
    assert code == 0, out + err
    assert (out + err).count("the GPUs of rig1 are simulated, and those of rig2 are real") == 2
    assert (count_ranks(out, "sees ''"), count_ranks(out, "sees '0'")) == (2, 2)


def test_cell_runs_as_a_script_in_the_notebooks_folder(notebook: Notebook) -> None:
    """The cell's body is every rank's script, with imports from the notebook's folder and its own arguments."""
    notebook.script("helper.py", "WORD = 'imported'")
    code, out, err = notebook.run(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "gpu_launch")
        cell = "import helper, sys\\nprint(helper.WORD, sys.argv[1:])"
        shell.run_cell_magic("gpu_launch", "--nnodes 2 -- a 'b c'", cell)
        shell.run_cell("%gpu_launch --nnodes 2 missing.py")
        """
    )
    assert code == 0, out + err
    assert count_ranks(out, "imported ['a', 'b c']") == 2
    assert "UsageError: There is no script missing.py in ~/." in out
    assert "Traceback" not in out + err


def test_flag_that_needs_torchrun_uses_torchrun(notebook: Notebook) -> None:
    """A launch whose flag only torchrun supports uses torchrun and reports the reason once."""
    notebook.script("hello.py", ALL_REDUCE)
    code, out, err = notebook.run(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "gpu_launch")
        shell.run_line_magic("gpu_launch", "--signals-to-handle=SIGTERM hello.py")
        """
    )
    assert code == 0, out + err
    assert out.count("gpu_launch: ranks are started by torchrun itself: --signals-to-handle is its own\n") == 1
    assert "sum 1.0 of 1" in out


def test_too_many_nodes_are_refused_before_a_request(notebook: Notebook) -> None:
    """A launch with more nodes than the cluster has is refused with the largest possible number."""
    notebook.script("hello.py", ALL_REDUCE)
    code, _, err = notebook.run(notebook.call("hello.py", nnodes=4))
    assert code == 1
    assert "Use --nnodes 3 or less" in err
    assert not notebook.broker.groups


def test_waiting_launch_shows_its_queue_position(notebook: Notebook) -> None:
    """The queue position and the GPU's owner are shown until the grant, after what the user holds already."""
    notebook.broker.busy = True
    gpus = [gpu("rig2").model_dump()]
    notebook.broker.leases = [
        {"owner": "ada", "purpose": "notebook", "subject": "second", "state": "active", "gpus": gpus}
    ]
    notebook.script("hello.py", ALL_REDUCE)
    process = notebook.start(notebook.call("hello.py", nnodes=2))
    lines_until(process, "gpu_launch:   notebook 'second' (rig2 RTX 5070): stop it on the hub's Home page")
    lines_until(
        process,
        "waiting for 1 GPU on 1 node: position 1, expected to start in about 25 min; waits for RTX 5070 held by bob",
    )
    notebook.broker.grant(next(iter(notebook.broker.groups)))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert "sum 3.0 of 2" in out


def test_ipyparallel_cluster_works_by_default(notebook: Notebook) -> None:
    """With the image's settings `ipp.Cluster(engines="gpuhub", n=3)` gives one engine a node, encrypted."""
    use_image_settings(notebook)
    code, out, err = notebook.run(
        """
        import json
        import ipyparallel as ipp
        with ipp.Cluster(engines="gpuhub", n=3) as client:
            print(sorted(client[:].apply_sync(lambda: __import__("os").environ["GPUHUB_NODE"])))
            print("CURVE", bool(json.load(open(client.cluster.controller.connection_files["engine"]))["curve_serverkey"]))
        """
    )
    assert code == 0, out + err
    assert "['rig1', 'rig2', 'rig3']" in out
    assert "CURVE True" in out
    until(lambda: not notebook.left(), "no process left")


def test_executor_runs_calls_on_workers_with_gpus(notebook: Notebook) -> None:
    """Two calls at a time on two nodes; the GPUs are released after the last one."""
    use_image_settings(notebook)
    code, out, err = notebook.run(
        """
        import os, time
        import gpu_launch
        def where(number):
            time.sleep(0.2)
            return os.environ["GPUHUB_NODE"], number * 2
        with gpu_launch.Executor(max_workers=2) as executor:
            found = list(executor.map(where, range(6)))
        print("RESULTS", [number for _, number in found])
        print("NODES", sorted({node for node, _ in found}))
        """
    )
    assert code == 0, out + err
    assert "RESULTS [0, 2, 4, 6, 8, 10]" in out
    assert "NODES ['rig1', 'rig2']" in out
    until(lambda: not notebook.left(), "no process left")


def test_interrupted_executor_cancels_its_request(notebook: Notebook) -> None:
    """While it waits for GPUs, its place in the queue is shown; an interrupt cancels the call and the request."""
    use_image_settings(notebook)
    notebook.broker.busy = True
    process = notebook.start(
        """
        import gpu_launch
        try:
            with gpu_launch.Executor(max_workers=2) as executor:
                future = executor.submit(id, 1)
                future.result()
        except KeyboardInterrupt:
            print("CANCELLED", future.cancelled(), flush=True)
        """
    )
    lines_until(process, "gpu_launch: waiting for 1 GPU on 1 node: position 1, expected to start in about 25 min")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (0, "CANCELLED True\n", "")
    (group,) = notebook.broker.groups.values()
    assert group.state is schemas.JobState.ENDED
    until(lambda: not notebook.left(), "no process left")
