"""Who may do what, as a real JupyterHub decides it: tokens of notebooks, our pages, hostile names and options."""

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

from gpuhub import secrets
from gpuhub.head import programs
from gpuhub.paths import Paths
from tests.support.simulated import wait_until
from tests.unit.broker.rights import MATRIX

ROOT = Path(__file__).parents[2]
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
"""


@dataclass
class Head:
    """Hub, proxy and broker of one instance."""

    paths: Paths
    recorded: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    #: Everything that anybody was answered.
    said: list[str] = field(default_factory=list)

    def end(self) -> None:
        """All of them together."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(30)

    def hear(self, answer: httpx.Response) -> None:
        """Keep what was said."""
        self.said.append(f"{answer.headers}\n{answer.read().decode(errors='replace')}")

    def client(self, token: str | None = None, base: str = f"{HUB}/api") -> httpx.Client:
        """With a token, or without."""
        headers = {} if token is None else {"Authorization": f"token {token}"}
        # What a browser that logs in is answered has its cookies in it, and is not kept.
        hooks: Any = {"response": [self.hear]}
        return httpx.Client(base_url=base, headers=headers, timeout=20, trust_env=False, event_hooks=hooks)

    def log_in(self, name: str) -> httpx.Client:
        """A browser of somebody who is logged in; its XSRF token goes with every request."""
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
        """A server of somebody's, and its own token."""
        path = f"/api/users/{name}/servers/{server}" if server else f"/api/users/{name}/server"
        answer = browser.post(path, json={"profile": "cpu"})
        assert answer.status_code in {201, 202}, answer.text
        file = self.recorded / f"{name}-{server}.json"
        wait_until(lambda: browser.get(f"/api/users/{name}").json()["servers"].get(server, {}).get("ready"), "it runs")
        return str(json.loads(file.read_text())["JUPYTERHUB_API_TOKEN"])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """The head node's programs as `gpuhub up` runs them, without any node."""
    paths, folder = Paths(INSTANCE), Path(tmp_path_factory.mktemp("rights"))
    with ExitStack() as stack:
        for place in (paths.state, paths.run, paths.log):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(mode=0o711 if place == paths.state else 0o700)
            stack.callback(shutil.rmtree, place)
        secrets.ensure_secrets(paths)
        file = folder / "cluster.toml"
        file.write_text(SETTINGS, encoding="utf-8")
        found = Head(paths, folder)
        stack.callback(found.end)
        for program in programs.build_programs(paths, file, ROOT / "tests" / "support" / "recording_hub.py"):
            (paths.log / f"{program.name}.log").touch(mode=0o600)
            log = stack.enter_context((paths.log / f"{program.name}.log").open("wb"))
            environment = os.environ | dict(program.environment) | {"RECORDED": str(folder), "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(
                program.command, cwd=program.directory, env=environment, stdout=log, stderr=log, umask=0o077
            )
            found.processes[program.name] = process
            url = {programs.BROKER: f"{BROKER}/health", programs.HUB: f"{HUB}/login"}.get(program.name)
            if url is not None:
                wait_until(lambda url=url: _answers(url), f"{program.name} answers", 120)
        yield found


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def browsers(head: Head) -> Iterator[dict[str, httpx.Client]]:
    """Ada, ben and the administrator, logged in."""
    found = {name: head.log_in(name) for name in ("ada", "ben", "rita")}
    yield found
    for browser in found.values():
        browser.close()


@pytest.fixture(scope="module")
def tokens(head: Head, browsers: dict[str, httpx.Client]) -> dict[str, str]:
    """The tokens of all kinds of callers, as the hub itself makes them."""
    with ThreadPoolExecutor() as pool:
        started = pool.map(lambda name: head.start_server(browsers[name], name), browsers)
        found = {f"{name}-nb": token for name, token in zip(browsers, started, strict=True)}
    found["stopped"] = head.start_server(browsers["ada"], "ada", "second")
    assert browsers["ada"].delete("/api/users/ada/servers/second").status_code in {202, 204}
    for name, browser in browsers.items():
        found[name] = browser.post(f"/api/users/{name}/tokens", json={"note": "laptop"}).json()["token"]
    asked = {"note": "x", "scopes": ["read:users:name!user=ada"]}
    found["narrow"] = browsers["ada"].post("/api/users/ada/tokens", json=asked).json()["token"]
    found["expired"] = browsers["ada"].post("/api/users/ada/tokens", json={"expires_in": 1}).json()["token"]
    revoked = browsers["ada"].post("/api/users/ada/tokens", json={"note": "y"}).json()
    assert browsers["ada"].delete(f"/api/users/ada/tokens/{revoked['id']}").status_code == 204
    found |= {"revoked": revoked["token"], "unknown": "0" * 32, "foreign": "foreign-" * 4}
    for name, secret in (("spawner", secrets.SPAWNER_TOKEN), ("head", secrets.BROKER_TOKEN)):
        found[name] = secrets.read_secret(head.paths, secret)
    with head.client(found["expired"]) as client:
        wait_until(lambda: client.get("/user").status_code == 403, "the token expires")
    return found


def api_calls() -> Iterator[tuple[str, str]]:
    """Every route of JupyterHub's API with every method, about oneself and about somebody else."""
    for pattern, handler, *_ in default_handlers:
        methods = [method for method in ("get", "post", "put", "patch", "delete") if _has(handler, method)]
        for who in ("ada", "ben"):
            path = pattern.replace("(?:/([^/]+))?", "").replace("/?", "/")
            # The first thing that a route names is whose it is, or which group or service.
            path = re.sub(r"\(\[\^/\]\S\)", who, path, count=1)
            path = re.sub(r"\(\[\^/\]\S\)", "x", path)
            yield from ((method.upper(), path) for method in methods)
            if path == pattern:
                break


def _has(handler: Any, method: str) -> bool:
    """Whether it is the handler's own, and not Tornado's 405."""
    return getattr(handler, method).__qualname__.split(".")[0] not in {"RequestHandler", "APIHandler", "BaseHandler"}


#: What is open to everybody tells nothing but a version, or asks to log in; and a route that JupyterHub left over from
#: its second version fails for want of a parameter, whoever asks; another one only where the token is known.
OPEN = {
    "GET /api/": 200,
    "GET /api/oauth2/authorize": 302,
    "POST /api/oauth2/token": 400,
    "POST /api/authorizations/token/ada": 500,
    "POST /api/authorizations/token/ben": 500,
}
KNOWN = OPEN | {"GET /api/authorizations/token": 500, "GET /api/user": 200}
#: What each token may at the hub, and with which status. 400: an activity without a time.
AT_THE_HUB: dict[str, dict[str, int]] = {
    "ada-nb": KNOWN | {"GET /api/users/ada": 200, "POST /api/users/ada/activity": 400},
    "spawner": KNOWN,
    "stopped": OPEN,
}


@pytest.mark.parametrize("caller", AT_THE_HUB)
def test_what_a_token_may_at_the_hub(head: Head, tokens: dict[str, str], caller: str) -> None:
    """Every route of JupyterHub's API: a notebook's token reads its owner's name and tells of activity, no more."""
    found = {}
    with head.client(tokens[caller], HUB) as client:
        for method, path in api_calls():
            answer = client.request(method, path, json=None if method in {"GET", "DELETE"} else {})
            if answer.status_code not in {401, 403, 404}:
                found[f"{method} {path}"] = answer.status_code
    assert found == AT_THE_HUB[caller]


def test_what_a_notebooks_token_reads_of_its_owner(head: Head, tokens: dict[str, str]) -> None:
    """Name and groups; neither servers, with their state, nor roles or what the login's side said."""
    with head.client(tokens["ada-nb"]) as client:
        shown = client.get("/users/ada").json()
        scopes = set(client.get("/user").json()["scopes"])
    assert set(shown) <= {"kind", "name", "admin", "groups", "last_activity", "user_info"}
    assert scopes == {
        "access:servers!server=ada/",
        "access:services!service=broker",
        "users:activity!user=ada",
        *(f"read:users:{what}!user=ada" for what in ("activity", "groups", "name")),
    }


def test_the_brokers_token_starts_and_stops_servers_and_no_more(head: Head, tokens: dict[str, str]) -> None:
    """It makes neither users nor tokens, and reads neither groups nor routes."""
    found = set()
    with head.client(tokens["head"], HUB) as client:
        for method, path in api_calls():
            if "/server" in path:
                continue
            answer = client.request(method, path, json=None if method in {"GET", "DELETE"} else {})
            if answer.status_code not in {401, 403, 404}:
                found.add(f"{method} {path}")
    assert found == set(KNOWN) | {f"GET /api/{what}" for what in ("users", "users/ada", "users/ben")}


#: Real tokens, and the callers of the table of rights that they are.
IN_THE_TABLE = {
    "ben": "ben", "ben-nb": "ben", "ada": "ada", "ada-nb": "ada-nb", "rita-nb": "root-nb", "spawner": "spawner",
    "rita": "root", "head": "head", "unknown": "unknown", "revoked": "unknown", "expired": "expired",
    "stopped": "stopped", "narrow": "narrow", "foreign": "foreign",
}  # fmt: skip
ROUTES = {
    "GET /leases/{lease}": None,
    "GET /leases": None,
    "GET /cluster": None,
    "GET /usage?owner=ada": None,
    "POST /nodes/rig3/undrain": None,
    "POST /leases as ada": {"profile": "cpu", "owner": "ada"},
}


@pytest.fixture(scope="module")
def lease(head: Head, tokens: dict[str, str]) -> str:
    """A request of ada's, which waits: no node answers."""
    return ask_lease(head, tokens, "first")


def ask_lease(head: Head, tokens: dict[str, str], server: str) -> str:
    with head.client(tokens["spawner"], f"{BROKER}/api/v1") as client:
        made = client.post("/leases", json={"profile": "cpu", "key": server, "server": server, "owner": "ada"})
        assert made.status_code == 201, made.text
        return str(made.json()["id"])


@pytest.mark.parametrize("route", ROUTES)
def test_real_tokens_at_the_broker(head: Head, tokens: dict[str, str], lease: str, route: str) -> None:
    """The hub's word on real tokens leads to what the table says: also that an administrator's notebook is none."""
    method, path = route.split()[:2]
    found = {}
    for caller in IN_THE_TABLE:
        body = ROUTES[route]
        with head.client(tokens[caller], f"{BROKER}/api/v1") as client:
            sent = None if body is None else {**body, "key": f"{caller}", "server": f"s-{caller}"}
            answer = client.request(method, path.format(lease=lease).replace("rig3", "rig1"), json=sent)
        found[caller] = answer.status_code
    assert found == {caller: MATRIX[route].statuses[known] for caller, known in IN_THE_TABLE.items()}


#: Our pages: what they answer to nobody, to tokens of ada and of the administrator without a session, to ben, to ada
#: and to the administrator in a browser. {lease} is ada's and waits.
PAGES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "GET /gpus": (None, (302, 302, 302, 200, 200, 200)),
    "GET /gpuhub/gpus": (None, (403, 403, 403, 200, 200, 200)),
    "GET /gpuhub/cluster": (None, (403, 403, 403, 200, 200, 200)),
    "GET /gpuhub/why?lease={lease}": (None, (403, 403, 403, 404, 200, 200)),
    "GET /gpuhub/runs?node=rig1": (None, (403, 403, 403, 403, 403, 200)),
    "POST /gpuhub/act force": ({"do": "force", "lease": "{lease}"}, (403, 403, 403, 403, 403, 409)),
    "POST /gpuhub/act cordon": ({"do": "cordon", "node": "rig1"}, (403, 403, 403, 403, 403, 204)),
    "POST /gpuhub/act undrain": ({"do": "undrain", "node": "rig1"}, (403, 403, 403, 403, 403, 204)),
    "POST /gpuhub/act extend": ({"do": "extend", "lease": "{lease}", "hours": 1}, (403, 403, 403, 404, 409, 409)),
    "POST /gpuhub/leave": ({"lease": "{lease}"}, (403, 403, 403, 404, 204, 409)),
}


@pytest.mark.parametrize("page", PAGES)
def test_our_pages(
    head: Head, tokens: dict[str, str], browsers: dict[str, httpx.Client], lease: str, page: str
) -> None:
    """For browsers that are logged in, each for its user; no token opens them, not even an administrator's."""
    body, expected = PAGES[page]
    method, path = page.split()[:2]
    own = ask_lease(head, tokens, "leaves") if path.endswith("leave") else lease
    sent = None if body is None else json.loads(json.dumps(body).replace("{lease}", own))
    path = path.format(lease=own)
    found = []
    for token in (None, tokens["ada"], tokens["rita"]):
        with head.client(token, HUB) as client:
            found.append(client.request(method, path, json=sent).status_code)
    for name in ("ben", "ada", "rita"):
        found.append(browsers[name].request(method, path, json=sent).status_code)
    assert tuple(found) == expected


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("POST")])
def test_no_other_site_presses_our_buttons(browsers: dict[str, httpx.Client], lease: str, page: str) -> None:
    """Without the XSRF token, or with somebody else's, a session's cookies are worth nothing."""
    body, _ = PAGES[page]
    path = page.split()[1]
    sent = json.loads(json.dumps(body).replace("{lease}", lease))
    for xsrf in ("", browsers["ben"].headers["X-XSRFToken"]):
        assert browsers["rita"].post(path, json=sent, headers={"X-XSRFToken": xsrf}).status_code == 403


def test_all_pages_of_ours_are_in_the_table() -> None:
    """A page added later without a row is noticed."""
    source = (ROOT / "spawners" / "gpuhub" / "hubconfig.py").read_text(encoding="utf-8")
    ours = set(re.findall(r'\(r"(/[a-z/]+)", [A-Za-z]+Handler\)', source))
    assert ours == {page.split()[1].split("?")[0] for page in PAGES}


def test_what_an_administrator_does_on_the_page_is_audited(
    head: Head, tokens: dict[str, str], browsers: dict[str, httpx.Client]
) -> None:
    """By the administrator's name, though the hub stands between; so is who was refused; and the file is root's."""
    waiting = ask_lease(head, tokens, "audited")
    assert browsers["ben"].post("/gpuhub/leave", json={"lease": waiting}).status_code == 404
    assert browsers["rita"].post("/gpuhub/leave", json={"lease": waiting}).status_code == 204
    file = head.paths.log / "audit.log"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    about = [(one["who"], one["action"], one["outcome"]) for one in lines if one["object"] == waiting]
    assert about == [
        ("ben", "GET /leases/{lease_id}", "refused"),
        ("rita", "GET /leases/{lease_id}", "done"),
        ("rita", "DELETE /leases/{lease_id}", "done"),
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with head.client(tokens["ada"], f"{BROKER}/api/v1") as client:
        assert client.get(f"/leases/{waiting}").json()["reason"] == "ended by rita"


HOSTILE = ["..", ".", "~root", "$(id)", "a;b", "-rf", "\u00e4da", "a b", "a\nb", "ada\x00", "a" * 33, "a" * 5000,
           "%2e%2e", "ada/../ben", "<b>ada</b>", "0"]  # fmt: skip


def test_user_names_that_mean_something_elsewhere(
    head: Head, tokens: dict[str, str], browsers: dict[str, httpx.Client]
) -> None:
    """Nobody logs in with one, no administrator makes one, nothing is made of one, and the log stays short."""
    log = head.paths.log / "hub.log"
    before = log.stat().st_size
    password = secrets.read_secret(head.paths, secrets.USER_PASSWORD)
    with httpx.Client(base_url=HUB, timeout=20, trust_env=False) as browser:
        # Tornado cuts control characters off what a form sends: "ada" is left, and is ada.
        for name in set(HOSTILE) - {"ada\x00"}:
            browser.get("/login")
            form = {"username": name, "password": password, "_xsrf": browser.cookies["_xsrf"]}
            assert browser.post("/login", data=form).status_code == 403, name
    made = {name: browsers["rita"].post("/api/users", json={"usernames": [name]}).status_code for name in HOSTILE}
    assert made == dict.fromkeys(HOSTILE, 400)
    known = {user["name"] for user in browsers["rita"].get("/api/users").json()}
    assert known == {"ada", "ben", "rita"}
    # Of everybody who had a server.
    assert {home.name for home in (head.paths.state / "homes").iterdir()} == known
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
def test_options_that_are_none(browsers: dict[str, httpx.Client], named: str) -> None:
    """What the REST API lets anybody send: refused with 400 and the field's name, before anything is asked for."""
    answer = browsers["ben"].post("/api/users/ben/servers/options", json=OPTIONS[named])
    assert answer.status_code == 400, answer.text
    said = answer.json()["message"]
    assert all(word.lower() in said.lower() for word in named.split()), said


def test_server_names_that_differ_in_case(tokens: dict[str, str], browsers: dict[str, httpx.Client]) -> None:
    """`gpu` runs; `GPU`, of the same name as a host, is refused, and the first one and the default one go on."""
    browser = browsers["ben"]
    assert browser.post("/api/users/ben/servers/gpu", json={"profile": "cpu"}).status_code in {201, 202}
    wait_until(lambda: browser.get("/api/users/ben").json()["servers"]["gpu"]["ready"], "the first one runs")
    for name in ("GPU", "Gpu", "..", "a%2Fb", "gpu%20", "%00", "a" * 200):
        refused = browser.post(f"/api/users/ben/servers/{name}", json={"profile": "cpu"})
        assert 400 <= refused.status_code < 500, (name, refused.text)
    servers = browser.get("/api/users/ben").json()["servers"]
    assert {name for name, server in servers.items() if server["ready"]} == {"", "gpu"}


def test_no_secret_is_where_others_look(head: Head, tokens: dict[str, str]) -> None:
    """After all of the above: logs, answers, command lines and other users' files have no token and no password."""
    hidden = {file.name: file.read_text().strip() for file in head.paths.secrets.iterdir() if file.is_file()}
    hidden |= tokens
    del hidden["unknown"]
    logs = {file.name: file.read_text(errors="replace") for file in head.paths.log.iterdir()}
    assert {"hub.log", "broker.log", "proxy.log", "audit.log"} <= set(logs)
    with head.client(base=BROKER) as client:
        head.said.append(client.get("/openapi.json").text)
    commands = {name: Path(f"/proc/{one.pid}/cmdline").read_text() for name, one in head.processes.items()}
    places = logs | commands | {"answers": "\n".join(head.said)}
    assert [(what, where) for what, secret in hidden.items() for where, text in places.items() if secret in text] == []
    for file in head.recorded.glob("*.json"):
        given = json.loads(file.read_text())
        own = {given["JUPYTERHUB_API_TOKEN"]}
        values = "\n".join(value for value in given.values() if value not in own)
        assert [what for what, secret in hidden.items() if secret in values] == [], file.name
    # What only root may read: environments, and everything below the folders but for what is meant for users.
    files = [Path(f"/proc/{one.pid}/environ") for one in head.processes.values()]
    for folder in (head.paths.secrets, head.paths.log):
        files += [folder, *folder.rglob("*")]
    files += [file for file in head.paths.state.iterdir() if file.is_file()]
    assert len(files) > 10
    assert [str(file) for file in files if stat.S_IMODE(file.stat().st_mode) & 0o077] == []
