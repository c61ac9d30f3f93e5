"""`ipp.Cluster(engines="gpuhub")` behaves as with ipyparallel's own launchers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import local_cluster
from tests.support.launch.local_cluster import Notebook, kill_all, until, use_image_settings

ROOT = Path(__file__).parents[3]
SUITE = ROOT / "tests" / "support" / "launch" / "ipyparallel_suite.py"
LIMIT_S = 300
#: Some of its tests start five engines, which are on as many nodes.
NODES = ("rig1", "rig2", "rig3", "rig4", "rig5")


def test_ipyparallels_own_tests_pass(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting, stopping, signals, restarts, output, and taking over a cluster from another process."""
    monkeypatch.setattr(local_cluster, "NODES", NODES)
    monkeypatch.setattr(local_cluster, "MODELS", ("RTX 5090",) * len(NODES))
    monkeypatch.setattr(local_cluster, "MEMORY_MIB", (32_607,) * len(NODES))
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        str(notebook.home),
        "-o",
        "asyncio_mode=auto",
    ]
    code, out, err = notebook.run(
        f"import sys, pytest; sys.exit(pytest.main([*{words}, {str(SUITE)!r}]))", limit_s=LIMIT_S
    )
    assert code == 0, out[-12000:] + err[-4000:]
    assert re.search(r"^9 passed", out, re.MULTILINE), out
    try:
        until(lambda: not [line for line in notebook.left() if "gpu_launch" in line], "no worker or engine left")
    finally:
        # A controller that ipyparallel's launcher kills, because it took too long to end, leaves its schedulers.
        kill_all(f"HOME={notebook.home}")


def test_signals_reach_one_set_and_added_engines_have_other_gpus(notebook: Notebook) -> None:
    """SIGINT interrupts the calls of all engines of a set, and of no other; idle engines continue."""
    use_image_settings(notebook)
    notebook.broker.held = {"rig1"}  # the notebook's own, which the second set does not share
    code, out, err = notebook.run(
        """
        import os, signal, time
        import ipyparallel as ipp
        def doze(seconds):
            import os, time
            open(f"{os.environ['HOME']}/began-{os.environ['GPUHUB_NODE']}", "w").close()
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(0.05)
            return "slept"
        def await_files(*nodes):
            deadline = time.monotonic() + 60
            while not all(os.path.exists(f"began-{node}") for node in nodes):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        with ipp.Cluster(engines="gpuhub", n=1) as client:
            cluster = client.cluster
            (first,) = cluster.engines
            second = cluster.start_engines_sync(2)
            client.wait_for_engines(3, timeout=60)
            nodes = {engine: client[engine].apply_sync(lambda: __import__("os").environ["GPUHUB_NODE"]) for engine in client.ids}
            print("NODES", [nodes[engine] for engine in sorted(nodes)][:1], sorted(nodes.values()))
            calls = {nodes[engine]: client[engine].apply_async(doze, 3 if nodes[engine] == "rig1" else 120) for engine in client.ids}
            await_files("rig1", "rig2", "rig3")
            cluster.signal_engines_sync(signal.SIGINT, second)
            for node, call in sorted(calls.items()):
                try:
                    print("CALL", node, call.get(timeout=60))
                except ipp.error.RemoteError as error:
                    print("CALL", node, error.ename)
            cluster.signal_engines_sync(signal.SIGINT)
            print("ALIVE", client[:].apply_sync(lambda: "yes"))
            cluster.stop_engines_sync(second)
            cluster.engines[first].run_id = "run-of-another"
            try:
                cluster.signal_engines_sync(signal.SIGINT)
            except Exception as error:
                print("REFUSED", error)
        """
    )
    assert code == 0, out + err
    assert "NODES ['rig1'] ['rig1', 'rig2', 'rig3']" in out
    assert "CALL rig1 slept" in out
    assert "CALL rig2 KeyboardInterrupt" in out
    assert "CALL rig3 KeyboardInterrupt" in out
    assert "ALIVE ['yes', 'yes', 'yes']" in out
    assert "REFUSED Signal 2: no engine of run-of-another is connected (any more)." in out
    until(lambda: not notebook.left(), "no process left")
