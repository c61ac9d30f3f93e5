"""The simulated driver, driven through NVIDIA's own Python package, and the nvidia-smi stand-in."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pynvml as nvml
import pytest

from gpuhub.closet import cards, driver, shell
from gpuhub.closet.plan import Card

BIG = Card(model="RTX 5090", memory_mib=32607)
SMALL = Card(model="RTX 5060", memory_mib=8151)
UUIDS = ("GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> driver.Driver:
    folder = tmp_path_factory.mktemp("driver")
    for command in driver.build_commands(folder):
        shell.run((*command, "-Werror"))
    return driver.Driver(folder)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A big and a small card."""
    for index, (card, uuid) in enumerate(zip((BIG, SMALL), UUIDS, strict=True)):
        (tmp_path / str(index)).mkdir()
        (tmp_path / f"{index}/card").write_text(cards.format_card(card, index=index, uuid=uuid))
    monkeypatch.setenv("NVIDIA_SIMULATED_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def library(compiled, root):
    """The library, initialised; NVIDIA's package finds the loaded one by its name."""
    ctypes.CDLL(str(compiled.library))
    nvml.nvmlInit()
    yield root
    nvml.nvmlShutdown()


def set_live(root: Path, index: int, **values) -> None:
    (root / f"{index}/live").write_text(cards.format_live(cards.Live(**values)))


def run_smi(compiled: driver.Driver, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [compiled.smi, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=dict(os.environ), timeout=10)


def test_cards_are_described(library):
    """Names, UUIDs, memory, capability and indexes are those of the plan."""
    found = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    assert [nvml.nvmlDeviceGetName(card) for card in found] == [BIG.name, SMALL.name]
    assert [nvml.nvmlDeviceGetUUID(card) for card in found] == list(UUIDS)
    assert [nvml.nvmlDeviceGetMemoryInfo(card).total for card in found] == [32607 << 20, 8151 << 20]
    assert [nvml.nvmlDeviceGetCudaComputeCapability(card) for card in found] == [(12, 0), (12, 0)]
    assert [nvml.nvmlDeviceGetMinorNumber(card) for card in found] == [0, 1]
    assert [nvml.nvmlDeviceGetIndex(card) for card in found] == [0, 1]
    assert [nvml.nvmlDeviceGetPciInfo(card).busId for card in found] == ["00000000:01:00.0", "00000000:02:00.0"]
    assert [nvml.nvmlDeviceGetEnforcedPowerLimit(card) for card in found] == [575_000, 145_000]


def test_card_is_found_by_uuid(library):
    """A UUID leads to its card; an unknown one is not found."""
    assert nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(UUIDS[1])) == 1
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetHandleByUUID("GPU-none")


def test_load_is_live(library):
    """Utilisation, memory, power, heat and processes follow the file without a new start."""
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    idle = nvml.nvmlDeviceGetPowerUsage(card), nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)
    assert nvml.nvmlDeviceGetUtilizationRates(card).gpu == 0
    assert nvml.nvmlDeviceGetComputeRunningProcesses(card) == []
    set_live(library, 0, utilisation_percent=100, memory_used_mib=30000, processes=((41, 1000), (42, 29000)))
    busy = nvml.nvmlDeviceGetPowerUsage(card), nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)
    memory = nvml.nvmlDeviceGetMemoryInfo(card, version=nvml.nvmlMemory_v2)
    assert nvml.nvmlDeviceGetUtilizationRates(card).gpu == 100
    assert (memory.used, memory.free) == (30000 << 20, 2607 << 20)
    assert [(one.pid, one.usedGpuMemory >> 20) for one in nvml.nvmlDeviceGetComputeRunningProcesses(card)] == [
        (41, 1000),
        (42, 29000),
    ]
    assert busy > idle
    assert busy[0] <= 575_000


@pytest.mark.parametrize(("fault", "error"), [("lost", nvml.NVMLError_GpuIsLost), ("fallen_off_bus", nvml.NVMLError)])
def test_broken_card_fails_alone(library, fault, error):
    """A broken card answers with NVIDIA's error, and the other goes on."""
    first, second = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
    set_live(library, 0, fault=cards.Fault(fault))
    with pytest.raises(error):
        nvml.nvmlDeviceGetUtilizationRates(first)
    assert nvml.nvmlDeviceGetCount() == 2
    assert nvml.nvmlDeviceGetUtilizationRates(second).gpu == 0


def test_driver_mismatch_stops_the_start(compiled, root):
    """After a simulated driver upgrade the library does not start."""
    ctypes.CDLL(str(compiled.library))
    set_live(root, 1, fault=cards.Fault.DRIVER_MISMATCH)
    with pytest.raises(nvml.NVMLError_LibRmVersionMismatch):
        nvml.nvmlInit()


def test_library_must_be_started(compiled, root):
    """Before nvmlInit every question is refused."""
    ctypes.CDLL(str(compiled.library))
    nvml.nvmlInit()
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlShutdown()
    with pytest.raises(nvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetName(card)


@pytest.mark.parametrize(
    "ask",
    [
        nvml.nvmlDeviceGetMigMode,
        nvml.nvmlDeviceGetEccMode,
        nvml.nvmlDeviceGetSerial,
        lambda card: nvml.nvmlDeviceGetNvLinkVersion(card, 0),
    ],
)
def test_what_geforce_cards_lack_is_not_supported(library, ask):
    """MIG, ECC, serial numbers and NVLink answer as on a GeForce card."""
    with pytest.raises(nvml.NVMLError_NotSupported):
        ask(nvml.nvmlDeviceGetHandleByIndex(0))


def test_dashboards_questions_are_answered(library):
    """All that jupyterlab-nvdashboard asks beyond memory and utilisation has an answer."""
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetMaxPcieLinkGeneration(card) == 5
    assert nvml.nvmlDeviceGetMaxPcieLinkWidth(card) == 16
    assert nvml.nvmlDeviceGetPcieThroughput(card, nvml.NVML_PCIE_UTIL_TX_BYTES) == 0
    fields = nvml.nvmlDeviceGetFieldValues(card, [(nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, 0)])
    assert fields[0].nvmlReturn == nvml.NVML_ERROR_NOT_SUPPORTED


def test_smi_lists_and_queries(compiled, root):
    """nvidia-smi prints lists and tables as NVIDIA's does, and says that it is simulated."""
    set_live(root, 1, utilisation_percent=7, memory_used_mib=512)
    fields = "--query-gpu=index,name,uuid,memory.total,memory.used,utilization.gpu"
    assert run_smi(compiled, "-L").stdout.splitlines()[1] == f"GPU 1: {SMALL.name} (UUID: {UUIDS[1]})"
    assert run_smi(compiled, fields, "--format=csv,noheader,nounits").stdout.splitlines() == [
        f"0, {BIG.name}, {UUIDS[0]}, 32607, 0, 0",
        f"1, {SMALL.name}, {UUIDS[1]}, 8151, 512, 7",
    ]
    assert run_smi(compiled, "--query-gpu=memory.used", "--format=csv", "-i", "1").stdout == (
        "memory.used [MiB]\n512 MiB\n"
    )
    table = run_smi(compiled).stdout
    assert "*** simulated" in table
    assert {len(line) for line in table.splitlines()} == {79}


def test_smi_says_what_is_wrong(compiled, root):
    """Unknown options and fields, a lost card and no card at all have NVIDIA's exit statuses."""
    assert run_smi(compiled, "--nonsense").returncode == 2
    assert run_smi(compiled, "--query-gpu=nonsense").returncode == 2
    assert run_smi(compiled, "--id=GPU-none", "-L").returncode == 6
    set_live(root, 0, fault=cards.Fault.LOST)
    lost = run_smi(compiled)
    assert (lost.returncode, "GPU is lost" in lost.stdout) == (15, True)


def test_library_needs_no_new_c_library(compiled):
    """Images older than this machine can load it: it binds to nothing newer than glibc 2.17."""
    listing = subprocess.run(["objdump", "-T", compiled.library], check=True, capture_output=True, text=True).stdout
    versions = {word.strip("()").removeprefix("GLIBC_") for word in listing.split() if "GLIBC_" in word}
    assert versions
    assert max(tuple(map(int, version.split("."))) for version in versions) <= (2, 17)
