"""The guard's own program, with a kernel in memory in the place of nft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuhub.firewall import script
from gpuhub.firewall.script import FirewallFailed, TableKeeper


class FakeKernel:
    """Tables by name, as `nft` would list them."""

    def __init__(self) -> None:
        self.tables: dict[str, str] = {}
        self.applied = 0
        self.trouble = ""
        self.rejected = 3
        self.has_data_table = False

    def nft(self, arguments: list[str], text: str = "") -> str:
        if self.trouble:
            raise FirewallFailed(f"nft: {self.trouble}")
        if arguments == ["-f", "-"]:
            self.tables["t"] = f"listed {text}"
            self.has_data_table |= "table netdev t" in text
            self.applied += 1
            return ""
        if arguments == ["list", "tables"]:
            return "table inet t\n" + "table netdev t\n" * self.has_data_table
        if arguments == ["delete", "table", "netdev", "t"]:
            self.has_data_table = False
            return ""
        if arguments[-3:] == ["table", "netdev", "t"]:
            if not self.has_data_table:
                raise FirewallFailed("nft: Error: No such file or directory")
            return "data" if "--stateless" in arguments else "data\ncounter packets 4 bytes 1 drop"
        assert arguments[-5:] == ["--terse", "list", "table", "inet", "t"]
        if "t" not in self.tables:
            raise FirewallFailed("nft: Error: No such file or directory")
        # As nft 1.0.6 lists counters of rules, which differ in every list.
        counters = f"counter packets {self.rejected} bytes 180 drop\ncounter packets 2 bytes 120 reject"
        return self.tables["t"] if "--stateless" in arguments else f"{self.tables['t']}\n{counters}"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel()
    monkeypatch.setattr(script, "run_nft", kernel.nft)
    monkeypatch.setattr(script, "check_bridges", lambda: None)
    return kernel


def read_status_lines(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(line["state"], line["why"]) for line in lines]


def test_table_is_created_once_and_repaired_after_changes(
    kernel: FakeKernel, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each change, and none while nothing happens."""
    keeper = TableKeeper("t", "rules")
    keeper.check_once()
    keeper.check_once()
    assert (kernel.applied, read_status_lines(capsys)) == (1, [("ok", "applied")])
    for change, told in (({}, "gone"), ({"t": "listed something else"}, "changed"), ({}, "gone")):
        kernel.tables = dict(change)
        keeper.check_once()
        keeper.check_once()
        assert read_status_lines(capsys) == [("ok", f"applied again: the table was {told}")]
        assert kernel.tables == {"t": "listed rules"}


def test_unchanged_state_is_reported_periodically(kernel: FakeKernel, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line may count as one from before the container's start."""
    keeper = TableKeeper("t", "rules")
    for _ in range(2 * (script.MAX_UNREPORTED + 1) + 1):
        keeper.check_once()
    assert read_status_lines(capsys) == [("ok", "applied"), *[("ok", "unchanged")] * 2]


def test_refused_packets_are_counted(kernel: FakeKernel, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of all rules together; a number that grows is no change of the table."""
    keeper = TableKeeper("t", "rules")
    keeper.check_once()
    for kernel.rejected in range(40, 40 + script.MAX_UNREPORTED + 1):
        keeper.check_once()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["why"], line["rejected"]) for line in lines] == [("applied", 5), ("unchanged", 44)]
    kernel.trouble = "Operation not permitted"
    assert script.count_rejected("t") is None


def test_existing_table_is_replaced_at_startup(kernel: FakeKernel) -> None:
    """A table that an earlier guard left may be of other rules."""
    kernel.tables["t"] = "listed old"
    TableKeeper("t", "rules").check_once()
    assert kernel.tables["t"] == "listed rules"


def test_failure_is_reported_once_and_retried(kernel: FakeKernel, capsys: pytest.CaptureFixture[str]) -> None:
    """With nft's own words, until it goes well."""
    keeper = TableKeeper("t", "rules")
    kernel.trouble = "Operation not permitted"
    keeper.check_once()
    keeper.check_once()
    assert read_status_lines(capsys) == [("failed", "nft: Operation not permitted")]
    kernel.trouble = ""
    keeper.check_once()
    assert read_status_lines(capsys) == [("ok", "applied")]


def test_bridges_that_bypass_the_filter_are_a_failure(
    kernel: FakeKernel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rules are applied all the same."""
    switch = tmp_path / "bridge-nf-call-iptables"
    monkeypatch.undo()
    with pytest.raises(FirewallFailed, match="is missing, so containers on a bridge reach each other: `modprobe"):
        script.check_bridges(str(switch))
    switch.write_text("0\n", encoding="ascii")
    with pytest.raises(FirewallFailed, match="is 0"):
        script.check_bridges(str(switch))
    switch.write_text("1\n", encoding="ascii")
    script.check_bridges(str(switch))

    def fail() -> None:
        raise FirewallFailed("bridged")

    monkeypatch.setattr(script, "run_nft", kernel.nft)
    monkeypatch.setattr(script, "check_bridges", fail)
    keeper = TableKeeper("t", "rules")
    keeper.check_once()
    assert (kernel.applied, read_status_lines(capsys)) == (1, [("failed", "bridged")])
    monkeypatch.setattr(script, "check_bridges", lambda: None)
    keeper.check_once()
    assert read_status_lines(capsys) == [("ok", "unchanged")]


def test_table_of_an_interface_is_kept_and_removed(kernel: FakeKernel, capsys: pytest.CaptureFixture[str]) -> None:
    """Rules without it, and the removal of all, remove it as well."""
    keeper = TableKeeper("t", "table netdev t {}")
    keeper.check_once()
    assert [json.loads(line)["rejected"] for line in capsys.readouterr().out.splitlines()] == [9]
    kernel.has_data_table = False
    keeper.check_once()
    assert kernel.has_data_table
    assert read_status_lines(capsys) == [("ok", "applied again: the table was gone")]
    TableKeeper("t", "table inet t {}").check_once()
    assert not kernel.has_data_table
    kernel.has_data_table = True
    assert script.main(["remove", "t", "away"]) == 0
    assert not kernel.has_data_table


@pytest.mark.process
def test_missing_interface_is_named() -> None:
    """The kernel's own message names none."""
    with pytest.raises(FirewallFailed, match="no network interface enp9s0: correct data_interface"):
        script.apply_rules('hook egress device "enp9s0" priority filter')


def test_removal_exits_with_its_status(kernel: FakeKernel, capsys: pytest.CaptureFixture[str]) -> None:
    """The remover's exit status is read."""
    assert script.main(["remove", "t", "away"]) == 0
    assert kernel.tables == {"t": "listed away"}
    kernel.trouble = "Operation not permitted"
    assert script.main(["remove", "t", "away"]) == 1
    assert read_status_lines(capsys) == [("failed", "nft: Operation not permitted")]


@pytest.mark.process
def test_image_without_nft_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As every image before this version."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FirewallFailed, match="the image has no nft"):
        script.apply_rules("")


@pytest.mark.process
def test_error_contains_the_message_of_nft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error has nft's first line or its exit status."""
    program = tmp_path / "nft"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program.write_text("#!/bin/sh\necho 'Error: syntax error' >&2\necho more >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(FirewallFailed, match=r"^nft: Error: syntax error$"):
        script.apply_rules("x")
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(FirewallFailed, match=r"^nft: exit status 3$"):
        script.read_table("t")
