"""The simulated driver, driven through NVIDIA's own Python package, and the nvidia-smi stand-in."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pynvml as nvml
import pytest

from gpuhub.closet import cards, driver, shell
from gpuhub.closet.plan import Card, MigPart, mig_uuid
from gpuhub.nodes import agent, readings
from gpuhub.nodes.agent_container import agent_script

BIG = Card(model="RTX 5090", memory_mib=32607)
SMALL = Card(model="RTX 5060", memory_mib=8151)
SPLIT = Card(
    model="H200",
    memory_mib=143771,
    capability=(9, 0),
    mig=(MigPart(profile="3g.71gb", memory_mib=71424), MigPart(profile="1g.18gb", memory_mib=16384)),
)
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
        nvml.nvmlDeviceGetMaxMigDeviceCount,
        lambda card: nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 0),
        lambda card: nvml.nvmlDeviceGetTotalEccErrors(
            card, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        nvml.nvmlDeviceGetRemappedRows,
        nvml.nvmlDeviceGetEccMode,
        nvml.nvmlDeviceGetSerial,
        lambda card: nvml.nvmlDeviceGetNvLinkVersion(card, 0),
    ],
)
def test_what_geforce_cards_lack_is_not_supported(library, ask):
    """MIG, ECC, serial numbers and NVLink answer as on a GeForce card."""
    with pytest.raises(nvml.NVMLError_NotSupported):
        ask(nvml.nvmlDeviceGetHandleByIndex(0))


def uncorrected(card) -> int:
    return nvml.nvmlDeviceGetTotalEccErrors(card, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)


def test_memory_errors_are_counted(library):
    """A card with an uncorrectable error, and one whose row could not be replaced, say so and go on."""
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    set_live(library, 0, fault=cards.Fault.ECC)
    assert uncorrected(card) == 1
    set_live(library, 0, fault=cards.Fault.REMAP_FAILED)
    assert nvml.nvmlDeviceGetRemappedRows(card) == (0, 1, 0, 1)
    assert nvml.nvmlDeviceGetUtilizationRates(card).gpu == 0


def split_card(root: Path) -> tuple[str, ...]:
    """Puts a card in MIG mode in the place of the second; the UUIDs of its MIG devices."""
    (root / "1/card").write_text(cards.format_card(SPLIT, index=1, uuid=UUIDS[1]))
    return mig_uuid(UUIDS[1], 0), mig_uuid(UUIDS[1], 1)


def test_mig_devices_are_described(library):
    """A card in MIG mode has parts with names, UUIDs, memory and programs of their own."""
    uuids = split_card(library)
    parts = (cards.PartLive(), cards.PartLive(memory_used_mib=900, processes=((41, 800),)))
    set_live(library, 1, processes=((7, 5),), parts=parts)
    card = nvml.nvmlDeviceGetHandleByIndex(1)
    assert nvml.nvmlDeviceGetMigMode(card) == [1, 1]
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(card) == 7
    assert (uncorrected(card), nvml.nvmlDeviceGetRemappedRows(card)) == (0, (0, 0, 0, 0))
    found = [nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, slot) for slot in range(2)]
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 2)
    assert [nvml.nvmlDeviceGetName(part) for part in found] == ["NVIDIA H200 MIG 3g.71gb", "NVIDIA H200 MIG 1g.18gb"]
    assert tuple(nvml.nvmlDeviceGetUUID(part) for part in found) == uuids
    assert [nvml.nvmlDeviceGetMemoryInfo(part).total >> 20 for part in found] == [71424, 16384]
    assert [nvml.nvmlDeviceGetMemoryInfo(part).used >> 20 for part in found] == [0, 900]
    assert [[one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(part)] for part in found] == [[], [41]]
    assert [nvml.nvmlDeviceGetAttributes(part).gpuInstanceSliceCount for part in found] == [3, 1]
    assert [nvml.nvmlDeviceGetAttributes(part).memorySizeMB for part in found] == [71424, 16384]
    assert [nvml.nvmlDeviceIsMigDeviceHandle(part).value for part in (card, *found)] == [0, 1, 1]
    assert nvml.nvmlDeviceGetGpuInstanceId(found[1]) == 1
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(found[1])) == UUIDS[1]
    assert nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByUUID(uuids[1])) == "NVIDIA H200 MIG 1g.18gb"
    assert nvml.nvmlDeviceGetCudaComputeCapability(found[0]) == (9, 0)
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetUtilizationRates(found[0])


def test_only_granted_mig_devices_are_there(library):
    """What the hook grants is written beside the cards; the other parts of the card are not there."""
    uuids = split_card(library)
    (library / "mig_visible").write_text(f"{uuids[1]}\n")
    card = nvml.nvmlDeviceGetHandleByIndex(1)
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 0)
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 1)) == uuids[1]
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetHandleByUUID(uuids[0])


def test_the_agent_reads_all_of_it(library):
    """GPUs and MIG devices, programs, faults and the driver, as the broker understands them."""
    uuids = split_card(library)
    set_live(library, 0, memory_used_mib=300, processes=((41, 280),), fault=cards.Fault.ECC)
    set_live(library, 1, parts=(cards.PartLive(memory_used_mib=900, processes=((42, 800),)), cards.PartLive()))
    found = readings.parse_agent_line(json.dumps({"n": 1, "boot_id": "b1", **agent.read_node()}).encode())
    assert found is not None
    assert (found.error, found.driver) == (None, "580.95.05")
    whole, first, second = found.gpus
    assert (whole.uuid, whole.model, whole.capability, whole.ecc_uncorrected) == (UUIDS[0], "RTX 5090", (12, 0), 1)
    assert [(one.pid, one.memory_mib) for one in whole.processes or ()] == [(41, 280)]
    assert [(one.uuid, one.model, one.memory_mib, one.index) for one in (first, second)] == [
        (uuids[0], "H200 MIG 3g.71gb", 71424, 1),
        (uuids[1], "H200 MIG 1g.18gb", 16384, 1),
    ]
    assert [(one.is_mig, one.parent, one.capability) for one in (first, second)] == [(True, UUIDS[1], (9, 0))] * 2
    assert [(one.pid, one.memory_mib) for one in first.processes or ()] == [(42, 800)]
    assert (second.processes, second.ecc_uncorrected, second.remap_failed) == ((), 0, False)


@pytest.mark.parametrize(
    ("fault", "error"),
    [("lost", "GPU is lost"), ("fallen_off_bus", "Unknown Error")],
)
def test_the_agent_tells_which_card_is_broken(library, fault, error):
    """The broken card has NVML's words, the other its reading."""
    set_live(library, 0, fault=cards.Fault(fault))
    broken, well = agent.read_node()["gpus"]
    assert (broken["index"], broken["error"]) == (0, error)
    assert (well["uuid"], well["error"]) == (UUIDS[1], None)


def test_a_card_in_mig_mode_without_devices_is_told(library):
    """Nothing of it can be given, and the page says why."""
    text = cards.format_card(BIG, index=0, uuid=UUIDS[0])
    (library / "0/card").write_text(f"{text}mig_mode 1\n")
    assert agent.read_node()["gpus"][0]["error"] == "in MIG mode, without a MIG device"


def test_the_agent_goes_on_when_nvml_hangs(compiled, root):
    """Its lines say that NVML does not answer, and tell of the GPUs again when it does."""
    script = agent_script().replace("PERIOD_S = 2.0", "PERIOD_S = 0.05").replace("HANG_S = 6.0", "HANG_S = 0.5")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(compiled.folder)}
    command = [sys.executable, "-u", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        lines = map(json.loads, process.stdout)
        try:
            next(line for line in lines if line["error"] is None)
            set_live(root, 0, fault=cards.Fault.HANG)
            hung = next(line for line in lines if line["error"] is not None)
            assert (hung["error"], hung["gpus"]) == ("NVML does not answer", [])
            set_live(root, 0)
            assert len(next(line for line in lines if line["error"] is None)["gpus"]) == 2
        finally:
            process.kill()


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


def test_smi_lists_mig_devices(compiled, root):
    """Below their card, as NVIDIA's does."""
    uuids = split_card(root)
    assert run_smi(compiled, "-L").stdout.splitlines()[1:] == [
        f"GPU 1: NVIDIA H200 (UUID: {UUIDS[1]})",
        f"  MIG 3g.71gb     Device  0: (UUID: {uuids[0]})",
        f"  MIG 1g.18gb     Device  1: (UUID: {uuids[1]})",
    ]


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
