"""The memory cap of a part of a GPU, tested with a module in place of torch."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_launch.common import memory_cap

#: The part of torch that the cap needs: `torch.cuda.init()` initialises CUDA and runs the queued calls.
TORCH = """
    from types import SimpleNamespace

    class Cuda:
        def __init__(self):
            self.waiting, self.fractions, self.is_initialized = [], [], False

        def _lazy_call(self, call):
            self.waiting.append(call)

        def init(self):
            self.is_initialized = True
            for call in self.waiting:
                call()

        def get_device_properties(self, device):
            return SimpleNamespace(total_memory=16 * 1024**3)

        def set_per_process_memory_fraction(self, fraction, device):
            self.fractions.append([fraction, device])

    cuda = Cuda()
"""


@pytest.fixture
def run(tmp_path):
    """Run Python code in a separate process with a replacement for torch, and return the JSON that it prints."""
    (tmp_path / "torch.py").write_text(textwrap.dedent(TORCH))

    def call(code, *arguments, cap="4096", python=("-c",)):
        environ = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
        if cap is not None:
            environ["GPUHUB_GPU_MEMORY_CAP_MIB"] = cap
        command = [sys.executable, *python, code, *arguments]
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


FRACTIONS = "print(json.dumps([torch.cuda.is_initialized, torch.cuda.init(), torch.cuda.fractions]))"


@pytest.mark.parametrize(
    "order",
    ["memory_cap.install(); import torch", "import torch; memory_cap.install()"],
    ids=["torch later", "torch before"],
)
def test_memory_cap_is_set_when_cuda_is_initialised(run, order):
    """The cap is set when CUDA is initialised; importing torch does not initialise it."""
    before, _, fractions = run(f"import json; from gpu_launch.common import memory_cap; {order}; {FRACTIONS}")
    assert (before, fractions) == (False, [[0.25, 0]])


def test_find_spec_of_torch_has_no_side_effects(run):
    """Libraries look for torch without importing it; the module that is imported later has its own loader."""
    code = """
import importlib.util, json, sys
from gpu_launch.common import import_hook, memory_cap
memory_cap.install()
found = importlib.util.find_spec("torch") is not None
was_imported = "torch" in sys.modules
import torch
torch.cuda.init()
left = [finder for finder in sys.meta_path if isinstance(finder, import_hook._Finder)]
print(json.dumps([found, was_imported, torch.cuda.fractions, len(left), type(torch.__loader__).__name__,
                  type(torch.__spec__.loader).__name__]))
"""
    assert run(code) == [True, False, [[0.25, 0]], 0, "SourceFileLoader", "SourceFileLoader"]


@pytest.mark.parametrize("cap", [None, "", "0", "lots"])
def test_whole_gpu_has_no_memory_cap(run, cap):
    """No import hook is installed."""
    code = "import json, sys; from gpu_launch.common import memory_cap; n = len(sys.meta_path); memory_cap.install(); "
    code += f"import torch; assert len(sys.meta_path) == n; {FRACTIONS}"
    assert run(code, cap=cap)[2] == []


def test_cap_is_limited_to_the_memory_of_the_gpu():
    """The fraction is at most 1."""
    fractions = []
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            _lazy_call=lambda call: call(),
            get_device_properties=lambda device: SimpleNamespace(total_memory=8 * 1024**3),
            set_per_process_memory_fraction=lambda fraction, device: fractions.append((fraction, device)),
        )
    )
    memory_cap.limit_process(torch, 9000)
    assert fractions == [(1.0, 0)]


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_capped_script_runs_as_under_plain_python(run, tmp_path, as_module):
    """The script has its own name, arguments and import folder, and torch has the cap."""
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "helper.py").write_text("WORD = 'imported'")
    (folder / "train.py").write_text(
        "import json, sys, torch\n"
        f"import {'pkg.' if as_module else ''}helper as helper\n"
        "torch.cuda.init()\n"
        "print(json.dumps([__name__, sys.argv[1:], sys.argv[0].endswith('train.py'), helper.WORD,\n"
        "                  torch.cuda.fractions]))\n"
    )
    arguments = ["-m", "pkg.train"] if as_module else ["pkg/train.py"]
    found = run("gpu_launch.worker.rank_main", *arguments, "--epochs", "2", python=("-m",))
    assert found == ["__main__", ["--epochs", "2"], True, "imported", [[0.25, 0]]]


@pytest.mark.parametrize(
    ("cap", "extensions"), [("4096", ["gpu_launch", "gpu_launch.common.memory_cap"]), ("", ["gpu_launch"])]
)
def test_kernels_have_the_cap_only_with_a_gpu_share(monkeypatch, cap, extensions):
    """The image's settings name the extension that installs the cap."""
    monkeypatch.setenv("GPUHUB_GPU_MEMORY_CAP_MIB", cap)
    settings = Path(memory_cap.__file__).parents[1] / "image_config" / "ipython_config.py"
    config = SimpleNamespace(InteractiveShellApp=SimpleNamespace(extensions=[]))
    runpy.run_path(str(settings), {"get_config": lambda: config})
    assert config.InteractiveShellApp.extensions == extensions
