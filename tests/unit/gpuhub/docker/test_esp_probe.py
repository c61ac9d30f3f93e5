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

#: Linux 6.18 without CRYPTO_GCM: what the script prints there.
NO_GCM = "Requested AEAD algorithm not found (Function not implemented)"
#: `ip xfrm state add` of iproute2 6.1 for the same association, behind the header of the message.
IPROUTE = bytes.fromhex(
    "00" * 56 + "c0000202" + "00" * 12 + "00000100" + "32000000" + "c0000201" + "00" * 12 + "ff" * 32 + "00" * 80
    + "01000000" + "02000000" + "00" * 8 + "60001200" + b"rfc4106(gcm(aes))".hex() + "00" * 47
    + "a0000000" + "40000000" + bytes(range(20)).hex()
)  # fmt: skip


def acknowledge(number: int, text: str = "") -> bytes:
    """Build an answer in the kernel's form."""
    words = text.encode() + bytes(1)
    attribute = struct.pack("=HH", 4 + len(words), 1) + words + bytes(-len(words) % 4) if text else b""
    return struct.pack("=IHHIIi", 36 + len(attribute), 2, 0, 1, 0, number) + bytes(16) + attribute


def test_request_is_the_one_of_iproute2() -> None:
    request = esp_script.build_request()
    assert struct.unpack_from("=IH", request) == (len(request), 0x10)
    assert request[16:] == IPROUTE


@pytest.mark.parametrize(
    ("answer", "line", "error"),
    [
        (acknowledge(0), "ok", None),
        (
            acknowledge(-38, "Requested AEAD algorithm not found"),
            f"error: {NO_GCM}",
            f"its kernel cannot encrypt: {NO_GCM}",
        ),
        (acknowledge(-93), "error: Protocol not supported", "its kernel cannot encrypt: Protocol not supported"),
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
