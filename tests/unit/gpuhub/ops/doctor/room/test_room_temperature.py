"""When the doctor says that the room, and not single GPUs, becomes warmer."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from gpuhub.common.errors import NodeUnreachable, NotFound
from gpuhub.docker.client import DockerClients
from gpuhub.ops.doctor.findings import Severity
from gpuhub.ops.doctor.nodes import node_queries
from gpuhub.ops.doctor.room.room_temperature import PastReading, check_temperature, find_rise, parse_agent_log
from tests.support.nvml.replay import IDLE, load

#: What the GPU agent printed on a machine with two H200, idle at 33 and 30 °C with 79 W each.
RECORDED = load(IDLE)["read_node"]
BEGAN = datetime(2026, 11, 23, 15, 0, 0, 123456, tzinfo=UTC)
MINUTES = 20
#: Value of a GPU at a minute from the beginning.
Course = Callable[[float], float]


def stay(_minute: float) -> float:
    return 0.0


def warm(minute: float) -> float:
    """By half a degree a minute."""
    return minute / 2


def build_log(
    warmth: Course = stay,
    more_power: Course = stay,
    *,
    only: int | None = None,
    minutes: float = MINUTES,
    **changes: object,
) -> bytes:
    """Return Docker's log of an agent: a line every 5 s with what is added to the recorded values.

    Args:
        only: NVML's index of the one GPU to change; None for all.
        changes: Other values of every GPU.
    """
    lines = []
    for n in range(round(minutes * 12)):
        minute = n / 12
        gpus: list[dict[str, Any]] = [{**gpu, **changes} for gpu in RECORDED["gpus"]]
        for gpu in gpus:
            if only in {None, gpu["index"]} and gpu["power_w"] is not None:
                gpu["temperature_c"] += round(warmth(minute))
                gpu["power_w"] += more_power(minute)
        stamp = f"{(BEGAN + timedelta(minutes=minute)).isoformat()[:26]}789Z"
        lines.append(f"{stamp} {json.dumps({'n': n, 'boot_id': None, **RECORDED, 'gpus': gpus})}\n")
    return "".join(lines).encode()


def read(**options: Any) -> list[PastReading]:
    return parse_agent_log(build_log(**options))


def test_room_is_named_when_gpus_of_two_nodes_become_warmer() -> None:
    """It is one finding, not one for each GPU; a third node with a GPU that stays cool does not hide it."""
    histories = {"rig1": read(warmth=warm), "rig2": read(warmth=lambda minute: 0.4 * minute), "rig3": read()}
    [finding] = check_temperature(histories)
    assert (finding.check, finding.severity) == ("temperature", Severity.WARNING)
    assert finding.value == (
        "the room becomes warmer: within 10 minutes and with the same load, GPUs became warmer on "
        "rig1 (by 5 °C), rig2 (by 4 °C)"
    )
    assert finding.advice.startswith("check its cooling")


def test_no_room_is_blamed_for_one_node_or_a_minority() -> None:
    hot, cool = read(warmth=warm), read()
    for histories in (
        {"rig1": hot, "rig2": cool},
        {"rig1": hot, "rig2": hot, "rig3": cool, "rig4": cool, "rig5": cool},
        {"rig1": cool, "rig2": cool},
    ):
        [finding] = check_temperature(histories)
        assert (finding.check, finding.severity) == ("temperature", Severity.OK)
    assert list(check_temperature({"rig1": hot})) == []
    assert list(check_temperature({"rig1": hot, "rig2": []})) == []


def test_load_that_changes_explains_warmth() -> None:
    """Also when it changed before the temperatures that are compared; little changes of power do not count."""
    busy: dict[str, Course] = {
        "begins": lambda minute: 400.0 * (minute > 12),
        "ends": lambda minute: 400.0 * (minute < 12),
        "began early": lambda minute: 400.0 * (minute > 4),
    }
    for more_power in busy.values():
        assert find_rise(read(warmth=warm, more_power=more_power)) is None
    assert find_rise(read(warmth=warm, more_power=lambda minute: minute / 2)) == pytest.approx(5, abs=1)
    assert list(check_temperature(dict.fromkeys(("rig1", "rig2"), read(warmth=warm, more_power=busy["begins"])))) == []


def test_rise_is_that_of_the_gpus_between() -> None:
    """The median: of two GPUs, one that warms by 5 °C gives half. Going up and down is none."""
    assert find_rise(read(warmth=warm)) == pytest.approx(5, abs=1)
    assert find_rise(read(warmth=warm, only=0)) == pytest.approx(2.5, abs=1)
    assert find_rise(read(warmth=lambda minute: 10.0 * (10 < minute < 15) + 4.0 * (minute > 15))) == 0
    assert find_rise(read(warmth=lambda minute: -minute)) == 0


@pytest.mark.parametrize(
    "options", [{"minutes": 15}, {"minutes": 0}, {"power_w": None}, {"temperature_c": None, "power_w": None}]
)
def test_rise_is_unknown_without_a_long_history(options: dict[str, Any]) -> None:
    """Or without sensors."""
    assert find_rise(read(warmth=warm, **options)) is None


def test_lines_that_are_cut_off_or_have_errors_are_left_out() -> None:
    whole = build_log(minutes=1)
    failing = {"n": 1, "boot_id": None, "driver": None, "error": "NVML does not answer", "gpus": []}
    log = whole[:-9] + b"\nnot a time {}\n2026-11-23T15:00:00Z " + json.dumps(failing).encode() + b"\n"
    readings = parse_agent_log(log + whole.replace(b"2026-11", b"when"))
    assert len(readings) == 11
    assert readings[0].at == BEGAN.timestamp()
    assert readings[1].at - readings[0].at == pytest.approx(5)


class LoggedNode:
    """A daemon that has the log of an agent, or refuses to give it."""

    instance = "ghtest"

    def __init__(self, answer: bytes | Exception) -> None:
        self._answer = answer

    async def call(self, _node: str, method: str, container: str, **options: object) -> bytes:
        assert (method, container, options["timestamps"], options["stderr"]) == ("logs", "ghtest-agent", True, False)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


async def test_history_is_read_from_dockers_log() -> None:
    """A node without an agent, or without an answer, has none."""
    history = await node_queries.read_agent_history(cast("DockerClients", LoggedNode(build_log(minutes=2))), "rig1")
    assert len(history) == 24
    for error in (NotFound("no such container"), NodeUnreachable("node rig1: silent")):
        assert await node_queries.read_agent_history(cast("DockerClients", LoggedNode(error)), "rig1") == []
