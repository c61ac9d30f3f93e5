"""The simulated driver, used through NVIDIA's Python package, and the simulated nvidia-smi."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pynvml as nvml
import pytest

from gpu_launch.worker import nccl_env
from gpuhub.nodes import agent, agent_container
from gpuhub.nodes.agent_container import agent_script
from gpuhub_closet import driver, gpu_state, shell
from gpuhub_closet.topology import SimulatedGpu, SimulatedMigDevice, mig_uuid
from tests.support.nvml.recorder import encode
from tests.support.nvml.replay import IDLE, load

BIG = SimulatedGpu(model="RTX 5090", memory_mib=32607)
SMALL = SimulatedGpu(model="RTX 5060", memory_mib=8151)
SPLIT = SimulatedGpu(
    model="H200",
    memory_mib=143771,
    capability=(9, 0),
    mig_devices=(
        SimulatedMigDevice(profile="3g.71gb", memory_mib=71424),
        SimulatedMigDevice(profile="1g.18gb", memory_mib=16384),
    ),
)
UUIDS = ("GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory) -> driver.SimulatedDriver:
    folder = tmp_path_factory.mktemp("driver")
    for command in driver.build_compile_commands(folder):
        shell.run_command((*command, "-Werror"))
    return driver.SimulatedDriver(folder)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A large and a small GPU."""
    for index, (card, uuid) in enumerate(zip((BIG, SMALL), UUIDS, strict=True)):
        (tmp_path / str(index)).mkdir()
        (tmp_path / f"{index}/card").write_text(gpu_state.format_gpu(card, index=index, uuid=uuid))
    monkeypatch.setenv("NVIDIA_SIMULATED_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def library(compiled, root):
    """The initialised library; NVIDIA's package finds a loaded library by its name."""
    ctypes.CDLL(str(compiled.library))
    nvml.nvmlInit()
    yield root
    nvml.nvmlShutdown()


def write_load(root: Path, index: int, **values) -> None:
    (root / f"{index}/live").write_text(gpu_state.format_load(gpu_state.GpuLoad(**values)))


def run_smi(compiled: driver.SimulatedDriver, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [compiled.nvidia_smi, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=dict(os.environ), timeout=60)


def test_gpu_properties_match_the_plan(library):
    """Names, UUIDs, memory, capability and indexes are those of the plan."""
    devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    assert [nvml.nvmlDeviceGetName(card) for card in devices] == [BIG.name, SMALL.name]
    assert [nvml.nvmlDeviceGetUUID(card) for card in devices] == list(UUIDS)
    assert [nvml.nvmlDeviceGetMemoryInfo(card).total for card in devices] == [32607 << 20, 8151 << 20]
    assert [nvml.nvmlDeviceGetCudaComputeCapability(card) for card in devices] == [(12, 0), (12, 0)]
    assert [nvml.nvmlDeviceGetMinorNumber(card) for card in devices] == [0, 1]
    assert [nvml.nvmlDeviceGetIndex(card) for card in devices] == [0, 1]
    assert [nvml.nvmlDeviceGetPciInfo(card).busId for card in devices] == ["00000000:01:00.0", "00000000:02:00.0"]
    assert [nvml.nvmlDeviceGetEnforcedPowerLimit(card) for card in devices] == [575_000, 145_000]


def test_gpu_is_found_by_uuid(library):
    """An unknown UUID is an error."""
    assert nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(UUIDS[1])) == 1
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetHandleByUUID("GPU-none")


#: What a real driver was asked and the simulated one does not answer.
NOT_SIMULATED = {
    f"nvmlDeviceGet{name}"
    for name in (
        "MemoryBusWidth",
        "NumGpuCores",
        "PowerManagementLimitConstraints",
        "TopologyCommonAncestor",
    )
}


def test_answers_have_the_shape_of_a_real_driver_s(library):
    """Each call that a real driver answered is answered with values of the same types, or as not supported by GPUs like these."""
    recorded = load(IDLE)["calls"]
    asked, missing, different = 0, set(), {}
    for call, answer in recorded.items():
        name, arguments, keywords = parse_call(call)
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(int(each.removeprefix("GPU "))) for each in arguments if is_gpu(each)
        ]
        if not handles or "result" not in answer:
            continue
        asked += 1
        values = [handles.pop(0) if is_gpu(each) else each for each in arguments]
        try:
            found = encode(getattr(nvml, name)(*values, **keywords))
        except nvml.NVMLError_NotSupported:
            continue
        except nvml.NVMLError_FunctionNotFound:
            missing.add(name)
            continue
        if shape(found) != shape(answer["result"]):
            different[call] = (found, answer["result"])
    assert asked > 50
    assert not different
    assert missing == NOT_SIMULATED


def test_geforce_cards_do_not_read_each_other_s_memory(library, monkeypatch):
    """NCCL is told so for two of them in one container."""
    monkeypatch.setenv("GPUHUB_GPU_UUIDS", ",".join(UUIDS))
    assert nccl_env.inspect_container("lo").has_p2p is False
    assert nccl_env.find_variables("lo")["NCCL_P2P_DISABLE"] == "1"


def is_gpu(argument):
    return isinstance(argument, str) and argument.startswith("GPU ")


def parse_call(call):
    """Undo `describe_call`."""
    name, _, rest = call.removesuffix(")").partition("(")
    words = rest.split(", ") if rest else []
    keywords = dict(word.split("=") for word in words if "=" in word)
    return (
        name,
        [json.loads(word) for word in words if "=" not in word],
        {key: int(value) for key, value in keywords.items()},
    )


def shape(value):
    """Return the types of an encoded value; lists, such as those of processes, may have any length."""
    match value:
        case {"struct": fields}:
            return {key: shape(each) for key, each in fields.items()}
        case {"tuple": items}:
            return [shape(each) for each in items]
        case {"list": _}:
            return "list"
        case int() | float():
            return "number"
        case _:
            return type(value).__name__


def test_load_is_live(library):
    """Utilisation, memory, power, heat and processes follow the file without a restart."""
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    idle = nvml.nvmlDeviceGetPowerUsage(card), nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)
    assert nvml.nvmlDeviceGetUtilizationRates(card).gpu == 0
    assert nvml.nvmlDeviceGetComputeRunningProcesses(card) == []
    write_load(library, 0, utilisation_percent=100, memory_used_mib=30000, processes=((41, 1000), (42, 29000)))
    busy = nvml.nvmlDeviceGetPowerUsage(card), nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)
    memory = nvml.nvmlDeviceGetMemoryInfo(card, version=nvml.nvmlMemory_v2)
    assert nvml.nvmlDeviceGetUtilizationRates(card).gpu == 100
    assert (memory.used, memory.free) == (30000 << 20, 2607 << 20)
    assert [
        (process.pid, process.usedGpuMemory >> 20) for process in nvml.nvmlDeviceGetComputeRunningProcesses(card)
    ] == [
        (41, 1000),
        (42, 29000),
    ]
    assert busy > idle
    assert busy[0] <= 575_000


@pytest.mark.parametrize(("fault", "error"), [("lost", nvml.NVMLError_GpuIsLost), ("fallen_off_bus", nvml.NVMLError)])
def test_only_the_broken_gpu_fails(library, fault, error):
    """It answers with NVIDIA's error, and the other one still works."""
    first, second = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
    write_load(library, 0, fault=gpu_state.GpuFault(fault))
    with pytest.raises(error):
        nvml.nvmlDeviceGetUtilizationRates(first)
    assert nvml.nvmlDeviceGetCount() == 2
    assert nvml.nvmlDeviceGetUtilizationRates(second).gpu == 0


def test_driver_mismatch_stops_the_start(compiled, root):
    """After a simulated driver upgrade the library does not start."""
    ctypes.CDLL(str(compiled.library))
    write_load(root, 1, fault=gpu_state.GpuFault.DRIVER_MISMATCH)
    with pytest.raises(nvml.NVMLError_LibRmVersionMismatch):
        nvml.nvmlInit()


def test_library_must_be_started(compiled, root):
    """Before nvmlInit every query is refused."""
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
def test_features_that_geforce_gpus_lack_are_not_supported(library, ask):
    """MIG, ECC, serial numbers and NVLink answer as on a GeForce GPU."""
    with pytest.raises(nvml.NVMLError_NotSupported):
        ask(nvml.nvmlDeviceGetHandleByIndex(0))


def uncorrected(card) -> int:
    return nvml.nvmlDeviceGetTotalEccErrors(card, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)


def test_memory_errors_are_counted(library):
    """A GPU with an uncorrectable error and one with a row that could not be replaced report it and still work."""
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    write_load(library, 0, fault=gpu_state.GpuFault.ECC)
    assert uncorrected(card) == 1
    write_load(library, 0, fault=gpu_state.GpuFault.REMAP_FAILED)
    assert nvml.nvmlDeviceGetRemappedRows(card) == (0, 1, 0, 1)
    assert nvml.nvmlDeviceGetUtilizationRates(card).gpu == 0


def split_card(root: Path) -> tuple[str, ...]:
    """Replace the second GPU by one in MIG mode, and return the UUIDs of its MIG devices."""
    (root / "1/card").write_text(gpu_state.format_gpu(SPLIT, index=1, uuid=UUIDS[1]))
    return mig_uuid(UUIDS[1], 0), mig_uuid(UUIDS[1], 1)


def test_mig_devices_are_described(library):
    """The MIG devices have their own names, UUIDs, memory and programs."""
    uuids = split_card(library)
    parts = (gpu_state.MigLoad(), gpu_state.MigLoad(memory_used_mib=900, processes=((41, 800),)))
    write_load(library, 1, processes=((7, 5),), mig_devices=parts)
    card = nvml.nvmlDeviceGetHandleByIndex(1)
    assert nvml.nvmlDeviceGetMigMode(card) == [1, 1]
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(card) == 7
    assert (uncorrected(card), nvml.nvmlDeviceGetRemappedRows(card)) == (0, (0, 0, 0, 0))
    devices = [nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, slot) for slot in range(2)]
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 2)
    assert [nvml.nvmlDeviceGetName(part) for part in devices] == ["NVIDIA H200 MIG 3g.71gb", "NVIDIA H200 MIG 1g.18gb"]
    assert tuple(nvml.nvmlDeviceGetUUID(part) for part in devices) == uuids
    assert [nvml.nvmlDeviceGetMemoryInfo(part).total >> 20 for part in devices] == [71424, 16384]
    assert [nvml.nvmlDeviceGetMemoryInfo(part).used >> 20 for part in devices] == [0, 900]
    assert [[process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(part)] for part in devices] == [
        [],
        [41],
    ]
    assert [nvml.nvmlDeviceGetAttributes(part).gpuInstanceSliceCount for part in devices] == [3, 1]
    assert [nvml.nvmlDeviceGetAttributes(part).memorySizeMB for part in devices] == [71424, 16384]
    assert [nvml.nvmlDeviceIsMigDeviceHandle(part).value for part in (card, *devices)] == [0, 1, 1]
    assert nvml.nvmlDeviceGetGpuInstanceId(devices[1]) == 1
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(devices[1])) == UUIDS[1]
    assert nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByUUID(uuids[1])) == "NVIDIA H200 MIG 1g.18gb"
    assert nvml.nvmlDeviceGetCudaComputeCapability(devices[0]) == (9, 0)
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetUtilizationRates(devices[0])


def test_only_granted_mig_devices_are_visible(library):
    """The hook writes the granted MIG devices next to the GPUs; others of the same GPU are hidden."""
    uuids = split_card(library)
    (library / "mig_visible").write_text(f"{uuids[1]}\n")
    card = nvml.nvmlDeviceGetHandleByIndex(1)
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 0)
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 1)) == uuids[1]
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetHandleByUUID(uuids[0])


def test_agent_reads_the_simulated_gpus(library):
    """GPUs and MIG devices, programs, faults and the driver, as the broker parses them."""
    uuids = split_card(library)
    write_load(library, 0, memory_used_mib=300, processes=((41, 280),), fault=gpu_state.GpuFault.ECC)
    write_load(
        library, 1, mig_devices=(gpu_state.MigLoad(memory_used_mib=900, processes=((42, 800),)), gpu_state.MigLoad())
    )
    reading = agent_container.parse_agent_line(json.dumps({"n": 1, "boot_id": "b1", **agent.read_node()}).encode())
    assert reading is not None
    assert (reading.error, reading.driver) == (None, "580.95.05")
    whole_gpu, first, second = reading.gpus
    assert (whole_gpu.uuid, whole_gpu.model, whole_gpu.capability, whole_gpu.ecc_uncorrected) == (
        UUIDS[0],
        "RTX 5090",
        (12, 0),
        1,
    )
    assert [(process.pid, process.memory_mib) for process in whole_gpu.processes or ()] == [(41, 280)]
    assert [(gpu.uuid, gpu.model, gpu.memory_mib, gpu.index) for gpu in (first, second)] == [
        (uuids[0], "H200 MIG 3g.71gb", 71424, 1),
        (uuids[1], "H200 MIG 1g.18gb", 16384, 1),
    ]
    assert [(gpu.is_mig, gpu.parent, gpu.capability) for gpu in (first, second)] == [(True, UUIDS[1], (9, 0))] * 2
    assert [(process.pid, process.memory_mib) for process in first.processes or ()] == [(42, 800)]
    assert (second.processes, second.ecc_uncorrected, second.remap_failed) == ((), 0, False)


@pytest.mark.parametrize(
    ("fault", "error"),
    [("lost", "GPU is lost"), ("fallen_off_bus", "Unknown Error")],
)
def test_the_agent_reports_the_broken_gpu(library, fault, error):
    """The broken GPU has NVML's error, the other its reading."""
    write_load(library, 0, fault=gpu_state.GpuFault(fault))
    broken, well = agent.read_node()["gpus"]
    assert (broken["index"], broken["error"]) == (0, error)
    assert (well["uuid"], well["error"]) == (UUIDS[1], None)


def test_a_gpu_in_mig_mode_without_devices_is_reported(library):
    """It cannot be granted, and the page has the reason."""
    text = gpu_state.format_gpu(BIG, index=0, uuid=UUIDS[0])
    (library / "0/card").write_text(f"{text}mig_mode 1\n")
    assert agent.read_node()["gpus"][0]["error"] == "in MIG mode, without a MIG device"


def test_the_agent_continues_when_nvml_hangs(compiled, root):
    """Its lines report that NVML does not answer, and the GPUs again when it does."""
    script = agent_script().replace("PERIOD_S = 2.0", "PERIOD_S = 0.05").replace("HANG_S = 6.0", "HANG_S = 0.5")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(compiled.folder)}
    command = [sys.executable, "-u", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        lines = map(json.loads, process.stdout)
        try:
            next(line for line in lines if line["error"] is None)
            write_load(root, 0, fault=gpu_state.GpuFault.HANG)
            hung = next(line for line in lines if line["error"] is not None)
            assert (hung["error"], hung["gpus"]) == ("NVML does not answer", [])
            write_load(root, 0)
            assert len(next(line for line in lines if line["error"] is None)["gpus"]) == 2
        finally:
            process.kill()


def test_queries_of_dashboards_are_answered(library):
    """Queries of jupyterlab-nvdashboard beyond memory and utilisation are supported."""
    card = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetMaxPcieLinkGeneration(card) == 5
    assert nvml.nvmlDeviceGetMaxPcieLinkWidth(card) == 16
    assert nvml.nvmlDeviceGetPcieThroughput(card, nvml.NVML_PCIE_UTIL_TX_BYTES) == 0
    fields = nvml.nvmlDeviceGetFieldValues(card, [(nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, 0)])
    assert fields[0].nvmlReturn == nvml.NVML_ERROR_NOT_SUPPORTED


def test_smi_lists_and_queries(compiled, root):
    """nvidia-smi prints lists and tables as NVIDIA's does, with a note that it is simulated."""
    write_load(root, 1, utilisation_percent=7, memory_used_mib=512)
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
    """MIG devices are listed below their GPU, as NVIDIA's program does."""
    uuids = split_card(root)
    assert run_smi(compiled, "-L").stdout.splitlines()[1:] == [
        f"GPU 1: NVIDIA H200 (UUID: {UUIDS[1]})",
        f"  MIG 3g.71gb     Device  0: (UUID: {uuids[0]})",
        f"  MIG 1g.18gb     Device  1: (UUID: {uuids[1]})",
    ]


def test_exit_statuses_of_smi(compiled, root):
    """Unknown options and fields, a lost GPU and a missing GPU have NVIDIA's exit statuses."""
    assert run_smi(compiled, "--nonsense").returncode == 2
    assert run_smi(compiled, "--query-gpu=nonsense").returncode == 2
    assert run_smi(compiled, "--id=GPU-none", "-L").returncode == 6
    write_load(root, 0, fault=gpu_state.GpuFault.LOST)
    lost = run_smi(compiled)
    assert (lost.returncode, "GPU is lost" in lost.stdout) == (15, True)


def test_library_needs_no_new_c_library(compiled):
    """Images older than this machine can load it: it binds to nothing newer than glibc 2.17."""
    listing = subprocess.run(["objdump", "-T", compiled.library], check=True, capture_output=True, text=True).stdout
    versions = {word.strip("()").removeprefix("GLIBC_") for word in listing.split() if "GLIBC_" in word}
    assert versions
    assert max(tuple(map(int, version.split("."))) for version in versions) <= (2, 17)


def test_xid_errors_are_counted_by_code(library: Path) -> None:
    """Those from before the agent's start are not; a GPU that is lost by an error keeps its count."""
    write_load(library, 0, xid=13, xid_count=1)
    counter, node = agent.XidCounter(), agent.read_node()
    counter.add_to(node)
    assert node["xids"] == {UUIDS[0]: [], UUIDS[1]: []}
    write_load(library, 0, xid=31, xid_count=3)
    counter.add_to(node)
    write_load(library, 0, xid=79, xid_count=4, fault=gpu_state.GpuFault.LOST)
    lost = agent.read_node()
    counter.add_to(lost)
    assert [(error["code"], error["count"]) for error in lost["xids"][UUIDS[0]]] == [(31, 2), (79, 1)]
    assert lost["xids"][UUIDS[1]] == []
    failed = agent.build_failure("NVML: Driver/library version mismatch")
    counter.add_to(failed)
    assert "xids" not in failed
    write_load(library, 0, xid=79, xid_count=4)
    counter.add_to(node)
    assert [(error["code"], error["count"]) for error in node["xids"][UUIDS[0]]] == [(31, 2), (79, 1)]


def test_link_under_load_and_rows_that_wait(library: Path) -> None:
    """As the agent judges them: the link by readings under load, the row by its own flag."""
    history = agent.GpuHistory()
    write_load(library, 0, utilisation_percent=90, link_width=8)
    for _ in range(agent.LINK_READINGS):
        node = agent.read_node()
        history.add_to(node)
    assert [gpu["loaded_link"] for gpu in node["gpus"]] == [[5, 8], None]
    assert node["gpus"][0]["pcie"] == {"generation": 5, "width": 8, "most_generation": 5, "most_width": 16}
    write_load(library, 0, fault=gpu_state.GpuFault.REMAP_PENDING)
    assert [gpu["remap_pending"] for gpu in agent.read_node()["gpus"]] == [True, None]


def test_energy_only_grows(library: Path) -> None:
    """By the power between two calls, in millijoules."""
    write_load(library, 0, utilisation_percent=100)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    readings = [nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for _ in range(1000)]
    assert readings == sorted(readings)
    assert readings[-1] > readings[0]


def test_reasons_for_low_clocks_are_those_that_were_set(library: Path) -> None:
    write_load(library, 0, utilisation_percent=50, clocks_event_reasons=0x40)
    assert [gpu["clocks_event_reasons"] for gpu in agent.read_node()["gpus"]] == [0x40, 1]
