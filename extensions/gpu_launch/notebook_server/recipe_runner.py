"""What JupyterLab's page of recipes does: list them, check and start jobs with the command `gpu-launch`, show results.

The command runs in a process of its own with this notebook's token, as in a terminal.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_launch.broker.client import BrokerClient
from gpu_launch.common import job_manifest, run_folder
from gpu_launch.environment import Environment
from gpu_launch.errors import UsageError
from gpu_launch.recipes import run_record

#: Maximum time of a command, seconds. It asks the broker and sends two small files.
_COMMAND_S = 60.0
#: Commands at the same time; further ones wait.
_MOST_COMMANDS = 2
#: Largest files of a run that are read, bytes.
_MAX_FILE_BYTES = 256 * 1024
#: Prefixes of the command's errors that are removed, because they mean nothing on a page with a form.
_PREFIXES = ("gpu-launch: ", "--set ")


@dataclass(frozen=True, kw_only=True)
class RecipeRequest:
    """A job that a user asks for on the page."""

    recipe: str
    #: Parameter → value; parameters that are left out have their defaults.
    values: Mapping[str, str]
    #: GPUs in all; None for the recipe's own number.
    gpus: int | None = None
    #: A GPU model; empty for any.
    model: str = ""
    #: A profile, in whose image the job runs; empty for the default.
    profile: str = ""

    def build_words(self) -> list[str]:
        """Return the words after `gpu-launch run`."""
        words = [] if self.gpus is None else [f"--gpus={self.gpus}"]
        words += [f"--model={self.model}"] if self.model else []
        words += [f"--profile={self.profile}"] if self.profile else []
        words += [f"--set={name}={value}" for name, value in self.values.items()]
        return [*words, f"recipe:{self.recipe}"]


class RecipeRunner:
    """The recipes of one user."""

    def __init__(self, broker: BrokerClient, env: Environment, root: Path, executor: Executor) -> None:
        """`root` is the server's root folder, below which the browser reads files."""
        self._broker, self._env, self._root, self._executor = broker, env, root, executor
        self._slots = asyncio.Semaphore(_MOST_COMMANDS)

    async def list_recipes(self) -> dict[str, Any]:
        """Return all recipes as `gpu-launch recipe list --json` has them, and the profiles whose images jobs can have.

        Raises:
            UsageError: The command failed.
            BrokerError: The broker refuses or does not answer.
        """
        loop = asyncio.get_running_loop()
        recipes, cluster = await asyncio.gather(
            self._run_command(["recipe", "list", "--json"]),
            loop.run_in_executor(self._executor, self._broker.get_cluster_view),
        )
        profiles = [{name: profile[name] for name in ("name", "title")} for profile in cluster.get("profiles", ())]
        return {"recipes": json.loads(recipes), "profiles": profiles}

    async def check(self, request: RecipeRequest) -> str:
        """Return what the job would ask for and run, as a text.

        Raises:
            UsageError: The request cannot be met; the error says why.
        """
        return await self._run_command(["run", "--dry-run", *request.build_words()])

    async def start(self, request: RecipeRequest, *, predicts: bool) -> str:
        """Ask for the job and return its run id; with `predicts` it measures some steps on one card instead.

        Raises:
            UsageError: The request cannot be met, or the broker refuses.
        """
        words = ["run", "--detach", *(["--predict"] if predicts else []), *request.build_words()]
        return (await self._run_command(words)).strip().splitlines()[-1]

    async def list_runs(self, jobs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return those of the user's jobs that are recipes, with what they have written.

        Args:
            jobs: Jobs of the overview.
        """
        runs = [str(job["run_id"]) for job in jobs]
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._read_runs, runs)

    def _read_runs(self, runs: Sequence[str]) -> list[dict[str, Any]]:
        return [found for run in runs if (found := self._read_run(run)) is not None]

    def _read_run(self, run_id: str) -> dict[str, Any] | None:
        text = _read_text(run_folder.open_run(self._env.home, run_id).manifest)
        try:
            manifest = job_manifest.parse_manifest(text)
            parameters = json.loads(manifest.environ.get(run_record.PARAMETERS, "{}"))
        except (UsageError, ValueError):
            return None  # a launch, or files of another version
        recipe = manifest.environ.get(run_record.NAME)
        if recipe is None or not isinstance(parameters, dict):
            return None
        folder = self._env.home / manifest.folder
        return {
            "run_id": run_id,
            "recipe": recipe,
            "parameters": {str(name): str(value) for name, value in parameters.items()},
            "is_prediction": "--predict" in manifest.words,
            "folder": folder.relative_to(self._root).as_posix() if folder.is_relative_to(self._root) else None,
            "chart_at": _read_time(folder / run_record.CHART),
            "result": _read_object(folder / run_record.RESULT),
        }

    async def _run_command(self, words: Sequence[str]) -> str:
        """Run `gpu-launch` and return what it prints.

        Raises:
            UsageError: with the command's error.
        """
        async with self._slots:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gpu_launch.cli.main",
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._env.home,
                env=os.environ | {"COLUMNS": "100"},
            )
            try:
                async with asyncio.timeout(_COMMAND_S):
                    output, errors = await process.communicate()
            except TimeoutError:
                raise UsageError(
                    f"gpu-launch did not answer within {_COMMAND_S:.0f} s: the hub or its broker may be restarting. "
                    "Try again."
                ) from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode:
            raise UsageError(_format_errors(errors.decode(errors="replace")) or "gpu-launch failed without a message.")
        return output.decode(errors="replace")


def _format_errors(text: str) -> str:
    lines = text.strip().splitlines()
    for prefix in _PREFIXES:
        lines = [line.removeprefix(prefix) for line in lines]
    return "\n".join(lines)


def _read_text(path: Path) -> str:
    """Return a file's text, empty if there is none or it is too large."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError:
        return ""
    return data.decode(errors="replace") if len(data) <= _MAX_FILE_BYTES else ""


def _read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, None if there is none. Browsers know no NaN: it becomes a text."""
    try:
        value = json.loads(_read_text(path) or "null", parse_constant=str)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _read_time(path: Path) -> float | None:
    """Return when a file was written last, seconds since 1970; None if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
