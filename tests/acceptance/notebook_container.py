"""A user's notebook container, controlled from inside."""

from __future__ import annotations

import signal
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from tests.acceptance.process_output import ProcessOutput
from tests.support.hub.browser import Product, User
from tests.support.product import wait_for


class Notebook:
    """A user's notebook container, in which Python code runs like a cell, with the notebook's environment."""

    def __init__(self, product: Product, user: User, profile: str) -> None:
        self.user = user
        self.node = product.cluster.nodes[0]
        self.container = f"{product.paths.instance}-nb-{user.name}"
        self.home = product.paths.state / "homes" / user.name
        user.open_form()
        user.choose(profile)
        user.wait_for_lab()
        for node in product.cluster.nodes:
            if self._docker(node.docker, "ps", "-q", "--filter", f"name={self.container}").stdout:
                self.node = node

    def start(self, code: str) -> subprocess.Popen[str]:
        """Start Python code in the user's home."""
        command = [*self._exec(), "python3", "-u", "-c", textwrap.dedent(code)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @contextmanager
    def hold_launch(self, call: str, begin: str) -> Iterator[ProcessOutput]:
        """Run a launch that continues until the end of the block.

        Args:
            call: The call of `gpu_launch`, such as `run('loop.py', nnodes=3)`.
            begin: The output with which the ranks begin.
        """
        with self.start(f"import gpu_launch; gpu_launch.{call}") as process:
            output = ProcessOutput(process)
            output.wait(begin)
            yield output
            process.kill()
            self.kill(f"gpu_launch.{call.partition(',')[0]}")
            output.rest()

    def run(self, code: str, timeout_s: float = 120) -> str:
        """Run Python code and return its output; it may fail."""
        with self.start(code) as process:
            output, _ = process.communicate(timeout=timeout_s)
        return output

    def start_cells(self, *cells: str) -> subprocess.Popen[str]:
        """Start cells in one kernel, one after the other; the line `=== n` precedes each cell's output."""
        code = f"""
            from IPython.core.interactiveshell import InteractiveShell
            shell = InteractiveShell.instance()
            shell.run_line_magic("load_ext", "gpu_launch")
            for number, cell in enumerate({[textwrap.dedent(cell).strip() for cell in cells]!r}):
                print("===", number, flush=True)
                shell.run_cell(cell, store_history=True)
        """
        return self.start(code)

    def cells(self, *cells: str, timeout_s: float = 240) -> list[str]:
        """Run cells and return the output of each."""
        with self.start_cells(*cells) as process:
            output, _ = process.communicate(timeout=timeout_s)
        return [part.split("\n", 1)[1] for part in output.split("=== ")[1:]]

    def execute(self, example: str, timeout_s: float = 300, folder: str = "gpuhub-examples") -> str:
        """Run a notebook of the home, such as one of the examples, and return the output of all its cells."""
        return self.run(
            f"""
            import json, subprocess
            notebook = "{folder}/{example}.ipynb"
            done = subprocess.run(["jupyter", "execute", "--inplace", notebook], capture_output=True, text=True)
            print(done.stderr[-3000:])
            for cell in json.load(open(notebook))["cells"]:
                for shown in cell.get("outputs", []):
                    print("".join(shown.get("text", shown.get("data", {{}}).get("text/plain", ""))))
            """,
            timeout_s,
        )

    def write(self, name: str, script: str) -> None:
        """Write a file in the user's home."""
        code = f"open({name!r}, 'w').write({textwrap.dedent(script)!r})"
        subprocess.run([*self._exec(), "python3", "-c", code], check=True)

    def kill(self, pattern: str, number: int = signal.SIGKILL) -> None:
        """Signal the container's processes whose command line contains the pattern."""
        code = """
            import os, sys
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try: line = open(f"/proc/{pid}/cmdline").read()
                except OSError: continue
                if sys.argv[1] in line and int(pid) != os.getpid(): os.kill(int(pid), int(sys.argv[2]))
        """
        subprocess.run([*self._exec(), "python3", "-c", textwrap.dedent(code), pattern, str(int(number))], check=True)

    def stop(self, *, still_holds: int = 0) -> None:
        """Stop the notebook through the hub; the user's jobs may keep `still_holds` GPUs."""
        self.user.click_stop()
        # One without a GPU holds none already; while the hub stops it, there is no form for the next.
        wait_for(lambda: not self.user.fetch(f"/hub/api/users/{self.user.name}")["servers"], "the hub has stopped it")
        wait_for(
            lambda: list(self.user.holders().values()).count(self.user.name) == still_holds,
            "the notebook's GPU is free",
        )

    def _exec(self) -> list[str]:
        return ["docker", "-H", self.node.docker, "exec", "-w", f"/home/{self.user.name}", self.container]

    def _docker(self, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["docker", "-H", url, *arguments], check=True, capture_output=True, text=True)
