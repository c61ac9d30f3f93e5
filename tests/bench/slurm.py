"""Slurm as the backend, compared with the builtin scheduler and with plain commands, on the same practice closet.

- `slurm.click_to_lab_over_builtin`: from the click on Start to JupyterLab, with each backend in turn.
- `slurm.submit_over_sbatch`: from requesting a worker with a GPU at the broker to the start of its container, over
  the same from `sbatch` of a script with `srun docker run`. Both get the same GPU and image; Docker's daemon reports
  when each container starts. gpuhub's additional work is included: the user's home, network and identity, and the check
  that the job still runs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import docker
import httpx

from gpuhub.common import names
from gpuhub_closet.layouts import build_plan
from gpuhub_closet.paths import node_paths
from gpuhub_closet.slurm.slurm_setup import build_slurm_config
from tests.bench.product import Product, paired_ratio, print_progress, running
from tests.bench.spawn import click_to_lab, log_in
from tests.support.browser.chromium import WHOLE, chromium
from tests.support.hub.users import Client
from tests.support.hub.users import log_in as log_in_for_api
from tests.support.product import wait_for

#: Turns of both backends, and clicks in each after the first one.
ROUNDS = 3
CLICKS = 3
#: Submissions of each kind after the first ones.
PAIRS = 10
NODE = "rig1"
MODEL = "RTX 5090"
TYPE = "rtx5090"
_LABEL = "gpuhub-bench"


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `slurm`; smaller is better."""
    yield from _measure_clicks()
    yield from _measure_submissions()


# -- from the click ---------------------------------------------------------------------------------------------------


def _measure_clicks() -> Iterator[tuple[str, float, str]]:
    seconds: dict[str, list[float]] = {"builtin": [], "slurm": []}
    for _ in range(ROUNDS):
        for engine in seconds:
            seconds[engine] += _click(engine)
    yield "slurm.click_to_lab", statistics.median(seconds["slurm"]), "s"
    yield "slurm.click_to_lab_builtin", statistics.median(seconds["builtin"]), "s"
    yield "slurm.click_to_lab_over_builtin", paired_ratio(seconds["slurm"], seconds["builtin"]), "ratio"


def _click(engine: str) -> list[float]:
    with running(engine) as product, chromium(WHOLE) as browser:
        page = log_in(browser, product.address, "ada", product.password)
        times = [click_to_lab(page, product.address) for _ in range(CLICKS + 1)]
    print_progress(
        f"click to Lab, {engine}: {', '.join(f'{seconds:.2f}' for seconds in times)} s (the first is a warm-up)"
    )
    return times[1:]


# -- from the submission ----------------------------------------------------------------------------------------------


@dataclass
class Starts:
    """Start times of one Docker daemon's containers."""

    #: By each `LABEL=VALUE` of the container.
    at: dict[str, float] = field(default_factory=dict)

    def wait(self, label: str) -> float:
        """Return when the first container with that label started, by the monotonic clock."""
        return wait_for(lambda: self.at.get(label), f"a container with {label} starts", 60, every_s=0.05)


@contextmanager
def _watch_starts(url: str) -> Iterator[Starts]:
    starts = Starts()
    with closing(docker.APIClient(base_url=url, version="auto")) as client:
        stream = client.events(decode=True, filters={"type": "container", "event": "start"})

        def read() -> None:
            for event in stream:
                now = time.monotonic()
                for name, value in event["Actor"]["Attributes"].items():
                    starts.at.setdefault(f"{name}={value}", now)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield starts
        finally:
            stream.close()
            reader.join()


def _measure_submissions() -> Iterator[tuple[str, float, str]]:
    with running("slurm") as product, _watch_starts(node_paths(product.paths, NODE).docker_url) as starts:
        client = log_in_for_api(product.address, "ada", product.password)
        pairs = []
        for number in range(PAIRS + 1):
            pair = (_ask_broker(product, client, starts), _ask_slurm(product, starts))
            note = " (warm-up)" if not number else ""
            print_progress(f"submission to container: gpuhub {pair[0]:.2f} s, sbatch {pair[1]:.2f} s{note}")
            pairs.append(pair)
        client.close()
    ours, theirs = zip(*pairs[1:], strict=True)
    yield "slurm.submit", statistics.median(ours), "s"
    yield "slurm.submit_sbatch", statistics.median(theirs), "s"
    yield "slurm.submit_over_sbatch", paired_ratio(ours, theirs), "ratio"


def _ask_broker(product: Product, client: Client, starts: Starts) -> float:
    """Submit a job of one worker to the broker and return the seconds to its start."""
    body = {"run_id": f"run-{uuid.uuid4().hex[:10]}", "models": [MODEL]}
    began = time.monotonic()
    status, job = client.ask(client.broker, "POST", "/jobs", body)
    assert status < httpx.codes.BAD_REQUEST, job
    took_s = starts.wait(f"{names.LABEL_JOB}={job['id']}") - began
    status, answer = client.ask(client.broker, "DELETE", f"/jobs/{job['id']}")
    assert status < httpx.codes.BAD_REQUEST, answer
    _wait_idle(product)
    return took_s


def _ask_slurm(product: Product, starts: Starts) -> float:
    """Submit the same with sbatch as root, which Docker's daemon requires, with the GPU and a container's usual limits."""
    plan = build_plan(product.paths.instance)
    label, card = f"{_LABEL}={uuid.uuid4().hex}", plan.gpu_uuids(plan.node(NODE))[0]
    image = product.cluster.profile(TYPE).image
    container = f"docker run --rm --init --gpus device={card} --label {label} --network none {image} sleep 600"
    script = f"#!/bin/sh\nexport DOCKER_HOST={node_paths(product.paths, NODE).docker_url}\nexec srun {container}\n"
    began = time.monotonic()
    job = _slurm(product, "sbatch", "--parsable", f"--gres=gpu:{TYPE}:1", "-o", "/dev/null", given=script).strip()
    took_s = starts.wait(label) - began
    _slurm(product, "scancel", job)
    _wait_idle(product)
    return took_s


def _wait_idle(product: Product) -> None:
    def is_idle() -> bool:
        return _slurm(product, "sinfo", "-h", "-n", NODE, "-o", "%t").strip() == "idle"

    wait_for(is_idle, f"{NODE} is idle again", 90)


def _slurm(product: Product, *command: str, given: str = "") -> str:
    conf = build_slurm_config(build_plan(product.paths.instance), product.paths).conf
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, env=environment)
    return done.stdout
