"""The routes of JupyterLab's page of recipes, below the server's own address and behind its login.

`GET gpuhub/recipes` has all recipes, `POST gpuhub/recipes/NAME` checks, predicts or starts a job, and
`GET gpuhub/recipe-runs` has the user's jobs that are recipes. A failure is `{"message": text}`.
"""

from __future__ import annotations

from typing import Any

from jupyter_server.base.handlers import APIHandler
from tornado import web

from gpu_launch.notebook_server.lab_routes import LabBackend, LabHandler, parse_body
from gpu_launch.notebook_server.recipe_runner import RecipeRequest

#: Maximum length of a request, bytes: enough for all parameters with their longest values.
_MAX_BODY_BYTES = 1024 * 1024
_MOST_GPUS = 4096
_NAME = r"([a-z][a-z0-9-]{0,39})"
CHECK, PREDICT, START = "check", "predict", "start"
_FORM = (
    'The request must be {"do": "check", "predict" or "start", "values": {NAME: TEXT, …}, "gpus": NUMBER or null, '
    '"model": TEXT, "profile": TEXT}.'
)


class RecipesHandler(LabHandler):
    """GET: `{"recipes": […], "profiles": […]}`."""

    @web.authenticated
    async def get(self) -> None:
        """Send them, or why there are none."""
        await self.send(self.backend.recipes.list_recipes())


class RecipeHandler(LabHandler):
    """POST `{"do": "start", "values": {"model": "models/tiny"}, …}`: a job of the recipe."""

    @web.authenticated
    async def post(self, name: str) -> None:
        """Send `{"text": the plan}` of a check, else `{"run_id": …}`, or what is wrong with the request."""
        body = parse_body(self.request.body, most_bytes=_MAX_BODY_BYTES)
        request = _parse_request(name, body)
        if request is None:
            self.fail(400, _FORM)
            return
        await self.send(self._answer(request, str(body["do"])))

    async def _answer(self, request: RecipeRequest, action: str) -> dict[str, str]:
        if action == CHECK:
            return {"text": await self.backend.recipes.check(request)}
        run_id = await self.backend.recipes.start(request, predicts=action == PREDICT)
        self.backend.forget_overview()
        return {"run_id": run_id}


class RecipeRunsHandler(LabHandler):
    """GET: `{"runs": […]}`, newest first."""

    @web.authenticated
    async def get(self) -> None:
        """Send them, or why there are none."""
        await self.send(self._read())

    async def _read(self) -> dict[str, Any]:
        overview = await self.backend.get_overview()
        return {"runs": await self.backend.recipes.list_runs(overview["jobs"])}


def _parse_request(name: str, body: dict[str, Any]) -> RecipeRequest | None:
    """Return what the browser asks for, None if it is not of the form."""
    values, gpus = body.get("values"), body.get("gpus")
    texts = [body.get("model", ""), body.get("profile", "")]
    if body.get("do") not in (CHECK, PREDICT, START) or not isinstance(values, dict):
        return None
    if not all(isinstance(text, str) and text.isprintable() for text in (*texts, *values, *values.values())):
        return None
    is_count = isinstance(gpus, int) and not isinstance(gpus, bool) and 1 <= gpus <= _MOST_GPUS
    if gpus is not None and not is_count:
        return None
    return RecipeRequest(recipe=name, values=values, gpus=gpus, model=texts[0], profile=texts[1])


def build_recipe_routes(base_url: str, backend: LabBackend) -> list[tuple[str, type[APIHandler], dict[str, Any]]]:
    """Return the routes below a server's base URL."""
    base, arguments = f"{base_url.rstrip('/')}/gpuhub", {"backend": backend}
    return [
        (f"{base}/recipes", RecipesHandler, arguments),
        (f"{base}/recipes/{_NAME}", RecipeHandler, arguments),
        (f"{base}/recipe-runs", RecipeRunsHandler, arguments),
    ]
