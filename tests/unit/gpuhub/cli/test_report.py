"""The table and the CSV of `gpuhub report`."""

from __future__ import annotations

from gpuhub.broker_api.schemas import ReportDimension, ReportRow, ReportView
from gpuhub.cli.report import format_csv, format_report

ADA = ReportRow(
    key="ada", gpu_hours=12.25, busy_percent=31.4, peak_memory_mib=9216, energy_kwh=0.42, is_energy_estimated=False,
    cost=5.5, currency="EUR",
)  # fmt: skip
BEN = ReportRow(
    key="=ben", gpu_hours=0.0, busy_percent=None, peak_memory_mib=None, energy_kwh=None, is_energy_estimated=False,
    cost=None, currency="", accounted_gpu_hours=4.5,
)  # fmt: skip


def build_view(*rows: ReportRow, by: ReportDimension = ReportDimension.USER) -> ReportView:
    return ReportView(by=by, since="2026-11-01", until="2026-11-28", owner=None, rows=rows, total=rows[:1])


def test_table_has_the_columns_that_have_values() -> None:
    """Money and the other scheduler's hours are shown where there are any; unknown values as a dash."""
    shown = format_report(build_view(ADA, BEN), None).splitlines()
    assert shown[1].split() == ["USER", "GPU-HOURS", "BY", "SLURM", "USE", "PEAK", "MEMORY", "ENERGY", "COST"]
    assert shown[2].split() == ["ada", "12.2", "–", "31", "%", "9.0", "GB", "0.42", "kWh", "5.50", "EUR"]
    assert shown[3].split() == ["=ben", "0.0", "4.5", "–", "–", "–", "–"]
    free = ADA.model_copy(update={"cost": None, "currency": "", "is_energy_estimated": True})
    shown = format_report(build_view(free, by=ReportDimension.GROUP), 80).splitlines()
    assert shown[1].split()[-1] == "ENERGY"
    assert "~0.42 kWh" in shown[2]
    assert shown[-2:] == [
        "A user in several groups counts in each of them.",
        "~: partly estimated, since not every GPU counts its energy, or it was shared.",
    ]


def test_csv_has_no_formulas() -> None:
    """A name that a spreadsheet would compute is text, and unknown values are empty."""
    header, ada, ben = format_csv(build_view(ADA, BEN)).splitlines()
    assert header == (
        "user,gpu_hours,busy_percent,peak_memory_mib,energy_kwh,is_energy_estimated,cost,currency,accounted_gpu_hours"
    )
    assert ada == "ada,12.25,31.4,9216,0.42,False,5.5,EUR,"
    assert ben == "'=ben,0.0,,,,False,,,4.5"
