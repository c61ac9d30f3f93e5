"""Whether kernels can encrypt overlays, from recorded messages of iproute2 and Linux."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common.errors import NodeUnreachable, SetupError
from gpuhub.docker import esp_probe, esp_script
from gpuhub.docker.client import DockerClients

#: Linux 6.18 without CRYPTO_GCM and INET_ESP: what the script prints there.
NO_GCM = "Requested AEAD algorithm not found (Function not implemented)"
#: Its answers to this request, to one for an algorithm that it has, which then lacks ESP, and to one that it accepts.
GCM_ANSWER = bytes.fromhex(
    "4c0000000200000301000000b15f0000daffffff5001000010000506010000000000000027000100"
    + b"Requested AEAD algorithm not found".hex() + "0000"
)  # fmt: skip
ESP_ANSWER = bytes.fromhex(
    "44000000020000030100000014620000a3ffffff48010000100005060100000000000000" "1d000100"
    + b"Requested type not found".hex() + "00000000"
)  # fmt: skip
ACCEPTED = bytes.fromhex("240000000200000101000000bf65000000000000140000001c0005000100000000000000")
#: `ip xfrm state add` of iproute2 6.1 for the same association, behind the header of the message.
IPROUTE = bytes.fromhex(
    "00" * 56 + "c0000202" + "00" * 12 + "00000100" + "32000000" + "c0000201" + "00" * 12 + "ff" * 32 + "00" * 80
    + "01000000" + "02000000" + "00" * 8 + "60001200" + b"rfc4106(gcm(aes))".hex() + "00" * 47
    + "a0000000" + "40000000" + bytes(range(20)).hex()
)  # fmt: skip


def test_request_is_the_one_of_iproute2() -> None:
    request = esp_script.build_request()
    assert struct.unpack_from("=IH", request) == (len(request), 0x10)
    assert request[16:] == IPROUTE


@pytest.mark.parametrize(
    ("answer", "line", "error"),
    [
        (ACCEPTED, "ok", None),
        (GCM_ANSWER, f"error: {NO_GCM}", f"its kernel cannot encrypt: {NO_GCM}"),
        (
            ESP_ANSWER,
            "error: Requested type not found (Protocol not supported)",
            "its kernel cannot encrypt: Requested type not found (Protocol not supported)",
        ),
    ],
)
def test_kernels_answer_is_read(answer: bytes, line: str, error: str | None) -> None:
    assert esp_script.read_answer(answer) == line
    assert esp_probe.parse_answer(f"{line}\n") == error


def test_script_that_fails_is_not_taken_for_success() -> None:
    assert esp_probe.parse_answer("") == "its kernel cannot encrypt: no output"
    assert esp_probe.parse_answer("ok\nTraceback") == "its kernel cannot encrypt: Traceback"


def test_every_node_that_cannot_encrypt_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {
        "rig1": "ok\n",
        "rig2": f"error: {NO_GCM}\n",
        "rig3": NodeUnreachable("node rig3: its Docker daemon cannot be reached"),
    }

    async def run(_daemons: DockerClients, node: str, *_arguments: Any) -> str:
        answer = answers[node]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(esp_probe, "run_probe", run)
    daemons = DockerClients([], instance="gh", run_dir=tmp_path)
    asyncio.run(esp_probe.require_encryption(daemons, ["rig1"]))
    with pytest.raises(SetupError) as refusal:
        asyncio.run(esp_probe.require_encryption(daemons, list(answers)))
    assert str(refusal.value).splitlines()[1:3] == [
        f"  rig2: its kernel cannot encrypt: {NO_GCM}",
        "  rig3: its Docker daemon cannot be reached",
    ]
    assert "rig1" not in str(refusal.value)
