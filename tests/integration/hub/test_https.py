"""HTTPS by the local authority with a name for each user's notebooks: the real proxy, hub and broker, and Chromium."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, Response, sync_playwright

from gpuhub.ops.console import StepReport
from gpuhub.ops.deploy import readiness, startup
from gpuhub.tls import authority, public_access
from tests.support.browser import chromium
from tests.support.hub.served_hub import ServedHub
from tests.support.product import wait_for

NAME = "gpuhub.test"
HUB = f'https = "local"\nhostnames = ["{NAME}"]\nsubdomains = true'
PICTURES = Path(os.environ.get("GPUHUB_TEST_PICTURES", Path(__file__).parents[3] / ".cache" / "pictures"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A running hub with its proxy and broker."""
    served = ServedHub("ghhttps", tmp_path_factory.mktemp("hub"), HUB, 18400)
    try:
        served.start()
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as running:
        yield running


def launch(playwright: Playwright, home: Path) -> Browser:
    """Start a user's Chromium, in which every name of the hub resolves to this machine."""
    rules = f"--host-resolver-rules=MAP *.{NAME} 127.0.0.1, MAP {NAME} 127.0.0.1"
    return playwright.chromium.launch(
        executable_path=chromium.find(chromium.WHOLE),
        args=[*chromium.ARGUMENTS, rules],
        env={**os.environ, "HOME": str(home)},
    )


@pytest.fixture(scope="module")
def browser(hub: ServedHub, playwright: Playwright, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that trusts the local authority, as on a laptop where it was installed, and is otherwise unchanged."""
    home = tmp_path_factory.mktemp("home")
    store = home / ".pki" / "nssdb"
    store.mkdir(parents=True)
    assert shutil.which("certutil"), "certutil is missing: `spawners/setup.sh dev` installs it"
    for words in (["-N", "--empty-password"], ["-A", "-t", "C,,", "-n", "gpuhub", "-i", str(hub.paths.authority)]):
        subprocess.run(["certutil", "-d", f"sql:{store}", *words], check=True)
    chromium = launch(playwright, home)
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def set_cookies() -> list[str]:
    """The `Set-Cookie` headers that hub and notebook sent while Ada logged in."""
    return []


@pytest.fixture(scope="module")
def ada(hub: ServedHub, browser: Browser, set_cookies: list[str]) -> Iterator[BrowserContext]:
    """Ada's browser after login, with her notebook running."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(120_000)
    page = context.new_page()
    answers: list[Response] = []

    def keep(answer: Response) -> None:
        answers.append(answer)

    page.on("response", keep)
    page.goto(f"{url(hub)}/hub/login")
    save_screenshot(page, "https-login")
    page.fill("input[name=username]", "ada")
    page.fill("input[name=password]", hub.password)
    page.click("#login_submit")
    page.goto(f"{url(hub)}/hub/spawn")
    page.wait_for_url("**/user/ada/**")
    assert page.url == f"https://ada.{NAME}:{hub.port}/user/ada/"
    for answer in answers:
        headers = answer.headers_array()
        set_cookies += [field["value"] for field in headers if field["name"].lower() == "set-cookie"]
    page.close()
    yield context
    context.close()


def url(hub: ServedHub) -> str:
    return f"https://{NAME}:{hub.port}"


def save_screenshot(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


def build_tls_context(hub: ServedHub) -> ssl.SSLContext:
    """Return a context that trusts only the authority's file, with every check that Python has."""
    context = ssl.create_default_context(cafile=str(hub.paths.authority))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def open_tls(hub: ServedHub, context: ssl.SSLContext, name: str) -> tuple[str | None, x509.Certificate]:
    """Return the protocol version and the server's certificate."""
    with (
        socket.create_connection(("127.0.0.1", hub.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as tls,
    ):
        shown = tls.getpeercert(binary_form=True)
        assert shown is not None
        return tls.version(), x509.load_der_x509_certificate(shown)


def send_request(hub: ServedHub, path: str, *, method: str = "GET", **headers: str) -> httpx.Response:
    """Send a request to the hub by its name and return the response without following redirects."""
    with httpx.Client(verify=build_tls_context(hub), trust_env=False) as client:
        request = client.build_request(
            method,
            f"https://127.0.0.1:{hub.port}{path}",
            headers={
                "Host": f"{NAME}:{hub.port}",
                **{name.replace("_", "-"): value for name, value in headers.items()},
            },
            extensions={"sni_hostname": NAME},
        )
        return client.send(request)


# -- the certificate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [NAME, f"ada.{NAME}", f"broker--service.{NAME}", "localhost", "127.0.0.1"])
def test_the_authority_alone_is_enough(hub: ServedHub, name: str) -> None:
    """Python verifies the chain and the name."""
    version, _ = open_tls(hub, build_tls_context(hub), name)
    assert version in {"TLSv1.2", "TLSv1.3"}


def test_certificate_is_not_trusted_without_the_authority(hub: ServedHub) -> None:
    """The system's authorities do not verify the certificate, and it is valid for no other name."""
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer certificate"):
        open_tls(hub, ssl.create_default_context(), NAME)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        open_tls(hub, build_tls_context(hub), f"a.b.{NAME}")


def test_old_protocols_are_refused(hub: ServedHub) -> None:
    """TLS 1.2 is the oldest; plain HTTP gets no answer."""
    options = ["-cipher", "ALL:@SECLEVEL=0", "-connect", f"127.0.0.1:{hub.port}"]
    for flag, works in (("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)):
        done = subprocess.run(
            ["openssl", "s_client", flag, *options], input="", capture_output=True, text=True, check=False
        )
        assert ("Cipher is (NONE)" not in done.stdout) is works, f"{flag}: {done.stdout}\n{done.stderr}"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{hub.port}/hub/health", trust_env=False)


def test_renewed_certificate_is_used_without_a_restart(hub: ServedHub) -> None:
    """A renewed certificate is used without a restart, and open transfers complete."""
    _, old = open_tls(hub, build_tls_context(hub), NAME)
    renewed = authority.load_authority(
        hub.paths.authority.read_bytes(), (hub.paths.secrets / "authority.key").read_bytes()
    )
    file = hub.paths.secrets / "https.pem"
    with (
        socket.create_connection(("127.0.0.1", hub.port), timeout=30) as plain,
        build_tls_context(hub).wrap_socket(plain, server_hostname=NAME) as open_all_the_time,
    ):
        open_all_the_time.sendall(f"GET /hub/health HTTP/1.1\r\nHost: {NAME}\r\n".encode())
        new = file.with_suffix(".new")
        new.write_bytes(
            authority.issue_server_certificate(renewed, authority.list_alternative_names(old), authority.utc_now())
        )
        new.chmod(0o600)
        new.replace(file)
        wait_for(lambda: open_tls(hub, build_tls_context(hub), NAME)[1] != old, "the new certificate")
        open_all_the_time.sendall(b"Connection: close\r\n\r\n")
        assert open_all_the_time.recv(100).startswith(b"HTTP/1.1 200")


def test_up_waits_for_https_and_prints_the_address(hub: ServedHub, capsys: pytest.CaptureFixture[str]) -> None:
    """`gpuhub up` knows the certificate that the proxy should show, and prints the address and how to trust it."""
    readiness.wait_for_public_url(hub.cluster, hub.paths)
    ready = public_access.ensure_certificate(hub.cluster, hub.paths, "127.0.0.1")
    startup.report_addresses(hub.paths, hub.cluster, ready, StepReport())
    output = capsys.readouterr().out
    assert f" s: {url(hub)}\n" in output
    assert f"scp {NAME}:{hub.paths.authority} gpuhub-authority.pem" in output
    assert "security add-trusted-cert" in output


def test_renew_command(hub: ServedHub) -> None:
    """The command that the proxy runs twice a day renews the certificate when needed and prints how to trust it."""
    command = [str(Path(sys.executable).with_name("gpuhub")), "certificate"]
    options = ["--instance", hub.instance, "--cluster-file", str(hub.cluster_file)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Certificate: +good until 20\d\d-\d\d-\d\d", done.stdout)
    certificate = x509.load_pem_x509_certificate(hub.paths.authority.read_bytes())
    assert f"SHA-256 {authority.format_fingerprint(certificate)}" in done.stdout


# -- what browsers receive ----------------------------------------------------------------------------------------------

PAGES = (
    "/hub/login",
    "/hub/home",
    "/hub/spawn",
    "/hub/token",
    "/hub/gpus",
    "/hub/notifications",
    "/hub/admin",
    "/hub/nothing-here",
    "/hub/gpuhub/notifications",
    "/hub/gpuhub/why?lease=l1",
    "/hub/gpuhub/runs?node=rig1",
    "/hub/gpuhub/cluster",
    "/hub/api/user",
    "/services/broker/api/v1/cluster",
    "/services/broker/health",
)


@pytest.mark.parametrize("who", ["nobody", "ada"])
@pytest.mark.parametrize("path", PAGES)
def test_security_headers(hub: ServedHub, ada: BrowserContext, path: str, who: str) -> None:
    """Every response, allowed or refused, forbids frames, type guessing, caching and other origins."""
    if who == "ada":
        cookies = "; ".join(f"{cookie['name']}={cookie['value']}" for cookie in ada.cookies(f"{url(hub)}/hub/"))
        answer = send_request(hub, path, Cookie=cookies, Origin="https://evil.example")
    else:
        answer = send_request(hub, path, Origin="https://evil.example")
    headers = answer.headers
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    assert "no-store" in headers["Cache-Control"]
    assert "Access-Control-Allow-Origin" not in headers
    assert "Strict-Transport-Security" not in headers, "it would hold for every port of the name"
    if not path.startswith("/services"):
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"


@pytest.mark.parametrize("path", ["/hub/api/users", "/hub/gpuhub/act", "/services/broker/api/v1/leases"])
def test_no_other_origin_is_allowed(hub: ServedHub, path: str) -> None:
    """The response to a CORS preflight request allows no other origin."""
    answer = send_request(
        hub, path, method="OPTIONS", Origin="https://evil.example", Access_Control_Request_Method="POST"
    )
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_cookies_state_every_attribute(ada: BrowserContext, set_cookies: list[str]) -> None:
    """Cookies state every attribute, because browsers differ in their defaults."""
    names = {line.split("=")[0] for line in set_cookies}
    assert {"__Host-jupyterhub-hub-login", "__Host-jupyterhub-user-ada", "jupyterhub-session-id", "_xsrf"} <= names
    for line in set_cookies:
        name, *parts = line.split("; ")
        if "Max-Age=0" in parts or name.endswith("=") or '=""' in name:
            continue  # The cookie is deleted.
        assert {"Secure", "SameSite=Lax"} <= set(parts), line
        assert ("HttpOnly" in parts) is not name.startswith("_xsrf="), line


def test_cookie_security_attributes(ada: BrowserContext) -> None:
    """Cookies are sent over HTTPS only, hidden from scripts, not sent across sites, and cannot be set by other names."""
    cookies = {(one["name"], one["domain"]): one for one in ada.cookies()}
    for key in (("__Host-jupyterhub-hub-login", NAME), ("__Host-jupyterhub-user-ada", f"ada.{NAME}")):
        assert cookies[key]["path"] == "/"
    # The only cookie that all names share identifies the browser and nothing else.
    assert ("jupyterhub-session-id", f".{NAME}") in cookies
    for (name, domain), cookie in cookies.items():
        assert cookie["sameSite"] == "Lax", (name, domain)
        assert cookie["secure"], (name, domain)
        # Pages send it back in a header, which protects against cross-site request forgery.
        assert cookie["httpOnly"] is (name != "_xsrf"), (name, domain)
    assert not any(name == "jupyterhub-hub-login" for name, _ in cookies)


def test_token_in_a_url_is_ignored(hub: ServedHub, ada: BrowserContext) -> None:
    """A token in a URL is ignored, because URLs appear in logs and histories."""
    page = ada.new_page()
    page.goto(f"{url(hub)}/hub/token")
    # Before its script has run, the button would send the form as a page of its own.
    page.wait_for_function("window._jupyterhub_page_loaded === true")
    page.click("#request-token-form button[type=submit]")
    shown = page.wait_for_function("document.getElementById('token-result').innerText.trim()")
    token = shown.json_value()
    save_screenshot(page, "https-token")
    page.close()
    assert send_request(hub, "/hub/api/user", Authorization=f"token {token}").json()["name"] == "ada"
    assert token not in hub.log("hub") + hub.log("proxy") + hub.log("broker")
    assert send_request(hub, f"/hub/api/user?token={token}").status_code == 403
    refused = send_request(hub, f"/hub/home?token={token}")
    assert (refused.status_code, refused.headers["Location"].split("?")[0]) == (302, "/hub/login")
    assert "Set-Cookie" not in refused.headers
    assert send_request(hub, "/services/broker/api/v1/usage", Authorization=f"token {token}").status_code == 200
    assert send_request(hub, f"/services/broker/api/v1/usage?token={token}").status_code == 401


# -- in the browser -----------------------------------------------------------------------------------------------------


def test_browser_without_the_authority_refuses(hub: ServedHub, playwright: Playwright, tmp_path: Path) -> None:
    browser = launch(playwright, tmp_path)
    try:
        with pytest.raises(Exception, match="ERR_CERT_AUTHORITY_INVALID"):
            browser.new_page().goto(f"{url(hub)}/hub/login")
    finally:
        browser.close()


def test_pages_work_under_the_hubs_name(hub: ServedHub, ada: BrowserContext) -> None:
    """The page of GPUs refreshes, and the browser refuses nothing that it loads."""
    page = ada.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    with page.expect_response("**/hub/gpuhub/stream*") as refreshed:
        page.goto(f"{url(hub)}/hub/gpus")
    assert refreshed.value.ok
    page.wait_for_selector("#gpuhub-node-list .gpuhub-node")
    assert page.evaluate("window.isSecureContext")
    save_screenshot(page, "https-gpus")
    page.close()
    assert problems == []


@pytest.mark.parametrize("body", ['{"lease": "l0a1"}', '{"do": "extend", "lease": "l0a1", "hours": 1}'])
def test_changes_need_the_pages_xsrf_token(hub: ServedHub, ada: BrowserContext, body: str) -> None:
    """A cross-site form post with ada's cookies changes nothing, without an XSRF token and with another page's."""
    path = "act" if "do" in body else "leave"
    send = """([path, token, body]) => fetch(path + token, {method: "POST", body: body}).then(r => r.status)"""
    page = ada.new_page()
    page.goto(f"{url(hub)}/hub/gpus")
    own = page.evaluate("window.jhdata.xsrf_token")
    forged = own[:-6] + "AAAAAA"
    for token, is_refused in (("", True), (f"?_xsrf={forged}", True), (f"?_xsrf={own}", False)):
        status = page.evaluate(send, [f"/hub/gpuhub/{path}", token, body])
        assert (status == 403) is is_refused, (token, status)
    page.close()


def test_a_notebook_cannot_act_in_the_hub(hub: ServedHub, ada: BrowserContext) -> None:
    """A script in a notebook sees no cookie of the hub, reads nothing from it, and cannot show it in a frame."""
    page = ada.new_page()
    page.goto(f"https://ada.{NAME}:{hub.port}/user/ada/")
    sent = page.evaluate("JSON.parse(document.body.innerText).cookies")
    assert sent == ["__Host-jupyterhub-user-ada", "_xsrf", "jupyterhub-session-id"]
    for target in (f"{url(hub)}/hub/api/user", f"{url(hub)}/services/broker/api/v1/usage", f"{url(hub)}/hub/home"):
        read = "target => fetch(target, {credentials: 'include'}).then(r => r.text(), () => 'refused')"
        assert page.evaluate(read, target) == "refused", target
    show = """target => new Promise(done => {
        const frame = document.createElement('iframe');
        frame.onload = () => { try { done(frame.contentDocument === null ? 'foreign' : 'blank'); } catch (e) { done('?'); } };
        frame.src = target; document.body.append(frame);
    })"""
    with page.expect_event("console", lambda message: "frame-ancestors" in message.text):
        page.evaluate(show, f"{url(hub)}/hub/home")
    page.close()


def test_other_addresses_redirect_to_the_hubs_name(hub: ServedHub, browser: Browser) -> None:
    """A request to an IP address or to the broker's name is redirected to the hub's name, where cookies are valid."""
    context = browser.new_context()
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.goto(f"https://127.0.0.1:{hub.port}/hub/login?next=/hub/gpus")
    page.wait_for_url(f"{url(hub)}/hub/login?next=/hub/gpus")
    page.goto(f"https://broker--service.{NAME}:{hub.port}/services/broker/")
    page.wait_for_url(f"{url(hub)}/hub/login?next=%2Fhub%2Fgpus")
    page.fill("input[name=username]", "ben")
    page.fill("input[name=password]", hub.password)
    page.click("#login_submit")
    page.wait_for_url(f"{url(hub)}/hub/gpus")
    context.close()


# -- files --------------------------------------------------------------------------------------------------------------


def test_secrets_are_readable_by_root_only(
    hub: ServedHub, ada: BrowserContext, readable: Callable[[Path], list[str]]
) -> None:
    """Databases, keys, tokens and the cookie secret are readable by root only; the authority's certificate by all."""
    names = {file.name for file in hub.paths.state.rglob("*")}
    assert {"jupyterhub.sqlite", "cookie-secret", "proxy-token", "https.pem", "authority.key", "broker.sqlite"} <= names
    assert readable(hub.paths.state) == ["authority.pem"]


@pytest.fixture
def readable() -> Callable[[Path], list[str]]:
    """Return a function that lists the files below a folder to which others than their owner have access."""

    def find(folder: Path) -> list[str]:
        files = [file for file in folder.rglob("*") if stat.S_IMODE(file.stat().st_mode) & 0o077]
        return sorted(str(file.relative_to(folder)) for file in files)

    return find
