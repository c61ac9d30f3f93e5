"""Permissions as a real JupyterHub decides them: notebooks' tokens, our pages, hostile names and options."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from jupyterhub.apihandlers import default_handlers

from gpuhub.common import secrets
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy import programs
from tests.support.broker.rights import MATRIX
from tests.support.docker.simulated_nodes import wait_until

ROOT = Path(__file__).parents[3]
INSTANCE = "ghright"
PORT = 18300
HUB = f"http://127.0.0.1:{PORT}/hub"
BROKER = f"http://127.0.0.1:{PORT + 1}/services/broker"

SETTINGS = f"""
[users]
login = "password"
allowed = ["ada", "ben"]
admins = ["rita"]
uid_first = 20000
[hub]
address = "127.0.0.1"
port = {PORT}
broker_port = {PORT + 1}
api_port = {PORT + 2}
proxy_api_port = {PORT + 3}
[network]
kind = "bridge"
guard = false
[storage]
home = "/var/lib/{INSTANCE}/homes/{{username}}"
scratch = false
[[nodes]]
name = "rig1"
address = "127.0.0.1"
docker = "unix:///run/{INSTANCE}/no-docker.sock"
[[profiles]]
name = "cpu"
title = "No GPU"
gpu_count = 0
[[profiles]]
name = "rtx5090"
title = "RTX 5090"
[idle]
stop_after = "2h"
"""


@dataclass
class Head:
    """The hub, proxy and broker of one instance."""

    paths: Paths
    recorded: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    #: The texts of all responses.
    texts: list[str] = field(default_factory=list)

    def end(self) -> None:
        """Stop all programs together."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(30)

    def record(self, answer: httpx.Response) -> None:
        """Keep the text of a response."""
        self.texts.append(f"{answer.headers}\n{answer.read().decode(errors='replace')}")

    def client(self, token: str | None = None, base: str = f"{HUB}/api") -> httpx.Client:
        """Return a client of the hub, with a token or without."""
        headers = {} if token is None else {"Authorization": f"token {token}"}
        # Responses during a login contain the session's cookies and are not kept.
        hooks: Any = {"response": [self.record]}
        return httpx.Client(base_url=base, headers=headers, timeout=20, trust_env=False, event_hooks=hooks)

    def log_in(self, name: str) -> httpx.Client:
        """Log in and return a client that sends the session's XSRF token with every request."""
        kind = secrets.ADMIN_PASSWORD if name == "rita" else secrets.USER_PASSWORD
        browser = httpx.Client(base_url=HUB, timeout=20, trust_env=False)
        browser.get("/login")
        form = {"username": name, "password": secrets.read_secret(self.paths, kind), "_xsrf": browser.cookies["_xsrf"]}
        answer = browser.post("/login", data=form)
        assert answer.status_code == 302, answer.text
        browser.get("/home")
        browser.headers["X-XSRFToken"] = next(c.value or "" for c in browser.cookies.jar if c.name == "_xsrf")
        return browser

    def start_server(self, browser: httpx.Client, name: str, server: str = "") -> str:
        """Start a user's server and return its token."""
        path = f"/api/users/{name}/servers/{server}" if server else f"/api/users/{name}/server"
        answer = browser.post(path, json={"profile": "cpu"})
        assert answer.status_code in {201, 202}, answer.text
        file = self.recorded / f"{name}-{server}.json"
        wait_until(lambda: browser.get(f"/api/users/{name}").json()["servers"].get(server, {}).get("ready"), "it runs")
        return str(json.loads(file.read_text())["JUPYTERHUB_API_TOKEN"])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """The head node's programs as `gpuhub up` runs them, without nodes."""
    paths, folder = Paths(INSTANCE), Path(tmp_path_factory.mktemp("rights"))
    with ExitStack() as stack:
        for folder_made in (paths.state, paths.run, paths.log):
            shutil.rmtree(folder_made, ignore_errors=True)
            folder_made.mkdir(mode=0o711 if folder_made == paths.state else 0o700)
            stack.callback(shutil.rmtree, folder_made)
        secrets.ensure_secrets(paths)
        file = folder / "cluster.toml"
        file.write_text(SETTINGS, encoding="utf-8")
        started = Head(paths, folder)
        stack.callback(started.end)
        for program in programs.build_programs(paths, file, ROOT / "tests" / "support" / "hub" / "recording_hub.py"):
            (paths.log / f"{program.name}.log").touch(mode=0o600)
            log = stack.enter_context((paths.log / f"{program.name}.log").open("wb"))
            environment = os.environ | dict(program.environment) | {"RECORDED": str(folder), "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(
                program.command, cwd=program.directory, env=environment, stdout=log, stderr=log, umask=0o077
            )
            started.processes[program.name] = process
            url = {programs.BROKER: f"{BROKER}/health", programs.HUB: f"{HUB}/login"}.get(program.name)
            if url is not None:
                wait_until(lambda url=url: _answers(url), f"{program.name} answers", 120)
        yield started


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def browsers(head: Head) -> Iterator[dict[str, httpx.Client]]:
    """Sessions of ada, ben and the administrator."""
    sessions = {name: head.log_in(name) for name in ("ada", "ben", "rita")}
    yield sessions
    for browser in sessions.values():
        browser.close()


@pytest.fixture(scope="module")
def tokens(head: Head, browsers: dict[str, httpx.Client]) -> dict[str, str]:
    """Tokens of every kind of caller, as the hub issues them."""
    with ThreadPoolExecutor() as pool:
        started = pool.map(lambda name: head.start_server(browsers[name], name), browsers)
        by_caller = {f"{name}-nb": token for name, token in zip(browsers, started, strict=True)}
    by_caller["stopped"] = head.start_server(browsers["ada"], "ada", "second")
    assert browsers["ada"].delete("/api/users/ada/servers/second").status_code in {202, 204}
    for name, browser in browsers.items():
        by_caller[name] = browser.post(f"/api/users/{name}/tokens", json={"note": "laptop"}).json()["token"]
    asked = {"note": "x", "scopes": ["read:users:name!user=ada"]}
    by_caller["narrow"] = browsers["ada"].post("/api/users/ada/tokens", json=asked).json()["token"]
    by_caller["expired"] = browsers["ada"].post("/api/users/ada/tokens", json={"expires_in": 1}).json()["token"]
    revoked = browsers["ada"].post("/api/users/ada/tokens", json={"note": "y"}).json()
    assert browsers["ada"].delete(f"/api/users/ada/tokens/{revoked['id']}").status_code == 204
    by_caller |= {"revoked": revoked["token"], "unknown": "0" * 32, "foreign": "foreign-" * 4}
    services = {"spawner": secrets.SPAWNER_TOKEN, "head": secrets.BROKER_TOKEN, "metrics": secrets.METRICS_TOKEN}
    by_caller |= {name: secrets.read_secret(head.paths, secret) for name, secret in services.items()}
    with head.client(by_caller["expired"]) as client:
        wait_until(lambda: client.get("/user").status_code == 403, "the token expires")
    return by_caller


def api_calls() -> Iterator[tuple[str, str]]:
    """Yield every method of every route of JupyterHub's API, about the caller and about another user."""
    for pattern, handler, *_ in default_handlers:
        methods = [method for method in ("get", "post", "put", "patch", "delete") if _has(handler, method)]
        for who in ("ada", "ben"):
            path = pattern.replace("(?:/([^/]+))?", "").replace("/?", "/")
            # The first parameter of a route is its owner, group or service.
            path = re.sub(r"\(\[\^/\]\S\)", who, path, count=1)
            path = re.sub(r"\(\[\^/\]\S\)", "x", path)
            yield from ((method.upper(), path) for method in methods)
            if path == pattern:
                break


def _has(handler: Any, method: str) -> bool:
    """Return whether the handler implements the method instead of inheriting Tornado's 405."""
    return getattr(handler, method).__qualname__.split(".")[0] not in {"RequestHandler", "APIHandler", "BaseHandler"}


#: Public routes only show a version or redirect to the login. One deprecated route lacks a parameter and fails for
#: every caller; another one checks only that the token is known.
OPEN = {
    "GET /api/": 200,
    "GET /api/oauth2/authorize": 302,
    "POST /api/oauth2/token": 400,
    "POST /api/authorizations/token/ada": 500,
    "POST /api/authorizations/token/ben": 500,
}
KNOWN = OPEN | {"GET /api/authorizations/token": 500, "GET /api/user": 200}
#: Allowed routes of each token at the hub, with the status. 400: an activity without a time.
AT_THE_HUB: dict[str, dict[str, int]] = {
    "ada-nb": KNOWN | {"GET /api/users/ada": 200, "POST /api/users/ada/activity": 400},
    "spawner": KNOWN,
    "stopped": OPEN,
}


@pytest.mark.parametrize("caller", AT_THE_HUB)
def test_token_permissions_at_the_hub(head: Head, tokens: dict[str, str], caller: str) -> None:
    """A notebook's token can only read its owner's name and post activity."""
    statuses = {}
    with head.client(tokens[caller], HUB) as client:
        for method, path in api_calls():
            answer = client.request(method, path, json=None if method in {"GET", "DELETE"} else {})
            if answer.status_code not in {401, 403, 404}:
                statuses[f"{method} {path}"] = answer.status_code
    assert statuses == AT_THE_HUB[caller]


def test_notebook_token_reads_name_and_groups(head: Head, tokens: dict[str, str]) -> None:
    """A notebook's token reads name and groups, but neither servers and their state nor roles or the login's data."""
    with head.client(tokens["ada-nb"]) as client:
        shown = client.get("/users/ada").json()
        scopes = set(client.get("/user").json()["scopes"])
    assert set(shown) <= {"kind", "name", "admin", "groups", "last_activity", "user_info"}
    assert scopes == {
        "access:servers!server=ada/",
        "access:services!service=broker",
        "users:activity!user=ada",
        *(f"read:users:{part}!user=ada" for part in ("activity", "groups", "name")),
    }


def test_broker_token_only_starts_and_stops_servers(head: Head, tokens: dict[str, str]) -> None:
    """The broker's token makes no users or tokens, and reads neither groups nor routes."""
    allowed = set()
    with head.client(tokens["head"], HUB) as client:
        for method, path in api_calls():
            if "/server" in path:
                continue
            answer = client.request(method, path, json=None if method in {"GET", "DELETE"} else {})
            if answer.status_code not in {401, 403, 404}:
                allowed.add(f"{method} {path}")
    assert allowed == set(KNOWN) | {f"GET /api/{route}" for route in ("users", "users/ada", "users/ben")}


#: Real tokens, and the callers of the table of rights that they stand for.
IN_THE_TABLE = {
    "ben": "ben", "ben-nb": "ben", "ada": "ada", "ada-nb": "ada-nb", "rita-nb": "root-nb", "spawner": "spawner",
    "rita": "root", "head": "head", "unknown": "unknown", "revoked": "unknown", "expired": "expired",
    "stopped": "stopped", "narrow": "narrow", "foreign": "foreign", "metrics": "metrics",
}  # fmt: skip
ROUTES = {
    "GET /leases/{lease}": None,
    "GET /leases": None,
    "GET /cluster": None,
    "GET /usage?owner=ada": None,
    "GET /metrics": None,
    "POST /nodes/rig3/undrain": None,
    "POST /leases as ada": {"profile": "cpu", "owner": "ada"},
}


def test_metrics_token_reads_the_hubs_metrics_and_nothing_else(head: Head, tokens: dict[str, str]) -> None:
    """JupyterHub's own metrics need its scope `read:metrics` as well; users do not have it."""
    with head.client(tokens["metrics"], HUB) as client:
        answer = client.get("/metrics")
        assert (answer.status_code, "jupyterhub_running_servers" in answer.text) == (200, True)
        for path in ("/api/users", "/api/users/ada", "/api/proxy", "/api/services", "/api/groups"):
            assert client.get(path).status_code in {403, 404}, path
    with head.client(tokens["ada"], HUB) as client:
        assert client.get("/metrics").status_code == 403


@pytest.fixture(scope="module")
def lease(head: Head, tokens: dict[str, str]) -> str:
    """A request of ada's that waits because no node answers."""
    return ask_lease(head, tokens, "first")


@pytest.fixture(scope="module")
def job(head: Head, tokens: dict[str, str]) -> str:
    """A job of ada's that waits because no node answers."""
    with head.client(tokens["ada"], f"{BROKER}/api/v1") as client:
        made = client.post("/jobs", json={"run_id": "run-000009", "detached": True})
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


def ask_lease(head: Head, tokens: dict[str, str], server: str) -> str:
    with head.client(tokens["spawner"], f"{BROKER}/api/v1") as client:
        answer = client.post("/leases", json={"profile": "cpu", "key": server, "server": server, "owner": "ada"})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


@pytest.mark.parametrize("route", ROUTES)
def test_real_tokens_at_the_broker(head: Head, tokens: dict[str, str], lease: str, route: str) -> None:
    """The broker's decisions on real tokens match the table; an administrator's notebook has no administrator's rights."""
    method, path = route.split()[:2]
    statuses = {}
    for caller in IN_THE_TABLE:
        body = ROUTES[route]
        with head.client(tokens[caller], f"{BROKER}/api/v1") as client:
            sent = None if body is None else {**body, "key": f"{caller}", "server": f"s-{caller}"}
            answer = client.request(method, path.format(lease=lease).replace("rig3", "rig1"), json=sent)
        statuses[caller] = answer.status_code
    assert statuses == {caller: MATRIX[route].statuses[row] for caller, row in IN_THE_TABLE.items()}


#: Our pages with the status for anonymous callers, for tokens of ada and of the administrator without a session, and
#: for sessions of ben, ada and the administrator. {job} is a job of ada's, and {lease} a waiting one of ada's.
PAGES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "GET /gpus": (None, (302, 302, 302, 200, 200, 200)),
    "GET /gpuhub/stream?for_s=0": (None, (403, 403, 403, 200, 200, 200)),
    "GET /gpuhub/output?job=j0": (None, (403, 403, 403, 200, 200, 200)),
    "GET /gpuhub/cluster": (None, (403, 403, 403, 200, 200, 200)),
    "GET /gpuhub/idle": (None, (403, 403, 403, 200, 200, 200)),
    "GET /gpuhub/why?lease={lease}": (None, (403, 403, 403, 404, 200, 200)),
    "GET /gpuhub/runs?node=rig1": (None, (403, 403, 403, 403, 403, 200)),
    "POST /gpuhub/act force": ({"do": "force", "lease": "{lease}"}, (403, 403, 403, 403, 403, 409)),
    "POST /gpuhub/act cordon": ({"do": "cordon", "node": "rig1"}, (403, 403, 403, 403, 403, 204)),
    "POST /gpuhub/act undrain": ({"do": "undrain", "node": "rig1"}, (403, 403, 403, 403, 403, 204)),
    "POST /gpuhub/act extend": ({"do": "extend", "lease": "{lease}", "hours": 1}, (403, 403, 403, 404, 409, 409)),
    "POST /gpuhub/act keep": ({"do": "keep", "lease": "{lease}"}, (403, 403, 403, 404, 409, 409)),
    "GET /notifications": (None, (302, 302, 302, 200, 200, 200)),
    "GET /gpuhub/notifications": (None, (403, 403, 403, 200, 200, 200)),
    "POST /gpuhub/notifications test": ({"do": "test", "id": "d0a1"}, (403, 403, 403, 404, 404, 404)),
    "POST /gpuhub/notifications add": (
        {"do": "add", "destination": {"url": "json://10.0.0.1/", "kinds": []}},
        (403, 403, 403, 400, 400, 400),
    ),
    "GET /gpuhub/shared/{job}": (None, (302, 302, 302, 404, 200, 403)),
    "GET /gpuhub/shared-stream?job=j0": (None, (403, 403, 403, 200, 200, 200)),
    "POST /gpuhub/act share": (
        {"do": "share", "job": "{job}", "viewer": "ben", "hours": 1},
        (403, 403, 403, 404, 204, 403),
    ),
    "POST /gpuhub/act end_share": (
        {"do": "end_share", "job": "{job}", "viewer": "ben"},
        (403, 403, 403, 404, 204, 403),
    ),
    "POST /gpuhub/act stop": ({"do": "stop", "lease": "{lease}"}, (403, 403, 403, 404, 204, 204)),
    "POST /gpuhub/act cancel": ({"do": "cancel", "job": "j0"}, (403, 403, 403, 404, 404, 404)),
    "POST /gpuhub/leave": ({"lease": "{lease}"}, (403, 403, 403, 404, 204, 409)),
}


@pytest.mark.parametrize("page", PAGES)
def test_pages_need_a_logged_in_browser(
    head: Head, tokens: dict[str, str], browsers: dict[str, httpx.Client], lease: str, job: str, page: str
) -> None:
    """Pages open for logged-in browsers only, and for no token, not even an administrator's."""
    body, expected = PAGES[page]
    method, path = page.split()[:2]
    ends = page.split()[-1] in {"/gpuhub/leave", "stop"}
    own = ask_lease(head, tokens, page.split()[-1].rpartition("/")[2]) if ends else lease
    sent = None if body is None else json.loads(json.dumps(body).replace("{lease}", own).replace("{job}", job))
    path = path.format(lease=own, job=job)
    statuses = []
    for token in (None, tokens["ada"], tokens["rita"]):
        with head.client(token, HUB) as client:
            statuses.append(client.request(method, path, json=sent).status_code)
    for name in ("ben", "ada", "rita"):
        statuses.append(browsers[name].request(method, path, json=sent).status_code)
    assert tuple(statuses) == expected


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("POST")])
def test_pages_refuse_cross_site_requests(browsers: dict[str, httpx.Client], lease: str, page: str) -> None:
    """A session's cookies are refused without the XSRF token and with another session's."""
    body, _ = PAGES[page]
    path = page.split()[1]
    sent = json.loads(json.dumps(body).replace("{lease}", lease))
    for xsrf in ("", browsers["ben"].headers["X-XSRFToken"]):
        assert browsers["rita"].post(path, json=sent, headers={"X-XSRFToken": xsrf}).status_code == 403


def test_visit_of_a_jobs_server_needs_a_session_and_ends_with_it(
    head: Head, tokens: dict[str, str], browsers: dict[str, httpx.Client]
) -> None:
    """The owner and a named user get there from the hub's page, and no token; logging out ends the visit."""
    with head.client(tokens["ada"], f"{BROKER}/api/v1") as client:
        asked = {"run_id": "run-000001", "detached": True, "port": 8000, "port_users": ["ben"]}
        made = client.post("/jobs", json=asked)
        assert made.status_code == 201, made.text
        job = made.json()["id"]
    path = f"/gpuhub/ports/{job}?to=/a%3Fb"
    for token in (None, tokens["ada"], tokens["rita"]):
        with head.client(token, HUB) as client:
            assert client.get(path).status_code == 302
    # Its token is no administrator's, as any visit's.
    assert browsers["rita"].get(path).status_code == 404
    assert browsers["ada"].get(f"/gpuhub/ports/{job}x").status_code == 404
    session = head.log_in("ben")
    first, second = (browser.get(path).headers["Location"] for browser in (session, browsers["ada"]))
    for location in (first, second):
        assert re.fullmatch(rf"/services/broker/visits/{job}/[\w-]{{43}}/a\?b", location)

    def get_status(location: str) -> int:
        return httpx.get(f"{BROKER}{location.removeprefix('/services/broker')}", trust_env=False).status_code

    # The job waits, as no node answers.
    assert (get_status(first), get_status(second)) == (409, 409)
    session.get("/logout")
    session.close()
    wait_until(lambda: get_status(first) == 401, "the visit has ended with its session")
    assert get_status(second) == 409


def test_table_of_rights_has_every_page() -> None:
    """Every page is in the table."""
    source = (ROOT / "spawners" / "gpuhub" / "hub_config.py").read_text(encoding="utf-8")
    pages = set(re.findall(r'\(r"(/[a-z/-]+)", [A-Za-z]+Handler\)', source)) | {"/gpuhub/shared/{job}"}
    assert pages == {page.split()[1].split("?")[0] for page in PAGES}


def test_administrators_actions_on_pages_are_audited(
    head: Head, tokens: dict[str, str], browsers: dict[str, httpx.Client]
) -> None:
    """The audit log, readable by root only, has the administrator's name, and that of refused users."""
    waiting = ask_lease(head, tokens, "audited")
    assert browsers["ben"].post("/gpuhub/leave", json={"lease": waiting}).status_code == 404
    assert browsers["rita"].post("/gpuhub/leave", json={"lease": waiting}).status_code == 204
    file = head.paths.log / "audit.log"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    about = [(record["who"], record["action"], record["outcome"]) for record in lines if record["object"] == waiting]
    assert about == [
        ("ben", "GET /leases/{lease_id}", "refused"),
        ("rita", "GET /leases/{lease_id}", "done"),
        ("rita", "DELETE /leases/{lease_id}", "done"),
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with head.client(tokens["ada"], f"{BROKER}/api/v1") as client:
        assert client.get(f"/leases/{waiting}").json()["reason"] == "ended by rita"


def test_culler_may_list_and_stop_servers_only(head: Head, tokens: dict[str, str]) -> None:
    """The hub starts it; its token has these scopes, and with them it neither starts, opens nor reads what users have."""
    hub = head.processes[programs.HUB].pid
    token = wait_until(lambda: _find_culler_token(hub), "the hub starts the culler")
    with head.client(token) as client:
        assert set(client.get("/user").json()["scopes"]) == {
            "list:users",
            "read:users:name",
            "read:servers",
            "delete:servers",
            "access:services!service=broker",
            "custom:gpuhub:reclaim",
        }
        users = {user["name"]: user for user in client.get("/users").json()}
        assert "ready" in users["ada"]["servers"][""]
        assert client.post("/users/ada/servers/third", json={"profile": "cpu"}).status_code == 403
        assert client.get("/users/ada/tokens").status_code in {403, 404}
        assert client.post("/users/ada/tokens", json={}).status_code in {403, 404}
    with head.client(token, f"{BROKER}/api/v1") as client:
        assert client.post("/reclaims", json={"owner": "ada", "server": ""}).json() == {"stop": False}
        assert client.get("/leases").json() == []


def _find_culler_token(hub: int) -> str:
    """Return the token in the environment of the hub's child that is the culler; empty before it runs."""
    children = Path(f"/proc/{hub}/task/{hub}/children").read_text().split()
    for child in map(Path, [f"/proc/{number}" for number in children]):
        if b"gpuhub.culler" in (child / "cmdline").read_bytes():
            variables = (child / "environ").read_bytes().decode().split("\0")
            return next(text.partition("=")[2] for text in variables if text.startswith("JUPYTERHUB_API_TOKEN="))
    return ""


HOSTILE = ["..", ".", "~root", "$(id)", "a;b", "-rf", "\u00e4da", "a b", "a\nb", "ada\x00", "a" * 33, "a" * 5000,
           "%2e%2e", "ada/../ben", "<b>ada</b>", "0"]  # fmt: skip


def test_reserved_user_names_are_refused(head: Head, tokens: dict[str, str], browsers: dict[str, httpx.Client]) -> None:
    """Reserved names cannot log in, leave nothing behind, and keep the log short; administrators create no users."""
    log = head.paths.log / "hub.log"
    before = log.stat().st_size
    password = secrets.read_secret(head.paths, secrets.USER_PASSWORD)
    with httpx.Client(base_url=HUB, timeout=20, trust_env=False) as browser:
        # Tornado removes control characters from form fields: "ada" is left, which is ada.
        for name in set(HOSTILE) - {"ada\x00"}:
            browser.get("/login")
            form = {"username": name, "password": password, "_xsrf": browser.cookies["_xsrf"]}
            assert browser.post("/login", data=form).status_code == 403, name
    statuses = {name: browsers["rita"].post("/api/users", json={"usernames": [name]}).status_code for name in HOSTILE}
    assert statuses == dict.fromkeys(HOSTILE, 403)
    users = {user["name"] for user in browsers["rita"].get("/api/users").json()}
    assert users == {"ada", "ben", "rita"}
    # Of all users that had a server.
    assert {home.name for home in (head.paths.state / "homes").iterdir()} == users
    assert log.stat().st_size - before < 100_000


OPTIONS: dict[str, Any] = {
    "image": {"profile": "cpu", "image": "evil/image:latest"},
    "mounts": {"profile": "cpu", "mounts": [{"source": "/", "target": "/host"}]},
    "privileged": {"profile": "cpu", "privileged": True},
    "environment": {"profile": "cpu", "environment": {"NVIDIA_VISIBLE_DEVICES": "all"}},
    "NVIDIA_VISIBLE_DEVICES": {"profile": "cpu", "NVIDIA_VISIBLE_DEVICES": "all"},
    "extra_host_config": {"extra_host_config": {"privileged": True}, "profile": "cpu"},
    "gpu_count": {"profile": "cpu", "gpu_count": -1},
    "gpus": {"profile": "cpu", "gpus": "1; rm"},
    "profile {": {"profile": {"name": "cpu"}},
    "profile [": {"profile": ["cpu"]},
    "profile 1000000000.0": {"profile": 1e9},
    "No profile": {"profile": None},
    "no profile": {"profile": "evil/image:latest"},
    "Body must be": ["cpu"],
    "": "cpu",
}


@pytest.mark.parametrize("named", OPTIONS)
def test_invalid_options_are_refused(browsers: dict[str, httpx.Client], named: str) -> None:
    """An invalid option over the REST API is refused with status 400 and the field's name, before any request."""
    answer = browsers["ben"].post("/api/users/ben/servers/options", json=OPTIONS[named])
    assert answer.status_code == 400, answer.text
    message = answer.json()["message"]
    assert all(word.lower() in message.lower() for word in named.split()), message


def test_server_names_that_differ_in_case(tokens: dict[str, str], browsers: dict[str, httpx.Client]) -> None:
    """`GPU` is refused while `gpu` runs, because host names ignore case; the other servers keep running."""
    browser = browsers["ben"]
    assert browser.post("/api/users/ben/servers/gpu", json={"profile": "cpu"}).status_code in {201, 202}
    wait_until(lambda: browser.get("/api/users/ben").json()["servers"]["gpu"]["ready"], "the first one runs")
    for name in ("GPU", "Gpu", "..", "a%2Fb", "gpu%20", "%00", "a" * 200):
        refused = browser.post(f"/api/users/ben/servers/{name}", json={"profile": "cpu"})
        assert 400 <= refused.status_code < 500, (name, refused.text)
    servers = browser.get("/api/users/ben").json()["servers"]
    assert {name for name, server in servers.items() if server["ready"]} == {"", "gpu"}


def test_no_secret_is_readable_by_others(head: Head, tokens: dict[str, str]) -> None:
    """After all tests above no log, response, command line or other user's file has a token or password."""
    hidden = {file.name: file.read_text().strip() for file in head.paths.secrets.iterdir() if file.is_file()}
    hidden |= tokens
    del hidden["unknown"]
    logs = {file.name: file.read_text(errors="replace") for file in head.paths.log.iterdir()}
    assert {"hub.log", "broker.log", "proxy.log", "audit.log"} <= set(logs)
    with head.client(base=BROKER) as client:
        head.texts.append(client.get("/openapi.json").text)
    commands = {name: Path(f"/proc/{process.pid}/cmdline").read_text() for name, process in head.processes.items()}
    places = logs | commands | {"answers": "\n".join(head.texts)}
    assert [(kind, where) for kind, secret in hidden.items() for where, text in places.items() if secret in text] == []
    for file in head.recorded.glob("*.json"):
        given = json.loads(file.read_text())
        own = {given["JUPYTERHUB_API_TOKEN"]}
        values = "\n".join(value for value in given.values() if value not in own)
        assert [kind for kind, secret in hidden.items() if secret in values] == [], file.name
    # Readable by root only: environments, and the folders except what is meant for users.
    files = [Path(f"/proc/{process.pid}/environ") for process in head.processes.values()]
    for folder in (head.paths.secrets, head.paths.log):
        files += [folder, *folder.rglob("*")]
    files += [file for file in head.paths.state.iterdir() if file.is_file()]
    assert len(files) > 10
    assert [str(file) for file in files if stat.S_IMODE(file.stat().st_mode) & 0o077] == []
