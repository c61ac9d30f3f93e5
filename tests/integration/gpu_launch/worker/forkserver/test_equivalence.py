"""A forked rank has the same environment as a rank of torchrun: each script runs both ways."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from gpu_launch.common.launch_spec import StartMethod
from gpu_launch.worker import jax_cluster, rank_debugger

pytestmark = pytest.mark.torch

#: Writes everything that a script can query about its process.
PROBE = """
    import atexit, gc, json, locale, multiprocessing, os, random, resource, signal, sys, tempfile, warnings
    import numpy, torch, torch.distributed as dist

    def kind(handler):
        return getattr(handler, "__name__", str(handler))

    links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{fd}")}
    status = dict(line.strip().partition(":\\t")[::2] for line in open("/proc/self/status"))
    found = {
        "environ": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "warnoptions": sys.warnoptions,
        "executable": sys.executable,
        "name": __name__, "file": __file__, "spec": str(__spec__), "package": __package__,
        "globals": sorted(name for name in globals() if name.startswith("__")),
        "is_main": sys.modules["__main__"].__dict__ is globals(),
        "cwd": os.getcwd(),
        "files": sorted((fd, os.path.basename(link)) for fd, link in links.items()),
        "modes": [os.get_inheritable(0), os.get_inheritable(1), os.get_inheritable(2)],
        "signals": {int(number): kind(signal.getsignal(number)) for number in signal.valid_signals()},
        "mask": [status[name] for name in ("SigBlk", "SigIgn")],
        "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "umask": status["Umask"],
        "nice": os.nice(0),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource)
                   if name.startswith("RLIMIT_")},
        "streams": [(file.encoding, file.errors, file.line_buffering, file.write_through, file.isatty())
                    for file in (sys.stdin, sys.stdout, sys.stderr)],
        "stdin": sys.stdin.read(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "recursion": sys.getrecursionlimit(),
        "filters": len(warnings.filters),
        "methods": multiprocessing.get_start_method(allow_none=True),
        "children": len(multiprocessing.active_children()),
        "tmp": tempfile.gettempdir(),
        "zone": __import__("time").tzname,
        "cuda": [torch.cuda.is_available(), torch.cuda.is_initialized()],
        "debug": str(dist.get_debug_level()),
        "tasks": len(os.listdir("/proc/self/task")),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "locale": locale.setlocale(locale.LC_ALL),
        "elastic": dist.is_torchelastic_launched(),
    }
    random_now = [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()]
    with open(f"{sys.argv[1]}-{os.environ['RANK']}.json", "w") as file:
        json.dump([found, random_now], file)
"""
#: Variables that differ between starts.
OWN = (
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "GPU_LAUNCH_PROGRESS",
    "GPU_LAUNCH_RANKS",
    "GPU_LAUNCH_STACKS",
)
#: Variables that ranks have for JAX, whose port differs between starts, and torchrun's have not.
OF_JAX = (jax_cluster.COORDINATOR_ADDRESS, jax_cluster.NUM_PROCESSES, jax_cluster.PROCESS_ID)


def run_forked_and_torchrun(node, script, *, nproc=2, **parts):
    """Return the probe's results by rank, forked and under torchrun."""
    found = []
    for way in (StartMethod.FORK, StartMethod.TORCHRUN):
        out = node.home / f"found-{way}"
        exit_message = node.launch(script, out, "${local_rank} of $5", way=way, nproc=nproc, **parts)
        assert exit_message["code"] == 0, (node.text("stderr"), exit_message)
        found.append([json.loads((node.home / f"found-{way}-{rank}.json").read_text()) for rank in range(nproc)])
    return found


def drop_varying_parts(found):
    """Return a probe's results without the parts that differ between starts."""
    environ = dict(found["environ"])
    assert environ.pop("TORCHELASTIC_ERROR_FILE").endswith("error.json")
    for name in (*OWN, *OF_JAX):
        environ.pop(name, None)
    argv = [word.replace("found-torchrun", "found-fork") for word in found["argv"]]
    orig = [word.replace("found-torchrun", "found-fork") for word in found["orig_argv"]]
    # With a given number of threads, torch has one more idle thread.
    tasks = 1 if "OMP_NUM_THREADS" in found["environ"] else found["tasks"]
    # Ranks of gpu_launch keep a file open for their stacks, see `worker.rank_stacks`.
    files = [[number, name] for number, name in found["files"] if int(number) < 400]
    # The debugger stops ranks of gpu_launch by this signal.
    signals = {number: kind for number, kind in found["signals"].items() if int(number) != rank_debugger.SIGNAL}
    varying = {"files": files, "signals": signals, "environ": environ, "argv": argv, "orig_argv": orig, "tasks": tasks}
    return found | varying


@pytest.fixture(scope="module", autouse=True)
def deaf():
    """Ignore SIGHUP and SIGQUIT in the agent, as a shell's background jobs and nohup do."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def plain(node):
    """The probe's results with default settings."""
    return run_forked_and_torchrun(node, node.script(PROBE))


@pytest.mark.parametrize(
    "parts",
    [
        None,
        {"environ": {"OMP_NUM_THREADS": "2", "TZ": "Asia/Tokyo", "MINE": "ü\n1"}, "nproc": 1},
        {"python_path": "/nowhere:/tmp", "torchrun_flags": ("--role=trainer",)},
    ],
    ids=["plain", "environment", "path and role"],
)
def test_forked_rank_has_the_environment_of_torchrun(node, plain, parts):
    """Environment, arguments, paths, files, signals, limits, threads and seeds are equal."""
    forked, cold = plain if parts is None else run_forked_and_torchrun(node, node.script(PROBE), **parts)
    for (one, _), (other, _) in zip(forked, cold, strict=True):
        assert drop_varying_parts(one) == drop_varying_parts(other)
        assert one["environ"][jax_cluster.PROCESS_ID] == one["environ"]["RANK"]
        assert one["signals"][str(rank_debugger.SIGNAL)] == "_handle_signal"


def test_forked_ranks_have_separate_random_states(plain):
    """Forked ranks differ from each other where torchrun's ranks do."""
    forked, cold = plain
    (_, one), (_, other) = forked
    (_, cold_one), (_, cold_other) = cold
    assert [a == b for a, b in zip(one, other, strict=True)] == [
        a == b for a, b in zip(cold_one, cold_other, strict=True)
    ]
    assert one[:2] != other[:2]


def test_log_folders_match_torchruns(node):
    """Folders and file names are the same, and the agent follows both."""
    script = node.script("import sys; print('out'); print('err', file=sys.stderr)")
    trees = []
    for way in (StartMethod.FORK, StartMethod.TORCHRUN):
        assert node.launch(script, way=way, nproc=2)["code"] == 0
        assert [node.text(rank=rank) for rank in range(2)] == ["out\n"] * 2
        trees.append({"/".join(path.parts[-3:]) for path in node.run.logs.glob("node0/*/*/*/*")})
    assert trees[0] == trees[1] == {
        f"attempt_0/{rank}/{name}.log" for rank in (0, 1) for name in ("stdout", "stderr")
    }  # fmt: skip


RECORDED = """
    import os, sys
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        raise ValueError(f"bad {os.environ['RANK']}")

    main()
"""


def test_error_files_match_torchruns(node):
    """`record` writes the same message; the reported error has the script's lines and none of gpu_launch."""
    texts, errors = [], []
    for way in (StartMethod.FORK, StartMethod.TORCHRUN):
        message = node.launch(node.script(RECORDED), way=way)
        assert message["code"] == 1
        texts.append(json.loads(node.log("error.json").read_text())["message"]["message"])
        (end,) = message["ends"]
        assert end["exit_code"] == 1
        errors.append(end["error"])
    assert texts == ["ValueError: bad 0"] * 2
    for error in errors:
        assert 'raise ValueError(f"bad' in error
        assert error.rstrip().endswith("ValueError: bad 0")
    assert "gpu_launch" not in errors[0]


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(0)", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("import os; os._exit(5)", 5, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("def f(:", 1, "SyntaxError"),
        ("import os; os.close(1); print('x', flush=True)", 1, "Bad file descriptor"),
    ],
)
def test_scripts_end_as_under_torchrun(node, code, exit_code, said):
    """Exit codes are equal, and Python's own messages appear once; torchrun starts `python -u SCRIPT`."""
    script = node.script(code)
    (end,) = node.launch(script)["ends"]
    cold = subprocess.run(
        [sys.executable, "-u", script], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (end["exit_code"], node.text("stderr")) == (cold.returncode, cold.stderr)
    assert end["exit_code"] == exit_code
    assert said in cold.stderr
    assert [message["end"]["exit_code"] for message in node.of("failed")] == ([exit_code] if exit_code else [])


LIVELY = """
    import inspect, pickle, sys, threading, time, atexit
    import torch
    from torch.utils.data import DataLoader, Dataset
    import helper

    class Squares(Dataset):
        def __len__(self):
            return 6
        def __getitem__(self, index):
            return index ** 2

    def double(value):
        return 2 * value

    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=method)
            print(method, [int(batch) for batch in loader])
        print(pickle.loads(pickle.dumps(Squares())).__len__(), double.__module__)
        print(inspect.getsource(double).strip().splitlines()[0], helper.WORD)
        atexit.register(print, "at the end")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread done"))).start()
"""


def test_subprocesses_pickle_and_sources_work_in_forked_ranks(node):
    """DataLoaders with every start method, pickling from __main__, sources, threads and exit functions work."""
    node.script("WORD = 'beside'", "helper.py")
    assert node.launch(node.script(LIVELY))["code"] == 0, node.text("stderr")
    assert node.text().splitlines() == [
        "fork [0, 1, 4, 9, 16, 25]",
        "spawn [0, 1, 4, 9, 16, 25]",
        "forkserver [0, 1, 4, 9, 16, 25]",
        "6 __main__",
        "def double(value): beside",
        "thread done",
        "at the end",
    ]


def test_module_flag_runs_like_python_m(node):
    """`--module` sets name, package and arguments as `python -m` does."""
    (node.home / "work" / "pack").mkdir(parents=True, exist_ok=True)
    (node.home / "work" / "pack" / "__init__.py").write_text("")
    (node.home / "work" / "pack" / "train.py").write_text(
        "import sys; print(__name__, __package__, __spec__.name, sys.argv, sys.orig_argv[1:], sys.path[0])"
    )
    said = []
    for way in (StartMethod.FORK, StartMethod.TORCHRUN):
        assert node.launch("pack.train", "x", way=way, module=True)["code"] == 0, node.text("stderr")
        said.append(node.text())
    assert said[0] == said[1]


def test_no_python_flag_runs_other_programs(node):
    """`--no-python` runs a program without Python in the rank."""
    said = []
    for way in (StartMethod.FORK, StartMethod.TORCHRUN):
        command = ("/bin/sh", "-c", "echo $RANK of $WORLD_SIZE; trap; exit 3")
        (end,) = node.launch(*command, way=way, no_python=True)["ends"]
        assert end["exit_code"] == 3
        said.append(node.text())
    assert said == ["0 of 1\n"] * 2


def test_scripts_own_modules_shadow_preloaded_ones(node):
    """Modules that the fork server has imported do not hide the script's own modules."""
    node.script("WORD = 'mine'", "tqdm.py")
    try:
        assert node.launch(node.script("import tqdm; print(tqdm.WORD)"))["code"] == 0, node.text("stderr")
    finally:
        (node.home / "work" / "tqdm.py").unlink()
    assert node.text() == "mine\n"
