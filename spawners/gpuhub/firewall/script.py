"""The firewall's script, which runs in one container on each node with Python's standard library and `nft` alone.

`keep TABLE RULES` applies the rules (text for `nft -f`) and then checks every two seconds that the kernel's table is
unchanged, because another firewall that is reloaded may flush everything. On every change, and every few checks, it
prints one line of JSON, `{"state": "ok", "why": "applied", "rejected": 0}`: state is `starting`, `ok` or `failed`, and
`rejected` the number of packets that the rules have refused since they were applied; null if it cannot be read. When
the script is stopped, the table stays, but nothing restores it any more. `remove TABLE RULES` applies rules that remove
the table, and ends. Where the rules have a second table of that name, of the family netdev, it is treated alike; where
they have none, it is removed.
The caller passes this file's text to `python3 -c`, so it imports nothing of gpuhub.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

PERIOD_S = 2.0
#: Number of checks that may pass without a line of output.
MAX_UNREPORTED = 2
#: Limit for nft, which waits for other programs that change tables, seconds.
NFT_TIMEOUT_S = 15.0
#: The firewall separates containers on one bridge only if bridged packets pass through it.
BRIDGE_FILTER_SETTING = "/proc/sys/net/bridge/bridge-nf-call-iptables"


class FirewallFailed(Exception):
    """The rules are not in place; the text states the cause."""


def run_nft(arguments: list[str], text: str = "") -> str:
    """Run nft and return its output.

    Raises:
        FirewallFailed: nft is missing, failed or did not end.
    """
    try:
        done = subprocess.run(
            ["nft", *arguments], input=text, capture_output=True, text=True, check=False, timeout=NFT_TIMEOUT_S
        )
    except FileNotFoundError:
        raise FirewallFailed("the image has no nft: it is older than this version") from None
    except subprocess.TimeoutExpired:
        raise FirewallFailed(f"nft does not end within {NFT_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise FirewallFailed(f"nft: {reason[0]}")
    return done.stdout


def apply_rules(rules: str) -> None:
    """Replace the tables in one step."""
    for interface in sorted(set(re.findall(r'device "([^"]+)"', rules))):
        if not os.path.exists(f"/sys/class/net/{interface}"):  # noqa: PTH110  importing pathlib costs more
            raise FirewallFailed(f"there is no network interface {interface}: correct data_interface in cluster.toml")
    try:
        run_nft(["-f", "-"], rules)
    except FirewallFailed as failed:
        if "not supported" in str(failed) and "hook egress" in rules:
            raise FirewallFailed(f"{failed}; data_interface needs Linux 5.16 or newer there") from None
        raise


def has_data_table(table: str, rules: str) -> bool:
    """Return whether the rules have a table of an interface."""
    return f"table netdev {table}" in rules


def remove_data_table(table: str) -> None:
    """Remove the table of an interface if there is one, which older rules have left."""
    if f"table netdev {table}" in run_nft(["list", "tables"]).splitlines():
        run_nft(["delete", "table", "netdev", table])


def read_table(table: str, families: tuple[str, ...] = ("inet",)) -> str | None:
    """Return the kernel's tables without counters and the connections they count, or None if one does not exist."""
    try:
        return "".join(run_nft(["--stateless", "--terse", "list", "table", family, table]) for family in families)
    except FirewallFailed as failed:
        if "No such file" in str(failed):
            return None
        raise


def count_rejected(table: str, families: tuple[str, ...] = ("inet",)) -> int | None:
    """Return how many packets the tables' rules have refused, each of which has a counter; None if that is unknown."""
    try:
        listed = "".join(run_nft(["--terse", "list", "table", family, table]) for family in families)
    except FirewallFailed:
        return None
    return sum(int(packets) for packets in re.findall(r"counter packets ([0-9]+)", listed))


def check_bridges(path: str = BRIDGE_FILTER_SETTING) -> None:
    """Refuse a node where packets between containers on one bridge bypass the firewall."""
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123  importing pathlib costs more than it brings
            value = file.read().strip()
    except OSError:
        value = "missing"
    if value != "1":
        raise FirewallFailed(
            f"net.bridge.bridge-nf-call-iptables is {value}, so containers on a bridge reach each other: "
            "`modprobe br_netfilter` and `sysctl -w net.bridge.bridge-nf-call-iptables=1` there"
        )


def print_status(state: str, why: str, rejected: int | None = None) -> None:
    """Print one line with state, reason and the number of refused packets."""
    sys.stdout.write(json.dumps({"state": state, "why": why, "rejected": rejected}) + "\n")
    sys.stdout.flush()


class TableKeeper:
    """Restores one table whenever it differs from its rules."""

    def __init__(self, table: str, rules: str) -> None:
        self._table = table
        self._rules = rules
        self._families = ("inet", "netdev") if has_data_table(table, rules) else ("inet",)
        #: The kernel's table right after the rules were applied.
        self._expected: str | None = None
        self._last_status: tuple[str, str] | None = None
        self._unreported = 0

    def check_once(self) -> None:
        """Restore the table if it has changed, and report the state."""
        try:
            change = self._restore_table()
            check_bridges()
        except FirewallFailed as failed:
            self._report("failed", str(failed))
            return
        self._report("ok", change or "unchanged")

    def _restore_table(self) -> str:
        current = None if self._expected is None else read_table(self._table, self._families)
        if self._expected is not None and current == self._expected:
            return ""
        change = "applied"
        if self._expected is not None:
            change = f"applied again: the table was {'gone' if current is None else 'changed'}"
        apply_rules(self._rules)
        if "netdev" not in self._families:
            remove_data_table(self._table)
        self._expected = read_table(self._table, self._families)
        if self._expected is None:
            raise FirewallFailed("the table vanished as soon as it was created")
        return change

    def _report(self, state: str, why: str) -> None:
        """Print a change at once, and an unchanged state at intervals: a busy daemon may date a first line before the
        container's start.
        """
        is_change = (
            self._last_status is None
            or state != self._last_status[0]
            or (state == "failed" and why != self._last_status[1])
        )
        if is_change or why.startswith("applied") or self._unreported >= MAX_UNREPORTED:
            print_status(state, why, count_rejected(self._table, self._families))
            self._unreported = 0
        else:
            self._unreported += 1
        self._last_status = state, why


def main(arguments: list[str]) -> int:
    """Maintain the table until the container is stopped, or remove it."""
    action, table, rules = arguments
    if action == "remove":
        try:
            apply_rules(rules)
            remove_data_table(table)
        except FirewallFailed as failed:
            print_status("failed", str(failed))
            return 1
        return 0
    print_status("starting", "")
    keeper = TableKeeper(table, rules)
    while True:
        keeper.check_once()
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
