"""Which servers have JupyterLab load its extensions from the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_launch.notebook_server import lab_extensions

AT_HUB = {
    "url": "/hub/gpuhub/lab/1",
    "load": {"pygments": "static/entry.1.js", "@jupyter/widgets": "static/entry.2.js"},
}


def install(folder: Path, name: str, load: str) -> None:
    """Write what an extension's package has."""
    (folder / name).mkdir(parents=True)
    package = {"name": name, "jupyterlab": {"_build": {"load": load}}}
    (folder / name / "package.json").write_text(json.dumps(package))


@pytest.mark.parametrize(
    ("extensions", "url"),
    [
        ({"pygments": "static/entry.1.js", "@jupyter/widgets": "static/entry.2.js"}, "/hub/gpuhub/lab/1"),
        ({"pygments": "static/entry.1.js"}, "/hub/gpuhub/lab/1"),
        ({"pygments": "static/entry.3.js"}, None),
        ({"@jupyter/widgets": "static/entry.2.js", "another": "static/entry.4.js"}, None),
    ],
)
def test_hub_is_used_if_it_has_all_extensions(tmp_path: Path, extensions: dict[str, str], url: str | None) -> None:
    folders = (tmp_path / "image", tmp_path / "others")
    for number, (name, load) in enumerate(extensions.items()):
        install(folders[number % 2], name, load)
    variables = {lab_extensions.VARIABLE: json.dumps(AT_HUB)}
    assert lab_extensions.find_url(variables, (*folders, tmp_path / "missing")) == url


@pytest.mark.parametrize("variables", [{}, {lab_extensions.VARIABLE: ""}])
def test_own_files_are_used_outside_gpuhub(tmp_path: Path, variables: dict[str, str]) -> None:
    assert lab_extensions.find_url(variables, (tmp_path,)) is None


def test_earlier_hook_stays() -> None:
    """JupyterHub's own sets what its menus need."""
    settings = {"page_config_hook": lambda _handler, config: config | {"hubUser": "ada"}}
    lab_extensions._add_page_config_hook(settings, "/hub/gpuhub/lab/1")
    config = settings["page_config_hook"](None, {"fullLabextensionsUrl": "/user/ada/lab/extensions"})
    assert config == {"fullLabextensionsUrl": "/hub/gpuhub/lab/1", "hubUser": "ada"}
