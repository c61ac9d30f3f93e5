"""The hook that puts simulated GPUs into a container, and the files of the GPUs."""

from __future__ import annotations

import os
import stat

import pytest

from gpuhub.common.errors import SettingsError
from gpuhub_closet import gpu_state, hook
from gpuhub_closet.topology import SimulatedGpu, SimulatedMigDevice, mig_uuid
from tests.support.closet import practice_closet

CARDS = [{"index": str(index), "uuid": f"GPU-{index}", "fault": "none"} for index in range(3)]


def choose(wanted: str) -> list[str]:
    return [card["index"] for card in hook.select_gpus(wanted, CARDS)]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("", []),
        ("void", []),
        ("none", []),
        ("all", ["0", "1", "2"]),
        ("GPU-1", ["1"]),
        ("2,0", ["0", "2"]),
        ("GPU-2,2,GPU-0", ["0", "2"]),
    ],
)
def test_wanted_gpus_are_selected(wanted, chosen):
    """By UUID, index or `all`; in the order of their indexes, once each."""
    assert choose(wanted) == chosen


@pytest.mark.parametrize("wanted", ["GPU-9", "3", "GPU-0,GPU-9", "-1", "GPU-0,", "../0"])
def test_unknown_gpus_are_refused(wanted):
    """A GPU that the node lacks stops the start, and the error names it."""
    with pytest.raises(hook.HookError, match="unknown device"):
        choose(wanted)


def test_lost_gpu_is_refused():
    """A lost GPU is refused by name, but visible with `all`."""
    broken = [CARDS[0] | {"fault": "lost"}]
    with pytest.raises(hook.HookError, match="GPU-0: gpu is lost"):
        hook.select_gpus("GPU-0", broken)
    assert hook.select_gpus("all", broken) == broken


MIG = [
    {"index": "0", "uuid": "GPU-0", "fault": "none"},
    {"index": "1", "uuid": "GPU-1", "fault": "none", "mig_devices": " MIG-a MIG-b"},
]


@pytest.mark.parametrize(
    ("wanted", "chosen", "devices"),
    [
        ("MIG-b", ["1"], ["MIG-b"]),
        ("GPU-0,MIG-a", ["0", "1"], ["MIG-a"]),
        ("MIG-b,MIG-a", ["1"], ["MIG-a", "MIG-b"]),
        ("GPU-1", ["1"], ["MIG-a", "MIG-b"]),
        ("1", ["1"], ["MIG-a", "MIG-b"]),
        ("all", ["0", "1"], ["MIG-a", "MIG-b"]),
        ("GPU-0", ["0"], []),
    ],
)
def test_mig_devices_are_selected(wanted, chosen, devices):
    """Single ones by UUID, all of them by their GPU or `all`."""
    gpus = hook.select_gpus(wanted, MIG)
    assert [card["index"] for card in gpus] == chosen
    assert hook.select_mig_devices(wanted, gpus) == devices


def test_mig_devices_of_a_lost_gpu_are_refused():
    """They are lost with it."""
    with pytest.raises(hook.HookError, match="MIG-a: gpu is lost"):
        hook.select_gpus("MIG-a", [MIG[1] | {"fault": "lost"}])


@pytest.mark.parametrize(
    ("environment", "visible"),
    [
        ([], ""),
        (["NVIDIA_VISIBLE_DEVICES=GPU-0"], "GPU-0"),
        (["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=GPU-0"], "GPU-0"),
        (["NVIDIA_VISIBLE_DEVICES=GPU-0", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"], "GPU-0"),
        (["NVIDIA_VISIBLE_DEVICES=GPU-0", "NVIDIA_DRIVER_CAPABILITIES=video"], ""),
        (["=odd", "NVIDIA_VISIBLE_DEVICES"], ""),
    ],
)
def test_visible_devices_are_read_from_the_environment(environment, visible):
    """The last value counts, which is the one that Docker appends."""
    assert hook.parse_visible_devices(environment) == visible


def test_links_in_an_image_are_not_followed(tmp_path):
    """An image whose folder is a link to elsewhere is refused, and nothing is made there."""
    image, outside = tmp_path / "image", tmp_path / "outside"
    (image / "usr").mkdir(parents=True)
    outside.mkdir()
    (image / "usr/lib").symlink_to(outside)
    root = os.open(image, hook.FOLDER)
    with pytest.raises(hook.HookError, match="not a plain folder"):
        hook.open_folder(root, "usr/lib/x86_64-linux-gnu", make=True)
    os.close(root)
    assert list(outside.iterdir()) == []


def test_installed_file_replaces_a_link(tmp_path):
    """A link where a file goes is replaced, and what it pointed to is untouched."""
    source, target, folder = tmp_path / "new", tmp_path / "precious", tmp_path / "bin"
    source.write_bytes(b"new" * 100_000)
    target.write_text("precious")
    folder.mkdir()
    (folder / "nvidia-smi").symlink_to(target)
    opened = os.open(folder, hook.FOLDER)
    hook.install_file(str(source), opened, "nvidia-smi")
    os.close(opened)
    assert (folder / "nvidia-smi").read_bytes() == source.read_bytes()
    assert stat.S_IMODE((folder / "nvidia-smi").lstat().st_mode) == 0o755
    assert target.read_text() == "precious"


def test_gpus_are_read_in_order(tmp_path):
    """The hook reads the files that the closet writes, ten after nine."""
    for index in (10, 9):
        (tmp_path / str(index)).mkdir()
        text = gpu_state.format_gpu(SimulatedGpu(model="RTX 5070", memory_mib=12227), index=index, uuid=f"GPU-{index}")
        (tmp_path / f"{index}/card").write_text(text)
        (tmp_path / f"{index}/live").write_text(gpu_state.format_load(gpu_state.GpuLoad(fault=gpu_state.GpuFault.LOST)))
    gpus = hook.read_gpus(str(tmp_path))
    assert [(card["uuid"], card["name"], card["fault"]) for card in gpus] == [
        ("GPU-9", "NVIDIA GeForce RTX 5070", "lost"),
        ("GPU-10", "NVIDIA GeForce RTX 5070", "lost"),
    ]


def test_mig_devices_are_read(tmp_path):
    """The hook reads the MIG devices of a GPU that the closet writes."""
    (tmp_path / "0").mkdir()
    card = SimulatedGpu(
        model="H200", memory_mib=143771, mig_devices=(SimulatedMigDevice(profile="1g.18gb", memory_mib=16384),) * 2
    )
    (tmp_path / "0/card").write_text(gpu_state.format_gpu(card, index=0, uuid="GPU-0"))
    (tmp_path / "0/live").write_text(gpu_state.format_load(gpu_state.GpuLoad()))
    (gpus,) = hook.read_gpus(str(tmp_path))
    assert hook.list_mig_devices(gpus) == [mig_uuid("GPU-0", 0), mig_uuid("GPU-0", 1)]


def test_written_text_replaces_a_link(tmp_path):
    """A link that an image has in the file's place is replaced, and what it pointed to is untouched."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "mig_visible").symlink_to(tmp_path / "precious")
    opened = os.open(tmp_path, hook.FOLDER)
    hook.write_text("MIG-a\n", opened, "mig_visible")
    os.close(opened)
    assert (tmp_path / "mig_visible").read_text() == "MIG-a\n"
    assert (tmp_path / "precious").read_text() == "precious"


def test_other_stages_do_nothing():
    """Stages other than prestart are accepted and ignored, as by NVIDIA's hook."""
    assert hook.main(["poststop"]) == 0


def test_load_files_are_parsed():
    """Load, fault and processes are equal after they were written and parsed."""
    live = gpu_state.GpuLoad(
        utilisation_percent=55,
        memory_used_mib=4096,
        fault=gpu_state.GpuFault.FALLEN_OFF_BUS,
        clocks_event_reasons=64,
        xid=79,
        xid_count=2,
        link_width=8,
        processes=((1, 2), (3, 4)),
        mig_devices=(gpu_state.MigLoad(memory_used_mib=7, processes=((5, 6),)), gpu_state.MigLoad()),
    )
    assert practice_closet.parse_load(gpu_state.format_load(live)) == live
    assert practice_closet.parse_load("") == gpu_state.GpuLoad()


@pytest.mark.parametrize("values", [{"utilisation_percent": 101}, {"utilisation_percent": -1}, {"memory_used_mib": -1}])
def test_invalid_load_is_refused(values):
    """A load must be possible for a GPU."""
    with pytest.raises(SettingsError):
        gpu_state.GpuLoad(**values)
