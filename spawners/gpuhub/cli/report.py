"""`gpuhub report`: what users, groups, profiles and GPU models used, and what it cost; as a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import ReportDimension, ReportRow, ReportView
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.options import SPAN, BrokerRunner, instance_option, pass_broker
from gpuhub.cli.tables import format_table
from gpuhub.common.errors import InvalidRequest
from gpuhub.common.paths import Paths

_NONE = "–"
_DAY = click.DateTime(["%Y-%m-%d"])
#: Columns of `--csv`: the fields of a row, after that which names it.
_COLUMNS = tuple(name for name in ReportRow.model_fields if name != "key")


@click.command("report")
@instance_option
@click.option(
    "--by",
    type=click.Choice([dimension.value for dimension in ReportDimension]),
    default=ReportDimension.USER.value,
    show_default=True,
    help="What the rows are for.",
)
@click.option("--owner", help="Only what this user used.")
@click.option("--since", type=_DAY, metavar="DAY", help="First day, such as 2026-11-01 (UTC).")
@click.option("--until", type=_DAY, metavar="DAY", help="Last day; default: today.")
@click.option("--last", type=SPAN, metavar="SPAN", help="Only the last days, such as 7d or 12w; default: 4w.")
@click.option("--csv", "form", flag_value="csv", help="Write comma-separated values.")
@click.option("--json", "form", flag_value="json", help="Write JSON.")
@pass_broker
def report(
    broker: BrokerRunner,
    paths: Paths,
    *,
    by: str,
    owner: str | None,
    since: datetime | None,
    until: datetime | None,
    last: int | None,
    form: str | None,
) -> None:
    """Show what was used and what it cost: GPU-hours, mean use, peak memory, energy and money."""
    if since is not None and last is not None:
        raise InvalidRequest("--since and --last both say where the report begins: use one of them")
    if last is not None:
        # The day in which the span begins is not whole: 7d is seven days with today.
        since = (until or datetime.now(UTC)) - timedelta(days=max(0, -(-last // 86400) - 1))
    wanted = {
        name: value
        for name, value in (("since", _format_day(since)), ("until", _format_day(until)), ("owner", owner))
        if value is not None
    }

    async def run(client: AsyncBrokerClient, console: AdminConsole) -> None:
        view = await client.report(ReportDimension(by), **wanted)
        if form == "json":
            console.write(view.model_dump_json(indent=2))
        elif form == "csv":
            console.write(format_csv(view))
        else:
            console.write(format_report(view, console.width))

    broker.run("report", paths, run)


def _format_day(day: datetime | None) -> str | None:
    return None if day is None else day.date().isoformat()


def format_csv(view: ReportView) -> str:
    """Return the rows as comma-separated values with a header; without the total, which a spreadsheet computes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([view.by.value, *_COLUMNS])
    for row in view.rows:
        values = [getattr(row, name) for name in _COLUMNS]
        writer.writerow([_defuse(row.key), *("" if value is None else value for value in values)])
    return text.getvalue().rstrip("\n")


def _defuse(name: str) -> str:
    """Return a name that a spreadsheet does not take for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def format_report(view: ReportView, width: int | None) -> str:
    """Return a table with the total in the last line, and below it what its figures mean."""
    title = f"{view.since} to {view.until} (UTC)" + (f", {view.owner}" if view.owner else "")
    if not view.rows:
        return f"{title}: no GPU was used"
    rows = [*view.rows, *view.total]
    has_accounts = any(row.accounted_gpu_hours is not None for row in rows)
    has_prices = any(row.cost is not None for row in rows)
    is_estimated = any(row.is_energy_estimated for row in rows)
    header = [view.by.value.upper(), "GPU-HOURS"]
    header += ["BY SLURM"] if has_accounts else []
    header += ["USE", "PEAK MEMORY", "ENERGY", *(["COST"] if has_prices else [])]
    lines = [title, format_table(header, [_format_row(row, has_accounts, has_prices) for row in rows], width)]
    if view.by is ReportDimension.GROUP:
        lines.append("A user in several groups counts in each of them.")
    if is_estimated:
        lines.append("~: partly estimated, since not every GPU counts its energy, or it was shared.")
    return "\n".join(lines)


def _format_row(row: ReportRow, has_accounts: bool, has_prices: bool) -> list[str]:
    energy = None if row.energy_kwh is None else f"{'~' if row.is_energy_estimated else ''}{row.energy_kwh:.2f} kWh"
    cells = [row.key, f"{row.gpu_hours:.1f}"]
    if has_accounts:
        cells.append(_NONE if row.accounted_gpu_hours is None else f"{row.accounted_gpu_hours:.1f}")
    cells.append(_NONE if row.busy_percent is None else f"{row.busy_percent:.0f} %")
    cells.append(_NONE if row.peak_memory_mib is None else f"{row.peak_memory_mib / 1024:.1f} GB")
    cells.append(energy or _NONE)
    if has_prices:
        cells.append(_NONE if row.cost is None else f"{row.cost:.2f} {row.currency}")
    return cells
