"""The plan of a build: contents, tags and commands."""

import io
import tarfile
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.config.images import ImageSettings
from gpuhub.ops.images import build_plan, builder, wheels

SOURCES = build_plan.ImageSources(
    base={"packages": b"git\n"},
    python={"Dockerfile": b"FROM x", "requirements.lock": b"numpy==2.4.6\nnvidia-ml-py==13.1\n"},
    notebook={"Dockerfile": b"FROM y"},
    extensions={"gpu_launch/__init__.py": b""},
    notebooks={"01-first-launch.ipynb": b"{}"},
)


def _plan(settings: ImageSettings | None = None, **changes: dict[str, bytes]) -> build_plan.ImagePlan:
    parts = {name: getattr(SOURCES, name) for name in ("base", "python", "notebook", "extensions", "notebooks")}
    return build_plan.build_plan(build_plan.ImageSources(**{**parts, **changes}), settings or ImageSettings(), "x86_64")


def test_a_changed_extension_rebuilds_only_the_notebook_image():
    """The libraries' image, whose build takes long, keeps its tag."""
    changed = _plan(extensions={"gpu_launch/__init__.py": b"x = 1"})
    assert changed.notebook != _plan().notebook
    assert (changed.base, changed.python, changed.wheels) == (_plan().base, _plan().python, _plan().wheels)


def test_a_changed_lock_keeps_the_base_image():
    """Debian is downloaded again only when its packages, or NVIDIA's module in it, change."""
    changed = _plan(python={**SOURCES.python, "requirements.lock": b"numpy==2.5.0\nnvidia-ml-py==13.1\n"})
    assert changed.base == _plan().base
    assert changed.python != _plan().python
    assert changed.wheels != _plan().wheels


def test_every_torch_setting_has_its_own_wheels():
    """Another torch never comes from an older download."""
    settings = [
        ImageSettings(),
        ImageSettings(torch="2.12.0"),
        ImageSettings(torch_build="cpu"),
        ImageSettings(torch_index="https://x.example"),
    ]
    assert len({_plan(setting).wheels for setting in settings}) == len(settings)


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
    return wheels.build_download_commands(["pip"], Path("/w/lock"), settings, "x86_64")


def test_constraints_are_the_versions_of_the_lock():
    """pip would ask for hashes of every package if a constraint had one."""
    lock = "# A comment\nnumpy==2.4.6 \\\n    --hash=sha256:12 \\\n    --hash=sha256:34\nclick==8.1\n"
    assert wheels.build_constraints(lock) == "numpy==2.4.6\nclick==8.1\n"


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


@pytest.mark.parametrize(
    ("targets", "mirror"),
    [
        ("http://a.example/debian-security/ bookworm-security\nhttp://a.example/debian/ bookworm\n", "http://a.example/debian/"),
        ("http://archive.example/ubuntu/ noble\n", None),
        ("mirror+file:/etc/apt/list bookworm\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_mirror_is_the_one_apt_uses(targets: str, mirror: str | None):
    """On other distributions Debian's own servers are used."""
    assert builder.find_mirror(targets, "bookworm") == mirror


def test_debian_comes_with_its_updates_checked_with_its_own_keys():
    """Also on hosts whose apt trusts other keys; one whose apt lacks a part of the suite uses Debian's own servers."""
    mirrors = "".join(
        f"http://a.example/{folder}/ bookworm{part}\n"
        for folder, part in (("debian", ""), ("debian", "-updates"), ("security", "-security"))
    )
    command = builder.build_mmdebstrap_command(Path("/r"), "bookworm", ["git", "curl"], mirrors)
    assert "--include=git,curl" in command
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert command[-3:] == [
        f"deb [signed-by={keyring}] http://a.example/debian/ bookworm main",
        f"deb [signed-by={keyring}] http://a.example/debian/ bookworm-updates main",
        f"deb [signed-by={keyring}] http://a.example/security/ bookworm-security main",
    ]
    without = builder.build_mmdebstrap_command(Path("/r"), "bookworm", ["git"], mirrors.replace("-updates", "-other"))
    assert without[-2:] == ["bookworm", "/r"]


def test_a_refresh_builds_every_image_again():
    """Debian's packages are downloaded again, and the other images are based on them; wheels are kept."""
    refreshed = build_plan.build_plan(SOURCES, ImageSettings(), "x86_64", refreshed="2026-11-22T21:00")
    before = _plan()
    assert {refreshed.base, refreshed.python, refreshed.notebook}.isdisjoint(
        {before.base, before.python, before.notebook}
    )
    assert refreshed.wheels == before.wheels


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("./usr/bin/git", True),
        ("./usr/share/doc/git/copyright", True),
        ("./usr/share/doc/git/changelog.gz", False),
        ("./usr/share/man/man1/git.1.gz", False),
        ("./usr/share/man", True),
        ("./etc/resolv.conf", False),
        ("./tmp", True),
        ("./tmp/x", False),
    ],
)
def test_the_base_image_has_programs_and_licences_but_no_manuals(name: str, is_kept: bool):
    """And no files of the machine that built it."""
    assert (builder.filter_entry(tarfile.TarInfo(name)) is not None) == is_kept


def test_nothing_in_the_base_image_is_setuid():
    """The sticky bit of /tmp stays."""
    entry = tarfile.TarInfo("usr/bin/su")
    entry.mode = 0o7755
    kept = builder.filter_entry(entry)
    assert kept is not None
    assert kept.mode == 0o1755


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


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path):
    """Old files and the folder of a build that was killed go; the finished tar stays."""
    (tmp_path / "new.tar").write_bytes(b"new")
    (tmp_path / "old.tar").write_bytes(b"old")
    (tmp_path / "tmpkilled" / "root" / "usr").mkdir(parents=True)
    found = builder.ensure_root_tar(
        tmp_path,
        tag="new",
        suite="bookworm",
        sources=SOURCES,
        read_pynvml=lambda: b"",
        report=lambda _step: None,
    )
    assert found == tmp_path / "new.tar"
    assert list(tmp_path.iterdir()) == [found]
