"""A laptop's folder that is logged in to a fake hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.hub.fake_hub import TOKEN, FakeHub, served


@contextlib.contextmanager
def logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str]) -> Iterator[FakeHub]:
    """Serve a hub, and make a folder with these files the current one."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    for name, text in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with served(FakeHub(home=home)) as hub:
        monkeypatch.setenv("GPUHUB_URL", hub.url)
        monkeypatch.setenv("GPUHUB_TOKEN", TOKEN)
        yield hub
