"""The extension in a kernel as JupyterLab runs it, used over the kernel's sockets."""

from __future__ import annotations

import os

import pytest
from jupyter_client.manager import start_new_kernel

DEADLINE_S = 60


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A kernel with the extension, in a separate home."""
    home = tmp_path_factory.mktemp("home")
    (home / "train.py").write_text("")
    environ = os.environ | {"HOME": str(home), "IPYTHONDIR": str(home / ".ipython"), "GPUHUB_GPU_UUIDS": "GPU-a"}
    manager, client = start_new_kernel(startup_timeout=DEADLINE_S, env=environ, cwd=str(home))
    client.execute_interactive("%load_ext gpu_launch", timeout=DEADLINE_S)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def run_cell(kernel, code):
    """Return a cell's output and its error's text."""
    messages = []
    answer = kernel.execute_interactive(code, timeout=DEADLINE_S, output_hook=messages.append)
    texts = [message["content"].get("text", "") for message in messages if message["msg_type"] == "stream"]
    return "".join(texts), "\n".join(answer["content"].get("traceback", []))


@pytest.mark.parametrize(
    ("code", "matches", "start"),
    [
        ("x = 1\n%gpu_launch --nnod", ["--nnodes"], 18),
        ("%gpu_launch tr", ["train.py"], 12),
        ("%%gpu_launch --det", ["--detach"], 13),
        ("%%gpu_ranks --rest", ["--restart"], 12),
    ],
)
def test_kernel_completes_flags(kernel, code, matches, start):
    """The reply also has the range that the completion replaces."""
    reply = kernel.complete(code, reply=True, timeout=DEADLINE_S)["content"]
    assert (reply["matches"], reply["cursor_start"], reply["cursor_end"]) == (matches, start, len(code))


def test_inspector_shows_the_help(kernel):
    """A question mark and Shift-Tab show the help."""
    reply = kernel.inspect("%gpu_launch", reply=True, timeout=DEADLINE_S)["content"]
    assert "--nproc-per-node N" in reply["data"]["text/plain"]


def test_traceback_names_the_cell_by_its_prompt_number(kernel):
    """Tracebacks have the number of the cell's prompt, and lines are counted from the magic's line."""
    run_cell(kernel, "a = 1")
    number = kernel.execute_interactive("a", timeout=DEADLINE_S)["content"]["execution_count"]
    _, error = run_cell(kernel, "%%gpu_launch\nx = 1\nprint(")
    assert error == f"UsageError: Cell In[{number + 1}], line 3: '(' was never closed\n    print("


def test_functions_of_cells_are_labelled_by_their_cell(kernel):
    """The label does not depend on the kernel's name for the cell's file."""
    number = kernel.execute_interactive("def train():\n    pass", timeout=DEADLINE_S)["content"]["execution_count"]
    text, _ = run_cell(
        kernel, "from gpu_launch.magics import notebook\nprint(notebook.labels_here()(train.__code__.co_filename))"
    )
    assert text == f"Cell In[{number}]\n"


def test_dry_run_shows_the_own_gpu_without_a_broker(kernel):
    """Without a broker, the dry run shows the notebook's own GPU."""
    text, error = run_cell(kernel, "%gpu_launch --dry-run train.py --epochs 2")
    assert error == ""
    assert text.startswith("The broker would not be asked")
    assert "train.py --epochs 2\n" in text


def test_status_has_html_and_text(kernel):
    """The status is HTML for notebooks, and text for clients that cannot show HTML."""
    messages = []
    kernel.execute_interactive("%gpu_status", timeout=DEADLINE_S, output_hook=messages.append)
    (data,) = [message["content"]["data"] for message in messages if message["msg_type"] == "display_data"]
    assert "<p><b>Your jobs</b></p>" in data["text/html"]
    assert "Your jobs\n" in data["text/plain"]
