"""Logging in: which URL is a hub's, whose token it is, where it is kept, and which hub is used."""

from __future__ import annotations

import io
import json
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from gpu_launch.cli.connection import credentials
from gpu_launch.errors import UsageError
from tests.support.hub.fake_hub import TOKEN, FakeHub, served
from tests.support.tls import make_certificate


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A laptop that has not logged in anywhere: its file of hubs."""
    for name in ("GPUHUB_URL", "GPUHUB_TOKEN", "JUPYTERHUB_API_TOKEN", "GPUHUB_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return credentials.get_config_file()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub."""
    with served(FakeHub(home=tmp_path / "home")) as found:
        yield found


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """A file with Ada's token."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return str(tmp_path / "token")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://gpu.example.org", "https://gpu.example.org"),
        ("gpu.example.org/", "https://gpu.example.org"),
        ("https://gpu.example.org:8443/lab/hub/home", "https://gpu.example.org:8443/lab"),
        ("https://gpu.example.org/hub/token", "https://gpu.example.org"),
        ("https://gpu.example.org/user/ada/lab", "https://gpu.example.org"),
        ("https://gpu.example.org/hubble", "https://gpu.example.org/hubble"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("https://[fd00::1]:8443", "https://[fd00::1]:8443"),
    ],
)
def test_urls_are_normalized(text: str, url: str) -> None:
    """As people copy them from a browser."""
    assert credentials.parse_url(text) == url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://gpu.example.org", "must not go over plain http; use https://gpu.example.org"),
        ("ftp://gpu.example.org", "the hub's URL is needed"),
        ("https://", "the hub's URL is needed"),
        ("https://gpu.example.org:99999", "the port is not a number"),
        ("https://ada:pw@gpu.example.org", "leave them out"),
    ],
)
def test_invalid_urls_are_refused(text: str, said: str) -> None:
    """Before anything is sent."""
    with pytest.raises(UsageError, match=said):
        credentials.parse_url(text)


def test_login_is_stored_for_its_owner_only(
    hub: FakeHub, laptop: Path, token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checked with hub and broker, kept with mode 0600, used by the next command, forgotten by logout."""
    assert main.run_command(["login", hub.url, "--token-file", token_file]) == 0
    assert capsys.readouterr().out == f"Logged in to {hub.url} as ada. The token is valid until 2027-02-20.\n"
    assert [line for line in hub.requests if "usage" in line or "user" in line] == [
        "GET /hub/api/user", "GET /usage", "GET /hub/api/user", "GET /hub/api/users/ada/tokens/a7"
    ]  # fmt: skip
    assert stat.S_IMODE(laptop.stat().st_mode) == 0o600
    assert stat.S_IMODE(laptop.parent.stat().st_mode) == 0o700
    assert main.run_command(["ps"]) == 0
    assert main.run_command(["hubs", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out[shown.out.index("[") :]) == [{"hub": hub.url, "user": "ada", "is_default": True}]
    assert TOKEN not in shown.out + shown.err
    assert main.run_command(["logout"]) == 0
    assert TOKEN not in laptop.read_text()
    assert main.run_command(["ps"]) == 2
    assert "You are not logged in" in capsys.readouterr().err


def test_token_that_never_expires(hub: FakeHub, token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An older hub issued such tokens: nothing is said about their end."""
    hub.token_ends = None
    assert main.run_command(["login", hub.url, "--token-file", token_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"hub": hub.url, "user": "ada", "expires_at": None}


def test_expired_token_names_the_remedy(
    hub: FakeHub, token_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What to do, and not only that the hub does not know it."""
    assert main.run_command(["login", hub.url, "--token-file", token_file]) == 0
    monkeypatch.setattr("tests.support.hub.fake_hub.TOKEN", "another")
    assert main.run_command(["ps"]) == 1
    assert "Log in again with a new token: gpu-launch login" in capsys.readouterr().err


def test_token_is_read_from_stdin(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--token-file -`, and a pipe."""
    for words in (["login", hub.url, "--token-file", "-"], ["login", hub.url]):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{TOKEN}\n"))
        assert main.run_command(words) == 0
    assert credentials.choose_hub(None).token == TOKEN


def test_a_token_of_another_hub_is_refused(
    hub: FakeHub, laptop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said with the page where one is made; the token is not in the text, and nothing is kept."""
    (tmp_path / "other").write_text("somebody-elses-token")
    assert main.run_command(["login", hub.url, "--token-file", str(tmp_path / "other")]) == 1
    said = capsys.readouterr().err
    assert said == f"gpu-launch: {hub.url} does not know this token: request one at {hub.url}/hub/token.\n"
    assert not laptop.exists()


def test_hub_without_a_broker_is_detected(hub: FakeHub, token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another JupyterHub."""
    hub.has_broker = False
    assert main.run_command(["login", hub.url, "--token-file", token_file]) == 1
    assert f"The hub at {hub.url} has no GPU broker" in capsys.readouterr().err


def test_token_is_not_sent_to_a_server_that_is_not_a_hub(token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is asked for its version first, without the token."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                seen.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert main.run_command(["login", url, "--token-file", token_file]) == 1
        thread.join()
    assert capsys.readouterr().err == f"gpu-launch: There is no JupyterHub at {url} (HTTP status 200): check the URL.\n"
    assert seen
    assert TOKEN.encode() not in seen[0]


def test_unreachable_hub_is_reported_in_one_line(token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    assert main.run_command(["login", url, "--token-file", token_file]) == 1
    assert capsys.readouterr().err == f"gpu-launch: {url} cannot be reached: connection refused. Check the URL.\n"


def test_untrusted_certificate_is_refused_without_ca(
    tmp_path: Path, token_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that nobody trusts is refused with what to do; with --ca it is trusted, and stays so for other commands."""
    files = make_certificate(tmp_path)
    with served(FakeHub(home=tmp_path / "home"), ssl_files=files) as hub:
        words = ["login", hub.url, "--token-file", token_file]
        assert main.run_command(words) == 1
        said = capsys.readouterr().err
        assert f"The certificate of {hub.url} is not trusted (" in said
        assert "give it with --ca FILE" in said
        assert main.run_command([*words, "--ca", token_file]) == 2
        assert "The file given with --ca contains no certificate in PEM form." in capsys.readouterr().err
        assert main.run_command([*words, "--ca", str(files[0])]) == 0
        files[0].unlink()
        assert main.run_command(["ps", "--json"]) == 0
        assert capsys.readouterr().out.endswith("[]\n")
        plain = hub.url.replace("https", "http")
        assert main.run_command(["login", plain, "--token-file", token_file]) == 1
    with served(FakeHub(home=tmp_path / "home")) as hub:
        assert main.run_command(["login", hub.url.replace("http", "https"), "--token-file", token_file]) == 1
        assert "does not speak TLS" in capsys.readouterr().err


def _save_hubs(path: Path, **tokens: str) -> None:
    known = credentials.KnownHubs()
    for name, token in tokens.items():
        url = f"https://{name}.example.org"
        known = known.with_hub(
            credentials.Hub(url=url, broker_url=credentials.build_broker_url(url), token=token, user=name)
        )
    credentials.save_hubs(path, known)


def test_choice_of_the_hub(laptop: Path) -> None:
    """The last one logged in to; another by name; the environment's before all; a notebook's own in its container."""
    _save_hubs(laptop, one="t1", two="t2")
    assert credentials.choose_hub(None, {}).token == "t2"
    assert credentials.choose_hub("https://one.example.org/", {}).token == "t1"
    assert credentials.choose_hub(None, {"GPUHUB_URL": "https://one.example.org"}).token == "t1"
    given = credentials.choose_hub(None, {"GPUHUB_URL": "https://three.example.org", "GPUHUB_TOKEN": "t3"})
    assert (given.token, given.broker_url) == ("t3", "https://three.example.org/services/broker")
    notebook = {"JUPYTERHUB_API_TOKEN": "t4", "GPUHUB_BROKER_URL": "http://10.77.0.1:8010/services/broker"}
    notebook["JUPYTERHUB_PUBLIC_HUB_URL"] = "https://gpus.lan/hub/"
    inside = credentials.choose_hub(None, notebook)
    assert (inside.token, inside.broker_url) == ("t4", "http://10.77.0.1:8010/services/broker")
    assert inside.page_url == "https://gpus.lan/hub/"
    assert credentials.choose_hub("https://one.example.org", notebook).token == "t1"


@pytest.mark.parametrize(
    ("wanted", "environ", "said"),
    [
        (None, {"GPUHUB_TOKEN": "t"}, "GPUHUB_TOKEN is set, but GPUHUB_URL is not"),
        ("https://three.example.org", {}, "You are not logged in to https://three.example.org"),
    ],
)
def test_hub_without_credentials_is_refused(
    laptop: Path, wanted: str | None, environ: dict[str, str], said: str
) -> None:
    """A kept token goes to its own hub alone."""
    _save_hubs(laptop, one="t1")
    with pytest.raises(UsageError, match=said):
        credentials.choose_hub(wanted, environ)


def test_repr_does_not_contain_the_token() -> None:
    """Tracebacks and logs show values."""
    hub = credentials.Hub(url="https://h", broker_url="https://h/b", token="secret-token", ca="PEM")
    assert "secret-token" not in repr(hub)


def test_corrupt_credentials_file_error_has_a_remedy(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rather than a traceback."""
    laptop.parent.mkdir(parents=True)
    laptop.write_text("{")
    assert main.run_command(["ps", "--json"]) == 1
    assert json.loads(capsys.readouterr().err) == {"error": f"{laptop} cannot be read: remove it and log in again."}


def test_redirects_are_not_followed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The token would go to whoever it names."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as other:
        target = f"http://127.0.0.1:{other.getsockname()[1]}/services/broker/api/v1/cluster"

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                seen.append(connection.recv(65536))
                head = f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("GPUHUB_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv("GPUHUB_TOKEN", TOKEN)
        assert main.run_command(["status"]) == 1
        thread.join()
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
    assert "HTTP status 302" in capsys.readouterr().err
