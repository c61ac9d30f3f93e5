"""Golden files: texts that people, Docker, nftables or Slurm get, as a whole and next to their test in `golden/`."""

from __future__ import annotations

import os
from pathlib import Path


def check_golden(text: str, file: Path) -> None:
    """Compare a text with a golden file; with `GPUHUB_UPDATE_GOLDEN=1` the file is written first."""
    if os.environ.get("GPUHUB_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"{file} differs; GPUHUB_UPDATE_GOLDEN=1 accepts the change"
