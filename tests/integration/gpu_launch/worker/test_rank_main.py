"""A script runs in a rank as under plain Python: the same scripts, with and without gpu_launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipapp

import pytest

#: A thread of gloo releases a Python callback, which takes a second, while the script ends.
LATE_CALLBACK = """
    import time
    import torch
    import torch.distributed as dist

    class Callback:
        def __call__(self, future):
            return future.value()

        def __del__(self):
            time.sleep(1)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(Callback()).wait()
    print("trained")
"""
LOOK = """
    import atexit, inspect, json, pickle, sys
    class Net: pass
    def f(): return 1
    main = sys.modules["__main__"]
    seen = {
        "name": __name__, "file": __file__, "argv": sys.argv, "path0": sys.path[0], "spec": __spec__ and __spec__.name,
        "package": __package__, "doc": __doc__, "cached": __cached__, "own": main.__dict__ is globals(),
        "source": inspect.getsource(f), "loader": type(__loader__).__name__, "builtins": type(__builtins__).__name__,
        "pickled": type(pickle.loads(pickle.dumps(Net()))) is Net,
        "names": sorted(name for name in globals() if name.startswith("__") and name != "__annotations__"),
    }
    atexit.register(lambda: print(json.dumps(seen | {"at_exit": sys.modules["__main__"].__name__})))
"""


@pytest.fixture
def both(tmp_path):
    """Return a function that runs a command line with Python and with `ranks.script`, and returns both results."""

    def call(*words, **environ):
        ends = []
        for ours in ([], ["-m", "gpu_launch.worker.rank_main"]):
            ends.append(
                subprocess.run(
                    [sys.executable, *ours, *words],
                    cwd=tmp_path,
                    env=os.environ | environ,
                    capture_output=True,
                    text=True,
                    check=False,
                )
            )
        return ends

    return call


@pytest.fixture
def files(tmp_path):
    """Write a script, a package, a folder and an archive that inspect themselves."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for path in (tmp_path / "look.py", package / "look.py", package / "__main__.py"):
        path.write_text(textwrap.dedent(LOOK))
    folder = tmp_path / "dir"
    folder.mkdir()
    (folder / "__main__.py").write_text(textwrap.dedent(LOOK))
    zipapp.create_archive(folder, tmp_path / "app.pyz")
    (tmp_path / "link.py").symlink_to(package / "look.py")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["look.py", "--epochs", "2", "-m"],
        ["./pkg/../look.py"],
        ["pkg/look.py"],
        ["link.py"],
        ["-m", "look", "a"],
        ["-m", "pkg.look"],
        ["-m", "pkg"],
        ["dir", "x"],
        ["app.pyz"],
    ],
    ids=" ".join,
)
def test_script_environment_matches_plain_python(files, both, words):
    """Names, path, arguments, sources and `__main__` are equal until the very end."""
    plain, ours = both(*words)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("def f():\n    raise ValueError('x')\nf()\n", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('y') from error\n", 1),
        ("import sys\nsys.exit(7)\n", 7),
        ("raise SystemExit('bye')\n", 1),
        ("raise KeyboardInterrupt\n", -2),
        ("import os\nos.kill(os.getpid(), 15)\n", -15),
        ("raise ExceptionGroup('two', [ValueError(1), TypeError(2)])\n", 1),
    ],
    ids=["error", "chained", "exit code", "exit text", "interrupt", "signal", "group"],
)
def test_exit_matches_plain_python(tmp_path, both, body, code):
    """Exit code and stderr are equal, without a frame of gpu_launch."""
    (tmp_path / "train.py").write_text(body)
    plain, ours = both("train.py")
    assert plain.returncode == ours.returncode == code
    assert ours.stderr == plain.stderr


def test_excepthook_of_the_script_is_kept(tmp_path, both):
    """Loggers and debuggers set such hooks."""
    (tmp_path / "train.py").write_text(
        "import sys\nsys.excepthook = lambda *a: print('hooked', a[0].__name__)\n1 / 0\n"
    )
    assert [end.stdout for end in both("train.py")] == ["hooked ZeroDivisionError\n"] * 2


def test_a_callback_of_gloo_does_not_abort_a_rank_that_succeeded(tmp_path, both):
    """Python itself aborts there in most runs; `--comm` has such callbacks in every rank."""
    (tmp_path / "train.py").write_text(textwrap.dedent(LATE_CALLBACK))
    _, ours = both("train.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, "trained\n", "")


def test_a_syntax_error_is_shown_with_its_line(tmp_path, both):
    """The traceback has no frame at all in this case, as with Python."""
    (tmp_path / "train.py").write_text("x = 1\nx = = 2\n")
    _, ours = both("train.py")
    assert ours.returncode == 1
    assert "rank_main" not in ours.stderr
    assert "line 2\n    x = = 2\n" in ours.stderr
    assert ours.stderr.endswith("SyntaxError: invalid syntax\n")


@pytest.mark.parametrize(
    "words", [["nothing.py"], ["-m", "no_such_module_here"], ["-m", "json.encoder.x"]], ids=" ".join
)
def test_missing_script_or_module_fails(both, words):
    """The error has the name of the missing script or module."""
    for end in both(*words):
        assert end.returncode
        assert words[-1].removesuffix(".x") in end.stderr


def test_spawned_subprocesses_find_the_script(tmp_path, both):
    """DataLoaders with `spawn` rely on this."""
    (tmp_path / "train.py").write_text(
        "import multiprocessing\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    assert [end.stdout for end in both("train.py")] == ["[2, 4]\n"] * 2


def test_python_safe_path_is_respected(tmp_path, both):
    """PYTHONSAFEPATH excludes the script's folder."""
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "train.py").write_text("import helper\n")
    for end in both("train.py", PYTHONSAFEPATH="1"):
        assert "No module named 'helper'" in end.stderr
