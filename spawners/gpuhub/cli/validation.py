"""`gpuhub validate`: checks of a running cluster by jobs of a user, with a report to keep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.deployment import load_settings
from gpuhub.cli.options import BrokerRunner, cluster_file_option, instance_option, pass_broker
from gpuhub.common.errors import GpuhubError, InvalidRequest
from gpuhub.common.paths import Paths

if TYPE_CHECKING:
    from gpuhub.ops.validation.report import Report

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("validate", short_help="Check a running cluster with jobs on every node and GPU.")
@instance_option
@cluster_file_option
@click.option("--user", metavar="NAME", help="Whose jobs run; default: the first of [users] allowed.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write the report as JSON, for --compare.")
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write the report as one page of HTML.")
@click.option("--compare", type=_FILE, metavar="OLD.json", help="Show what got worse since an earlier report.")
@pass_broker
def validate(
    broker: BrokerRunner,
    paths: Paths,
    cluster_file: Path,
    *,
    user: str | None,
    json_file: Path | None,
    html_file: Path | None,
    compare: Path | None,
) -> None:
    """Check a running cluster with jobs of a user: each GPU alone, all at once, the network, and torch over all nodes.

    It needs all GPUs, and takes some minutes. The exit status is 1 if a check failed.
    """
    from gpuhub.ops.console import StepReport
    from gpuhub.ops.validation.plan import choose_user
    from gpuhub.ops.validation.report import load_report
    from gpuhub.ops.validation.validation import validate_cluster

    before = None if compare is None else load_report(compare)
    for file in (json_file, html_file):
        _check_parent(file)

    async def run(administrator: AsyncBrokerClient, console: AdminConsole) -> None:
        cluster = load_settings(cluster_file, paths)
        report = await validate_cluster(
            cluster,
            paths,
            choose_user(cluster.users, user),
            StepReport(),
            administrator=administrator,
        )
        publish_report(report, before, console, json_file=json_file, html_file=html_file)
        if report.has_failed:
            raise GpuhubError("checks failed")

    broker.run("validate", paths, run)


def publish_report(
    report: Report, before: Report | None, console: AdminConsole, *, json_file: Path | None, html_file: Path | None
) -> None:
    """Write the report to the terminal and to the files, with its comparison with an earlier one."""
    from gpuhub.ops.validation.comparison import compare_reports, format_comparison
    from gpuhub.ops.validation.html import render_report
    from gpuhub.ops.validation.report import format_report

    comparison = "" if before is None else format_comparison(compare_reports(report, before), before)
    console.write()
    console.write(format_report(report, console.width))
    if comparison:
        console.write(f"\n{comparison}")
    if json_file is not None:
        json_file.write_text(f"{report.model_dump_json(indent=2)}\n", encoding="utf-8")
    if html_file is not None:
        html_file.write_text(render_report(report, comparison), encoding="utf-8")


def _check_parent(file: Path | None) -> None:
    """Check that a file can be written, before minutes of work.

    Raises:
        InvalidRequest: Its folder does not exist.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise InvalidRequest(f"{file}: there is no folder {file.absolute().parent}")
