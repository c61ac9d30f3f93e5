"""`%%gpu` in a CPU notebook on this machine: variables in both directions, failures, interrupts, giving back."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhub.broker_api import schemas
from tests.support.launch.kernel import Kernel
from tests.support.launch.local_cluster import Notebook, until

DOCS = Path(__file__).parents[3] / "docs" / "launch.md"


@pytest.fixture
def kernel(notebook: Notebook) -> Iterator[Kernel]:
    """A kernel of a notebook without a GPU."""
    with contextlib.closing(Kernel(notebook, gpus=())) as started:
        yield started


def test_documented_example_runs(kernel: Kernel) -> None:
    """The cells of docs/launch.md train on a GPU, and the values are in the notebook."""
    section = DOCS.read_text().split("## A GPU for one cell")[1].split("\n## ")[0]
    before, train, after = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    kernel.good(before)
    assert re.search(r"loss \d+\.\d\d at first, 0\.0\d+ now\n", kernel.good(train))
    kernel.good(after)


def test_variables_reach_the_cell_and_its_own_come_back(kernel: Kernel) -> None:
    """What the cell uses is sent, functions with what they use; what it makes, changes or deletes is so afterwards."""
    assert kernel.good("%gpu").startswith("No GPU is held for cells.")
    kernel.good(
        "import os, math\nscale = 2\nnumbers = [1, 2]\nunused = open(os.devnull)\nold = 1\n"
        "class Box:\n    def __init__(self, x): self.x = x\n    def doubled(self): return twice(self.x)\n"
        "def twice(x):\n    return scale * x\nbox = Box(4)"
    )
    shown = kernel.good(
        "%%gpu\nnumbers.append(twice(box.doubled()))\nroot = math.sqrt(16)\nbox.x = 5\nhere = os.getpid()\n"
        "other = Box(6)\ndel old\nprint('in', os.environ['GPUHUB_NODE'])\nnumbers"
    )
    assert re.search(
        r"^gpu_launch: the cell runs on rig1 RTX 5090\. Released when others wait, after 10 min idle, or by",
        shown,
        re.M,
    )
    assert re.search(r"^in rig1\n\[1, 2, 16\]$", shown, re.M)
    assert kernel.good("print(numbers, root, box.x, box.doubled(), isinstance(other, Box), 'old' in globals())") == (
        "[1, 2, 16] 4.0 5 10 True False\n"
    )
    # A second use needs no start; a change of what a function uses reaches the cell, and nothing else is sent.
    shown = kernel.good("scale = 3\nbefore = here")
    shown = kernel.good("%%gpu\nassert os.getpid() == before\nprint(box.doubled(), other.x)")
    assert shown == "15 6\n"
    assert "idle for" in kernel.good("%gpu")
    # Nothing is said of workers that stay.
    assert kernel.good("%gpu --stop") == "gpu_launch: rig1 RTX 5090 is released\n"
    until(lambda: not kernel.notebook.broker.jobs(schemas.JobState.RUNNING), "the GPU is released")


def test_changes_in_functions_come_back(kernel: Kernel) -> None:
    """Also of methods and decorated ones, where the cell replaces the function, or only the worker has it."""
    kernel.good(
        "import threading\nclass Model:\n    w = 0\nmodel, losses = Model(), []\n"
        "def record(w):\n    losses.append(w)\ndef train(n):\n    model.w += n\n    record(model.w)\n"
        "class Trainer:\n    def fit(self): train(1)\ntrainer = Trainer()"
    )
    kernel.good("%%gpu\nr = train(60)")
    assert kernel.good("print(model.w, losses)") == "60 [60]\n"
    kernel.good("%%gpu\ntrainer.fit()")
    assert kernel.good("print(model.w, losses)") == "61 [60, 61]\n"
    kernel.good("%%gpu\ntrain(1)\ntrain = None")
    assert kernel.good("print(model.w, losses, train)") == "62 [60, 61, 62] None\n"
    kernel.good(
        "%%gpu\nimport threading\ndef make(lock):\n    def step():\n        with lock: model.w += 1\n"
        "    return step\nstep = make(threading.Lock())"
    )
    kernel.good("%%gpu\nstep()")
    assert kernel.good("print(model.w, 'step' in globals())") == "63 False\n"
    kernel.good("import torch\n@torch.no_grad()\ndef grow(): model.w += 1")
    kernel.good("%%gpu\ngrow()")
    # A value that is the same as after an earlier cell, where the notebook has another one by now, or none.
    for change in ("step = 0", "del step", "1;"):
        kernel.good("%%gpu\nfor step in range(3): pass")
        assert kernel.good("print(step)") == "2\n"
        kernel.good(change)
    # The notebook has what was trained also when the GPU is gone.
    kernel.good("%gpu --stop")
    assert kernel.good("%%gpu\nprint(model.w)").endswith("\n64\n")


def test_variables_that_objects_within_a_container_use_are_sent(kernel: Kernel) -> None:
    """Such as the modules that layers of a model use in their methods."""
    kernel.good(
        "import torch\nimport torch.nn.functional as F\n"
        "class Block(torch.nn.Module):\n    def forward(self, x): return F.relu(x) * scale\n"
        "scale, model = 2, torch.nn.Sequential(Block())"
    )
    assert kernel.good("%%gpu\nprint(model(torch.ones(1)).item())").endswith("\n2.0\n")
    kernel.good("scale = 3")
    assert kernel.good("%%gpu\nprint(model(torch.ones(1)).item())") == "3.0\n"


def test_what_cannot_be_pickled_stays_on_the_worker(kernel: Kernel) -> None:
    """It is named, the next cell has it, and a cell that asks for a variable that cannot be sent is told why."""
    kernel.good("import threading\nhandle = threading.Lock()")
    shown = kernel.good("%%gpu\nimport threading\nlock = threading.Lock()\nplain = 7")
    assert "gpu_launch: stays on the worker, and is lost when its GPU is released: lock (" in shown
    assert kernel.good("print(plain, 'lock' in globals(), threading.__name__)") == "7 False threading\n"
    assert kernel.good("%%gpu\nprint(lock.locked())") == "False\n"
    assert "Only there: lock (" in kernel.good("%gpu")
    failed = kernel.run("%%gpu\nhandle.acquire()")
    assert "NameError: name 'handle' is not defined\ngpu_launch: handle is not on the worker: handle cannot be" in (
        failed.error
    )
    # A name that the cell itself gives a value is not needed from the notebook.
    assert kernel.good("%%gpu\nwith open('/dev/null') as handle:\n    print(len(handle.read()))\nhandle = 1") == "0\n"


def test_submodules_are_there_in_both_directions(kernel: Kernel) -> None:
    """`import a.b` gives the variable `a`, and the code uses `a.b`."""
    kernel.good("import email, wsgiref.util, wsgiref as other")
    assert kernel.good("%%gpu\nprint(wsgiref.util.__name__, other.util is wsgiref.util)").endswith(
        "\nwsgiref.util True\n"
    )
    kernel.good("%%gpu\nimport email.mime.audio, xmlrpc.server\ndef later():\n    import xmlrpc.missing")
    assert kernel.good("print(email.mime.audio.__name__, xmlrpc.server.__name__)") == (
        "email.mime.audio xmlrpc.server\n"
    )


def test_cell_does_not_use_what_the_notebook_has_replaced_or_deleted(kernel: Kernel) -> None:
    """Also where the new value cannot be sent, or the name is a builtin's again."""
    kernel.good("data, list, late = [1, 2], [3], 4\ndef get(): return late")
    assert kernel.good("%%gpu\nprint(sum(data), list, get())").endswith("\n3 [3] 4\n")
    kernel.good("data = (x for x in [10])\ndel list, late")
    assert kernel.good("%%gpu\nprint(list(range(2)))") == "[0, 1]\n"
    failed = kernel.run("%%gpu\nprint(sum(data))")
    assert (
        "NameError: name 'data' is not defined\ngpu_launch: data is not on the worker: data cannot be" in failed.error
    )
    assert "NameError: name 'late' is not defined" in kernel.run("%%gpu\nget()").error
    assert kernel.good("print(sum(data), 'list' in globals(), 'late' in globals())") == "10 False False\n"
    kernel.good("data = [5]")
    assert kernel.good("%%gpu\nprint(sum(data))\ndata = (x for x in data)").startswith("5\n")
    # What the cell has made there is not removed.
    kernel.good("del data")
    assert kernel.good("%%gpu\nprint(next(data))").startswith("5\n")


def test_unchanged_values_stay_where_they_are(kernel: Kernel) -> None:
    """A model on the worker is not replaced by the notebook's copy, unless that was changed; shared parts stay shared."""
    kernel.good(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nrate = 1"
    )
    kernel.good("%%gpu\nmark = id(model)\nmodel(torch.ones(2)).sum().backward()\noptimizer.step()\nrate")
    assert "True" in kernel.good("print(optimizer.param_groups[0]['params'][0] is model.weight)")
    assert kernel.good("rate = 2") == ""
    assert kernel.good(
        "%%gpu\nprint(rate, id(model) == mark, optimizer.param_groups[0]['params'][0] is model.weight)"
    ) == ("2 True True\n")
    kernel.good("with torch.no_grad(): model.weight.fill_(3.0)")
    assert kernel.good(
        "%%gpu\nprint(id(model) == mark, model.weight.tolist(), optimizer.param_groups[0]['params'][0] is model.weight)"
    ) == ("False [[3.0, 3.0]] True\n")


def test_failing_cell_shows_its_own_lines_and_keeps_what_it_made(kernel: Kernel) -> None:
    """As in a notebook; mistakes are refused before a GPU is taken."""
    assert kernel.run("%%gpu\nx = = 1").kind == "UsageError"
    assert "There is no flag --gpu. Did you mean --gpus" in kernel.run("%%gpu --gpu 2\n1").error
    assert "RTX 9090" in kernel.run("%%gpu --model 'RTX 9090'\n1").error
    assert "--send missing: the notebook has no variable" in kernel.run("%%gpu --send missing\n1").error
    assert not kernel.notebook.broker.groups
    kernel.good("def ratio(x):\n    return 1 / x")
    failed = kernel.run("%%gpu\nsteps = [1]\nsteps.append(2)\nratio(0)")
    assert failed.kind == "LaunchFailed"
    lines = [line for line in failed.error.splitlines() if not set(line) <= set(" ~^")]
    assert re.fullmatch(r"  Cell In\[\d+\], line 4", lines[1])
    assert lines[2:6:2] == ["    ratio(0)", "    return 1 / x"]
    assert lines[5] == "ZeroDivisionError: division by zero"
    assert re.fullmatch(r"  Cell In\[\d+\], line 2, in ratio", lines[3])
    assert "On rig1 RTX 5090. The worker and its variables are kept." in failed.error
    assert kernel.good("print(steps)") == "[1, 2]\n"


def test_what_cannot_be_read_on_the_worker_is_sent_again(kernel: Kernel) -> None:
    """The error says where it comes from, each time, until the notebook's value is another."""
    kernel.good(
        "import os\ndef read(there):\n    if 'RANK' in os.environ: raise ValueError('not here')\n    return Odd()\n"
        "class Odd:\n    def __reduce__(self): return read, (1,)\nodd, plain = Odd(), 3"
    )
    for _ in range(2):
        failed = kernel.run("%%gpu\nprint(odd, plain)")
        assert "ValueError: not here\ngpu_launch: what the notebook sent cannot be read on the worker" in failed.error
    kernel.good("odd = 4")
    assert kernel.good("%%gpu\nprint(odd, plain)") == "4 3\n"


def test_interrupt_stops_the_cell_and_keeps_what_it_made(kernel: Kernel) -> None:
    """Output comes live, and the worker stays."""
    kernel.begin(
        "%%gpu\nimport os, time\nlosses = [0.5]\npid = os.getpid()\nprint('sleeps', flush=True)\ntime.sleep(100)"
    )
    kernel.shows("sleeps")
    kernel.process.send_signal(signal.SIGINT)
    stopped = kernel.end()
    assert stopped.kind == "LaunchInterrupted"
    assert "the cell is stopped. The worker and its variables are kept." in stopped.error
    assert kernel.good("print(losses)") == "[0.5]\n"
    assert kernel.good("%%gpu\nprint(os.getpid() == pid)") == "True\n"


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_worker_that_dies_is_replaced(kernel: Kernel, how: str) -> None:
    """The cell says so, with what was only there; the next takes a GPU again and has the notebook's variables."""
    kernel.good("x = 5")
    kernel.good("%%gpu\nimport os, threading\nx += 1\nlock = threading.Lock()")
    failed = kernel.run(f"%%gpu\n{how}")
    assert failed.kind == "LaunchFailed"
    assert "The worker has ended. Gone with it: lock. The next %%gpu cell takes a GPU again." in failed.error
    failed = kernel.run("%%gpu\nprint(x)\nlock.locked()")
    assert "gpu_launch: The worker has ended. A GPU is taken again." in failed.text
    assert "\n6\n" in failed.text
    assert "lock is not on the worker: it was only on the worker that has ended" in failed.error


def test_gpu_goes_to_those_who_wait_and_is_taken_again(kernel: Kernel) -> None:
    """Between cells, at once; the cell after that says so, and runs."""
    kernel.good("x = 5")
    kernel.good("%%gpu --model 'RTX 5070'\nx += 1")
    broker = kernel.notebook.broker
    assert len(broker.jobs(schemas.JobState.RUNNING)) == 1
    broker.waiting = 1
    kernel.shows("rig1 RTX 5090 is released, because others wait for GPUs. The next %%gpu cell takes a GPU again.")
    until(lambda: not broker.jobs(schemas.JobState.RUNNING), "the GPU is free")
    assert "was released, because others wait" in kernel.good("%gpu")
    broker.waiting = 0
    shown = kernel.good("%%gpu\nprint(x)")
    assert "rig1 RTX 5090 was released, because others wait for GPUs. A GPU is taken again." in shown
    assert "the cell runs on rig1 RTX 5090" in shown
    assert shown.endswith("6\n")


def test_gpu_is_kept_from_requests_that_cannot_use_it(kernel: Kernel) -> None:
    """Those of other nodes, and the user's own, except a launch of the same notebook."""
    broker = kernel.notebook.broker
    kernel.good("%%gpu\n1;")
    (worker,) = broker.groups.values()
    (node,) = worker.nodes
    broker.waiting, broker.wanted_by = 2, {node: ("ada",), "elsewhere": ("ben",)}
    asked = broker.calls.count("GET /cluster")
    until(lambda: broker.calls.count("GET /cluster") >= asked + 2, "the worker asks twice who waits")
    assert "idle for" in kernel.good("%gpu")
    broker.wanted_by = {node: ("ada", "ben")}
    kernel.shows("is released, because others wait for GPUs.")
    broker.waiting, broker.wanted_by = 0, None
    kernel.good("%%gpu\n1;")
    assert len(broker.jobs(schemas.JobState.RUNNING)) == 1
    kernel.good("import gpu_launch, pathlib\npathlib.Path('train.py').write_text('print(1)')")
    broker.busy = True
    kernel.begin("gpu_launch.run('train.py')")
    kernel.shows("is released, because others wait for GPUs.")
    broker.grant(*broker.jobs(schemas.JobState.WAITING))
    assert not kernel.end().kind


def test_idle_gpu_is_given_back(notebook: Notebook) -> None:
    """After the time of `--keep`, else the administrator's; other flags take another GPU."""
    with contextlib.closing(Kernel(notebook, gpus=())) as kernel:
        kernel.good("%%gpu --keep 1s\n1")
        kernel.shows("is released, because no cell ran for 1 s")
        until(lambda: not notebook.broker.jobs(schemas.JobState.RUNNING), "the GPU is free")
        kernel.good("%%gpu --model 'RTX 5070'\nimport threading\nx = 1")
        kernel.good("%%gpu --model 'RTX 5060'\nlock = threading.Lock()")
        asked = [group.request.models for group in notebook.broker.groups.values()]
        assert asked[1:] == [("RTX 5070",), ("RTX 5060",)]
        assert len(notebook.broker.jobs(schemas.JobState.RUNNING)) == 1
        assert "and lock would be gone with it" in kernel.run("%%gpu --model 'RTX 5070'\n1").error
        kernel.good("%gpu --stop")
        assert "Released when others wait, after the cell" in kernel.good("%%gpu --keep 0s\n1")
        until(lambda: not notebook.broker.jobs(schemas.JobState.RUNNING), "the GPU is free after its cell")
        assert "because its cell had ended. A GPU is taken again." in kernel.good("%%gpu --keep 0s\n1")
    until(lambda: not notebook.left(), "no process left")


def test_notebooks_own_gpu_is_used(notebook: Notebook) -> None:
    """Nothing is taken, and nothing released."""
    with contextlib.closing(Kernel(notebook)) as kernel:
        shown = kernel.good("%%gpu\nimport os\nprint(os.environ['GPUHUB_NODE'])")
        assert "It is the notebook's own: there is nothing to release." in shown
        assert not notebook.broker.groups


def test_one_process_runs_the_cell_whatever_the_number_of_gpus(notebook: Notebook) -> None:
    """`--gpus` asks for them on one node."""
    with contextlib.closing(Kernel(notebook, gpus=("GPU-a", "GPU-b"))) as kernel:
        assert kernel.good("%%gpu --gpus 2\nprint('once')").count("once\n") == 1
        assert "Taken with: %%gpu --gpus 2" in kernel.good("%gpu")
        failed = kernel.run("%%gpu --gpus 3\n1")
    assert failed.error == "--gpus 3: no node of the cluster has 3 GPUs. Use --gpus 1 or less."


def test_large_variables_are_named_with_their_size(kernel: Kernel) -> None:
    """In both directions; new ones above a limit stay on the worker until they are asked for by name."""
    kernel.good("import numpy\nimages = numpy.ones(4_000_000)")
    shown = kernel.good("%%gpu\nsums = images + 1\nhuge = numpy.ones(40_000_000)")
    assert "gpu_launch: sending images (32 MB)\n" in shown
    assert "gpu_launch: brought back sums (32 MB)\n" in shown
    assert (
        "stays on the worker, and is lost when its GPU is released: huge (more than 256 MiB). To keep huge: save to a "
        "file in your home in the next %%gpu cell, or up to 2 GiB: %%gpu --return huge\n"
    ) in shown
    assert kernel.good("print(sums.mean(), 'huge' in globals())") == "2.0 False\n"
    assert "brought back huge (320 MB)\n" in kernel.good("%%gpu --return huge\n1;")
    assert kernel.good("print(huge.size)") == "40000000\n"
    # The notebook has it now, and must not keep an older one.
    assert "huge" not in kernel.good("%%gpu\nprint(huge.size)")
    assert "brought back huge (320 MB)\n" in kernel.good("%%gpu\nhuge += 1")
    assert kernel.good("print(huge[0])") == "2.0\n"
    shown = kernel.good("%%gpu\nimport threading\nhuge = threading.Lock()")
    assert re.search(r"lost when its GPU is released: huge \(cannot be .*\)\. The notebook has an older huge\n", shown)
    kernel.notebook.broker.waiting = 1
    kernel.shows(
        "because others wait for GPUs. Gone with it: huge. The notebook has an older huge. The next %%gpu cell"
    )
