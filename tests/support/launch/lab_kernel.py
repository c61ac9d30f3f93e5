"""A notebook's kernel as JupyterLab runs it, with its sockets, prompts and interrupts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from tests.support.launch.local_cluster import DEADLINE_S, PYTHON, Notebook

#: The answer of a user who interrupts the kernel instead.
INTERRUPT = "<interrupt>"


class LabKernel:
    """A kernel over its sockets, whose output is the list of its messages."""

    def __init__(self, notebook: Notebook, *, gpus: tuple[str, ...]) -> None:
        spec = notebook.home / "kernels" / "python3"
        spec.mkdir(parents=True)
        command = [PYTHON, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.joinpath("kernel.json").write_text(
            json.dumps({"argv": command, "display_name": "p", "language": "python"})
        )
        specs = KernelSpecManager(kernel_dirs=[str(spec.parent)], ensure_native_kernel=False)
        self.manager = KernelManager(kernel_name="python3", kernel_spec_manager=specs)
        self.manager.start_kernel(env=notebook.environment(gpus), cwd=str(notebook.home))
        #: Called with each message of a cell's output.
        self.observe: Callable[[dict[str, Any]], object] = lambda message: None
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=DEADLINE_S)
        self.run("%load_ext gpu_launch")

    def run(self, code: str, answers: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Run a cell that succeeds; return its output as a notebook keeps it: what is updated in place is replaced.

        `answers` are what the user types at prompts; all are asked for.
        """
        outputs, error = self.try_run(code, answers)
        assert not error, error
        return outputs

    def try_run(self, code: str, answers: Sequence[str] = ()) -> tuple[list[dict[str, Any]], str]:
        """Run a cell; return its output and its traceback, empty if it succeeded."""
        typed = iter(answers)
        outputs: list[dict[str, Any]] = []

        def take(message: dict[str, Any]) -> None:
            self.observe(message)
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                outputs.append({"text": content["text"]})
            elif kind == "display_data":
                outputs.append({"data": content["data"], "id": content["transient"].get("display_id")})
            elif kind == "update_display_data":
                for output in outputs:
                    if output.get("id") == content["transient"]["display_id"]:
                        output["data"] = content["data"]
            elif kind == "clear_output":
                outputs.clear()

        def reply(message: dict[str, Any]) -> None:
            outputs.append({"text": message["content"]["prompt"]})
            answer = next(typed)
            if answer == INTERRUPT:
                self.manager.interrupt_kernel()
            else:
                self.client.input(answer)

        answer = self.client.execute_interactive(
            code, timeout=DEADLINE_S, output_hook=take, allow_stdin=bool(answers), stdin_hook=reply
        )["content"]
        assert next(typed, None) is None, "the cell ended before all answers were asked for"
        return outputs, "" if answer["status"] == "ok" else "\n".join(answer["traceback"])

    def close(self) -> None:
        """End the kernel as Jupyter does."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        self.manager.cleanup_resources()
