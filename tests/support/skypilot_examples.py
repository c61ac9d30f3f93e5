"""Print how `gpu-launch run` reads SkyPilot's examples, as the table of docs/skypilot.md.

`python -m tests.support.skypilot_examples FOLDER`, where FOLDER is `examples` of a clone of SkyPilot's repository. Each
file is read with `--dry-run` for a cluster that has its GPUs; nothing is run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_launch.cli import main
from tests.support.hub.laptop import logged_in

#: One of these keys makes a task of a file.
_TASK_KEYS = {"run", "setup", "resources", "num_nodes", "workdir", "file_mounts", "service", "pool", "execution"}
#: The row of a refused file, by what its error says.
_REFUSALS = {
    r"is data in a bucket": "refused: `file_mounts` with a bucket",
    r"is a container image": "refused without `--profile`: a container image",
    r"parts of a GPU": "refused: parts of a GPU",
    r"is not below your home": "refused: `file_mounts` outside the home",
    r"`run`": "refused: no `run` commands",
    r"cannot start containers|options of containers": "refused: Docker in a job",
}
#: The row of an accepted file, by what its text has. The first that fits counts.
_NEEDS = {
    r"accelerators:.*(tpu|inferentia|trainium)": "accepted; names TPUs or Inferentia, so a real cluster refuses it",
    r"\bconda\b": "accepted; the commands need conda in the image",
    r"\b(sbatch|mpirun|docker)\b": "accepted; the commands need Docker, Slurm or MPI",
    r"\b(sudo|apt|apt-get)\b": "accepted; the commands need root",
    r"^\s*ports:": "accepted with notes; a server at an address of the hub",
}


def build_table(folder: Path) -> str:
    """Return the table of the task files in a folder and in the folders directly below it, after the numbers of files."""
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml")])
    rows: defaultdict[str, list[Path]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as laptop,
        pytest.MonkeyPatch.context() as patch,
        logged_in(Path(laptop), patch, {"any": ""}),
    ):
        for file in files:
            rows[_classify(file, (folder.parent, file.parent))].append(file.relative_to(folder).with_suffix(""))
    others = rows.pop("", [])
    lines = [f"{len(files)} files; not task files: {len(others)}", "", "| | examples |", "|---|---|"]
    lines += [f"| {row} ({len(rows[row])}) | {_format_names(rows[row])} |" for row in sorted(rows)]
    return "\n".join(lines)


def _classify(file: Path, roots: Sequence[Path]) -> str:
    """Return the row of a file, which expects its mounts below one of the roots; empty for one that is not a task."""
    text = file.read_text(encoding="utf-8")
    documents = [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    if not any(_TASK_KEYS & document.keys() for document in documents):
        return ""
    output = ""
    for root in roots:
        code, output = _read(file, root, list(_list_variables(documents)))
        if code == 0:
            need = next((row for pattern, row in _NEEDS.items() if re.search(pattern, text, re.M | re.I)), None)
            return need or ("accepted with notes" if output else "accepted without a note")
    reason = output.strip().splitlines()[-1].removeprefix("gpu-launch: ").removeprefix(f"{file}: ")
    return next((row for pattern, row in _REFUSALS.items() if re.search(pattern, reason)), f"refused: {reason}")


def _read(file: Path, root: Path, variables: Sequence[str]) -> tuple[int, str]:
    """Return the exit code of the dry run in a folder, and what it writes to standard error."""
    words = ["run", "--dry-run", "--nnodes", "1", "--nproc-per-node", "1", "--model", "RTX 5090", *variables, str(file)]
    before = Path.cwd()
    os.chdir(root)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = main.run_command(words)
    finally:
        os.chdir(before)
    return code, errors.getvalue()


def _list_variables(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield options with a value for each variable that the command line must give."""
    for key, option in (("envs", "--env"), ("secrets", "--secret")):
        for document in documents:
            values = document.get(key) or {}
            items = values.items() if isinstance(values, dict) else [(name, None) for name in values]
            yield from (word for name, value in items if value is None for word in (option, f"{name}=value"))


def _format_names(names: Sequence[Path]) -> str:
    """Format as `` `minimal`, `serve/{gpu,minimal}` ``."""
    parts = []
    for folder, group in groupby(names, key=lambda name: name.parent):
        stems = [name.name for name in group]
        if folder == Path():
            parts += stems
        else:
            parts.append(f"{folder}/{stems[0] if len(stems) == 1 else '{' + ','.join(stems) + '}'}")
    return ", ".join(f"`{part}`" for part in parts)


if __name__ == "__main__":
    sys.stdout.write(f"{build_table(Path(sys.argv[1]).resolve())}\n")
