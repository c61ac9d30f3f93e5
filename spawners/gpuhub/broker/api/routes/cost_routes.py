"""HTTP routes of costs: what jobs and notebooks used, and reports."""

from __future__ import annotations

from datetime import date
from typing import Annotated, cast

from fastapi import Depends, Query, Request, Response

from gpuhub.broker.api.dependencies import Caller, Lists, Owner, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.operations.costs import CostOperations
from gpuhub.broker_api.schemas import CostView, ReportDimension, ReportView

#: Maximum number of records of one answer.
MAX_RECORDS = 200


async def get_cost_operations(request: Request) -> CostOperations:
    """Return the app's operations on costs."""
    return cast("CostOperations", request.app.state.costs)


Operations = Annotated[CostOperations, Depends(get_cost_operations)]
Limit = Annotated[int, Query(ge=1, le=MAX_RECORDS, description="Maximum number of records")]
By = Annotated[ReportDimension, Query(description="What the rows are for")]
Since = Annotated[date | None, Query(description="First day (UTC); default: four weeks before the last one")]
Until = Annotated[date | None, Query(description="Last day (UTC); default: today")]

api = create_router("costs")


@api.get("/costs", response_model=list[CostView], responses=document_problems(422, 429))
async def get_costs(
    caller: Caller, costs: Operations, lists: Lists, owner: Owner = None, limit: Limit = 20
) -> Response:
    """Return what running jobs and notebooks have used, then those that ended last; the caller's, or all for an admin.

    Records of ended ones are kept as long as ended leases.
    """
    return await lists.render(caller, await costs.list_recent(caller, owner, limit))


@api.get("/costs/report", responses=document_problems(422))
async def get_report(
    caller: Caller,
    costs: Operations,
    *,
    by: By = ReportDimension.USER,
    since: Since = None,
    until: Until = None,
    owner: Owner = None,
) -> ReportView:
    """Return sums by user, group, profile, model, week or day: the caller's own, or all for an administrator."""
    return await costs.report(caller, by, since, until, owner)
