"""The guard: what runs in one container on each node, with Python's standard library and `nft` alone.

`keep TABLE RULES` applies the rules (text for `nft -f`) and then looks every two seconds whether the kernel still has
the table as it was made: a firewall that is loaded anew may flush everything. On every change it prints one line of
JSON, `{"state": "ok", "why": "applied"}`: state is `starting`, `ok` or `failed`. When it is stopped the table stays:
without the guard nobody mends it, and nothing opens. `remove TABLE RULES` applies the rules, which take the table away,
and ends.
Its caller passes this file's text to `python3 -c`: it imports nothing of gpuhub.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

PERIOD_S = 2.0
#: So many looks may pass without a line.
SILENT_LOOKS = 2
#: nft waits for others that change the tables.
NFT_S = 15.0
#: Containers on one bridge are kept apart by the packet filter only where bridged packets pass it.
BRIDGED = "/proc/sys/net/bridge/bridge-nf-call-iptables"


class Failed(Exception):
    """The rules are not in place; the text says why."""


def nft(arguments: list[str], text: str = "") -> str:
    """What nft prints."""
    try:
        done = subprocess.run(
            ["nft", *arguments], input=text, capture_output=True, text=True, check=False, timeout=NFT_S
        )
    except FileNotFoundError:
        raise Failed("the image has no nft: it is older than this version") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"nft does not end within {NFT_S:.0f} s") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise Failed(f"nft: {reason[0]}")
    return done.stdout


def apply(rules: str) -> None:
    """Replace the table in one step."""
    nft(["-f", "-"], rules)


def show(table: str) -> str | None:
    """The table as the kernel has it, without counts; None when it is not there."""
    try:
        return nft(["--stateless", "list", "table", "inet", table])
    except Failed as failed:
        if "No such file" in str(failed):
            return None
        raise


def check_bridges(path: str = BRIDGED) -> None:
    """Refuse a node where packets between containers on one bridge pass no filter."""
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123  importing pathlib costs more than it brings
            value = file.read().strip()
    except OSError:
        value = "missing"
    if value != "1":
        raise Failed(
            f"net.bridge.bridge-nf-call-iptables is {value}, so containers on a bridge reach each other: "
            "`modprobe br_netfilter` and `sysctl -w net.bridge.bridge-nf-call-iptables=1` there"
        )


def say(state: str, why: str) -> None:
    """Print a line."""
    sys.stdout.write(json.dumps({"state": state, "why": why}) + "\n")
    sys.stdout.flush()


class Keeper:
    """Keeps one table as its rules make it."""

    def __init__(self, table: str, rules: str) -> None:
        self._table = table
        self._rules = rules
        #: As the kernel had it right after it was made.
        self._made: str | None = None
        self._said: tuple[str, str] | None = None
        self._silent = 0

    def look(self) -> None:
        """Mend what is not as it should be, and say what is new."""
        try:
            news = self._mend()
            check_bridges()
        except Failed as failed:
            self._say("failed", str(failed))
            return
        self._say("ok", news or "as it should be")

    def _mend(self) -> str:
        shown = None if self._made is None else show(self._table)
        if self._made is not None and shown == self._made:
            return ""
        news = "applied"
        if self._made is not None:
            news = f"applied again: the table was {'gone' if shown is None else 'changed'}"
        apply(self._rules)
        self._made = show(self._table)
        if self._made is None:
            raise Failed("the table was gone as soon as it was made")
        return news

    def _say(self, state: str, why: str) -> None:
        """What is new at once; else now and then: a busy daemon takes a first line for one from before the start."""
        is_news = self._said is None or state != self._said[0] or (state == "failed" and why != self._said[1])
        if is_news or why.startswith("applied") or self._silent >= SILENT_LOOKS:
            say(state, why)
            self._silent = 0
        else:
            self._silent += 1
        self._said = state, why


def main(arguments: list[str]) -> int:
    """Keep the table until the container is stopped, or remove it."""
    action, table, rules = arguments
    if action == "remove":
        try:
            apply(rules)
        except Failed as failed:
            say("failed", str(failed))
            return 1
        return 0
    say("starting", "")
    keeper = Keeper(table, rules)
    while True:
        keeper.look()
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
