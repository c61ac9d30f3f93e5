"""Check the GPU of a job: what the container sees, whose home it has, and how fast it computes.

`python single_gpu.py SECONDS [FOLDER NUMBER COUNT]`: with a folder that COUNT jobs share, each measures alone in its
turn, and then all of them measure at the same time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: Folder that the practice closet mounts into containers with a simulated GPU.
SIMULATED = Path("/usr/share/nvidia-simulated")
#: The sides of the measured matrices on a GPU and on a CPU, and of the one that is compared.
_GPU_SIZE, _CPU_SIZE, _COMPARED_SIZE = 8192, 1024, 512
#: Time before and after a measurement in turns or at once, in which a job computes too but does not count: other jobs
#: begin and end a little earlier or later, and a GPU that has waited is faster at first; seconds.
_MARGIN_S = 1.0
_WARM_UP_S = 1.0
_POLL_S = 0.05


def main(arguments: list[str]) -> None:
    """Check, measure, and write the result."""
    seconds, turn = float(arguments[0]), arguments[1:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = observe(device)
    compute = build_load(device, _GPU_SIZE if device.type == "cuda" else _CPU_SIZE)
    run_for(compute, _WARM_UP_S)
    if not turn:
        result["alone_tflops"] = measure(compute, seconds)
    else:
        folder, number, count = Path(turn[0]), int(turn[1]), int(turn[2])
        result |= measure_in_turns(compute, seconds, folder=Path.home() / folder, number=number, count=count)
    (Path(__file__).parent / "result.json").write_text(json.dumps(result))


def observe(device: torch.device) -> dict[str, Any]:
    """Return what this container sees, and how exact its matrix product is."""
    home = Path.home()
    probe = home / f".gpuhub-validate-{os.getpid()}"
    probe.write_text("")
    owner = probe.stat().st_uid
    probe.unlink()
    return {
        "node": os.environ.get("GPUHUB_NODE", ""),
        "uuids": list_gpus(),
        "uid": os.getuid(),
        "home_uid": home.stat().st_uid,
        "file_uid": owner,
        "is_simulated": SIMULATED.exists(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "deviation": compare_product(device),
    }


def list_gpus() -> list[str]:
    """Return the UUIDs of all GPUs, or of all MIG devices, that nvidia-smi shows; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    uuids = re.findall(r"\b(?:GPU|MIG)-[0-9A-Za-z/-]+", done.stdout)
    return [uuid for uuid in uuids if uuid.startswith("MIG-")] or uuids


def compare_product(device: torch.device) -> float:
    """Return the largest deviation of a product on the device from that of the CPU, relative to its largest value."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(_COMPARED_SIZE, _COMPARED_SIZE, generator=generator, dtype=torch.float64)
    right = torch.randn(_COMPARED_SIZE, _COMPARED_SIZE, generator=generator, dtype=torch.float64)
    expected = left @ right
    product = (left.float().to(device) @ right.float().to(device)).cpu().double()
    return float((product - expected).abs().max() / expected.abs().max())


def build_load(device: torch.device, size: int) -> Callable[[], float]:
    """Return a function that multiplies two matrices, waits for the result, and returns the operations in it."""
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.get_device_capability(device)[0] >= 8
        dtype = torch.bfloat16 if has_bfloat16 else torch.float16
    else:
        dtype = torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)

    def compute() -> float:
        torch.mm(left, right, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 2.0 * size**3

    return compute


def run_for(compute: Callable[[], float], seconds: float) -> tuple[float, float]:
    """Compute for a time; return the number of operations and the seconds that they took."""
    began, operations = time.perf_counter(), 0.0
    while (took := time.perf_counter() - began) < seconds or not operations:
        operations += compute()
    return operations, took


def measure(compute: Callable[[], float], seconds: float, *, margin_s: float = 0.0) -> float:
    """Return the throughput in TFLOP/s; with a margin, the load begins earlier and ends later than what counts."""
    if margin_s:
        run_for(compute, margin_s)
    operations, took = run_for(compute, seconds)
    if margin_s:
        run_for(compute, margin_s)
    return operations / took / 1e12


def measure_in_turns(
    compute: Callable[[], float], seconds: float, *, folder: Path, number: int, count: int
) -> dict[str, float]:
    """Return the throughputs of this job alone, while the others wait, and of this job beside all others."""
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder, "ready", number)
    wait_for_marks(folder, "ready", range(count))
    wait_for_marks(folder, "measured", range(number))
    alone = measure(compute, seconds, margin_s=_MARGIN_S)
    mark(folder, "measured", number)
    wait_for_marks(folder, "measured", range(count))
    return {"alone_tflops": alone, "together_tflops": measure(compute, seconds, margin_s=_MARGIN_S)}


def mark(folder: Path, what: str, number: int) -> None:
    """Let the other jobs know how far this one is."""
    (folder / f"{what}-{number}").touch()


def wait_for_marks(folder: Path, what: str, numbers: range) -> None:
    """Wait for other jobs. A listing of the folder makes an NFS client ask the server again."""
    expected = {f"{what}-{number}" for number in numbers}
    while not expected <= {entry.name for entry in folder.iterdir()}:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
