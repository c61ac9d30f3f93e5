"""The plan of a build: contents, tags and commands."""

import io
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.config.containers.images import ImageSettings
from gpuhub.ops.images import build_plan, builder, wheels
from tests.support.product import ROOT

SOURCES = build_plan.ImageSources(
    base={"packages": b"git\n"},
    python={
        "torch.Dockerfile": b"FROM x",
        "packages.Dockerfile": b"FROM x",
        "tidy.py": b"",
        "science.lock": b"numpy==2.4.6\nnvidia-ml-py==13.1\n",
        "lab.lock": b"jupyterlab==4.6.6\n",
        "llm.lock": b"transformers==5.23.0\n",
        "services.lock": b"mlflow==3.17.2\n",
    },
    notebook={"Dockerfile": b"FROM y"},
    extensions={"gpu_launch/__init__.py": b""},
    lab={"src/index.ts": b""},
    notebooks={"01-first-launch.ipynb": b"{}"},
)


def _plan(settings: ImageSettings | None = None, **changes: dict[str, bytes]) -> build_plan.ImagePlan:
    parts = {name: getattr(SOURCES, name) for name in ("base", "python", "notebook", "extensions", "lab", "notebooks")}
    return build_plan.build_plan(build_plan.ImageSources(**{**parts, **changes}), settings or ImageSettings(), "x86_64")


def _changed_images(settings: ImageSettings | None = None, **changes: dict[str, bytes]) -> set[str]:
    """Return the images whose tags differ from those of SOURCES."""
    tags = _plan().tags
    return {image for image, tag in _plan(settings, **changes).tags.items() if tag != tags[image]}


def test_a_changed_extension_rebuilds_only_images_for_users():
    """The layers with packages, whose builds take long, keep their tags."""
    changes = {"gpu_launch/__init__.py": b"x = 1"}
    assert _changed_images(extensions=changes) == {build_plan.NOTEBOOK, build_plan.LLM}
    assert _plan(extensions=changes).wheels == _plan().wheels


def test_a_changed_lab_extension_is_built_again():
    """It is in the images for users, and its wheel has a key of its own."""
    changes = {"src/index.ts": b"export default [];"}
    assert _changed_images(lab=changes) == {build_plan.NOTEBOOK, build_plan.LLM}
    assert _plan(lab=changes).lab != _plan().lab
    assert _plan(extensions={"gpu_launch/__init__.py": b"x = 1"}).lab == _plan().lab


@pytest.mark.parametrize(
    ("lock", "text", "changed"),
    [
        ("llm", b"transformers==6.0.0\n", {build_plan.LLM_PACKAGES, build_plan.LLM}),
        ("services", b"mlflow==3.18.0\n", {build_plan.SERVICES}),
        ("lab", b"jupyterlab==4.7.0\n", {build_plan.LAB, build_plan.NOTEBOOK, build_plan.LLM_PACKAGES, build_plan.LLM}),
        ("science", b"numpy==2.5.0\nnvidia-ml-py==13.1\n", set(build_plan.PARENTS) - {build_plan.TORCH}),
        ("science", b"numpy==2.4.6\nnvidia-ml-py==13.2\n", {build_plan.BASE, *build_plan.PARENTS}),
    ],
)
def test_a_changed_lock_keeps_the_layers_below_it(lock: str, text: bytes, changed: set[str]):
    """Debian is downloaded again only when its packages, or NVIDIA's module in it, change; torch with its version only."""
    changes = {**SOURCES.python, f"{lock}.lock": text}
    assert _changed_images(python=changes) == changed
    wheels, before = _plan(python=changes).wheels, _plan().wheels
    assert [build_plan.LOCKS[image] for image in build_plan.LOCKS if wheels[image] != before[image]] == [lock]
    assert wheels[build_plan.TORCH] == before[build_plan.TORCH]


def test_another_torch_keeps_the_wheels_of_other_layers():
    """A download of torch is that of torch alone."""
    settings = ImageSettings(torch="2.12.0")
    assert _changed_images(settings) == set(build_plan.PARENTS)
    wheels, before = _plan(settings).wheels, _plan().wheels
    assert [image for image in wheels if wheels[image] != before[image]] == [build_plan.TORCH]


def test_every_torch_setting_has_its_own_wheels():
    """Another torch never comes from an older download."""
    settings = [
        ImageSettings(),
        ImageSettings(torch="2.12.0"),
        ImageSettings(torch_build="cpu"),
        ImageSettings(torch_index="https://x.example"),
    ]
    assert len({_plan(setting).wheels[build_plan.TORCH] for setting in settings}) == len(settings)


@pytest.mark.parametrize(
    ("families", "there", "missing"),
    [
        (["notebook"], [], ["base", "torch", "science", "lab", "notebook"]),
        (["notebook"], ["base", "torch", "science"], ["lab", "notebook"]),
        (["notebook"], ["notebook"], ["base"]),
        (["notebook", "llm"], ["base", "notebook", "lab"], ["llm-packages", "llm"]),
        (["notebook", "llm"], ["base", "llm"], ["torch", "science", "lab", "notebook"]),
        (["notebook", "services"], ["base", "notebook"], ["torch", "science", "services"]),
        (["notebook"], ["base", "notebook"], []),
    ],
)
def test_an_image_that_is_there_needs_nothing_below_it(families: list[str], there: list[str], missing: list[str]):
    """An administrator may remove the images in between from the node that builds."""
    plan = _plan()
    names = {plan.tagged(f"gpuhub/{image}") for image in there}
    found = plan.list_missing([f"gpuhub/{family}" for family in families], lambda name: name in names)
    assert found == [f"gpuhub/{image}" for image in missing]


def test_digests_do_not_depend_on_the_order_of_files():
    """File systems list folders in any order."""
    assert build_plan.hash_parts({"a": b"1", "b": b"2"}) == build_plan.hash_parts({"b": b"2", "a": b"1"})
    assert build_plan.hash_parts({"a": b"12"}) != build_plan.hash_parts({"a": b"1", "b": b"2"})


def test_sources_exclude_caches_and_build_outputs(tmp_path: Path):
    """Running or installing the code changes no tag."""
    for name in ("a.py", "__pycache__/a.pyc", "x.egg-info/PKG-INFO", "build/lib/a.py", "sub/b.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert set(build_plan.read_tree(tmp_path)) == {"a.py", "sub/b.toml"}


def test_only_a_source_tree_has_sources(tmp_path: Path):
    """The message names the folder."""
    with pytest.raises(SetupError, match=str(tmp_path)):
        build_plan.read_sources(tmp_path)


def test_images_get_every_file_of_gpu_launch():
    """Recipes and other files of data too, without which a notebook's gpu-launch would lack them."""
    files = build_plan.read_tree(ROOT / "extensions" / "gpu_launch")
    assert "recipes/files/finetune.yaml" in files
    assert {f"gpu_launch/{name}" for name in files} - build_plan.read_sources(ROOT).extensions.keys() == set()


def test_wheels_match_bookworm_on_any_head_node():
    """A newer C library or Python on the head node must not choose the image's wheels."""
    for command in _download_commands():
        assert command[command.index("--python-version") + 1] == "3.11"
        assert "manylinux_2_36_x86_64" in command
        assert "manylinux_2_39_x86_64" not in command


def test_locked_packages_are_downloaded_by_hash_and_torch_from_its_index_alone():
    """An index for torch cannot replace another package, and pip's own index cannot replace torch."""
    locked, torch, libraries = _download_commands()
    assert "--require-hashes" in locked
    assert "https://i.example" not in locked + libraries
    assert torch[torch.index("--index-url") + 1] == "https://i.example"
    assert "--no-deps" in torch
    assert torch[-1] == libraries[-1] == "torch==2.13.0"
    assert not [option for option in locked + torch + libraries if "extra-index" in option]


def _download_commands() -> list[list[str]]:
    settings = ImageSettings(torch_index="https://i.example")
    lock = wheels.build_lock_command(["pip"], Path("/w/lock"), "x86_64")
    return [lock, *wheels.build_torch_commands(["pip"], Path("/w"), settings, "x86_64")]


def _write_wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("torch/version.py", "cuda = None\n")


def test_packages_of_the_locks_are_not_in_the_layer_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would change with each of them; old downloads of torch go, those of other kinds stay."""

    def download(command: Sequence[str], **_options: object) -> None:
        folder = Path(command[command.index("--dest") + 1])
        for name in (
            "torch-2.13.0-cp311-none-any.whl",
            "typing_extensions-4.16.0-py3-none-any.whl",
            "triton-3.7-x.whl",
        ):
            _write_wheel(folder, name)

    for old in ("torch-0", "torch-9.partial", "0123456789ab", "science-1"):
        (tmp_path / old).mkdir()
    monkeypatch.setattr(wheels, "run_with_progress", download)
    found = wheels.ensure_torch_wheels(
        tmp_path,
        key="1",
        settings=ImageSettings(),
        locked=build_plan.list_locked_names("typing-extensions==4.16.0 \\\n    --hash=sha256:12\n"),
        machine="x86_64",
        report=lambda _step: None,
    )
    assert sorted(wheel.name for wheel in found.iterdir()) == ["torch-2.13.0-cp311-none-any.whl", "triton-3.7-x.whl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["science-1", "torch-1"]


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "cuda"),
        ("debug = False\ncuda: Optional[str] = None\n", "cpu"),
        ('__version__ = "2.13.0+cpu"\ncuda = None\n', "cpu"),
    ],
)
def test_torch_build_is_read_from_its_version_module(text: str, build: str):
    """The wheel's name does not always show it."""
    assert wheels.find_torch_build(text) == build


def test_a_refresh_builds_every_image_again():
    """Debian's packages are downloaded again, and the other images are based on them; wheels are kept."""
    refreshed = build_plan.build_plan(SOURCES, ImageSettings(), "x86_64", refreshed="2026-11-22T21:00")
    before = _plan()
    assert not {*refreshed.tags.items()} & {*before.tags.items()}
    assert refreshed.wheels == before.wheels


def test_build_context_is_a_tar_stream_of_plain_files(tmp_path: Path):
    """Names that are long or unusual and contents of any length come through."""
    large = tmp_path / "large"
    large.write_bytes(b"x" * 1_500_001)
    names = ["a b'\n\"c", "ü" * 120, "d/" * 90 + "e", "empty"]
    files: dict[str, bytes | Path] = {**{name: name.encode() for name in names}, "empty": b"", "large": large}
    with tarfile.open(fileobj=io.BytesIO(b"".join(builder.stream_context(files)))) as archive:
        read = {entry.name: archive.extractfile(entry).read() for entry in archive}
        assert {entry.mode for entry in archive} == {0o644}
    assert read == {**files, "large": large.read_bytes()}
