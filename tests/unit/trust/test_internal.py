"""Who is let in by whom: the certificates that JupyterHub and gpuhub make, in the TLS of the real servers."""

from __future__ import annotations

import io
import shutil
import ssl
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from jupyterhub.proxy import ConfigurableHTTPProxy
from jupyterhub.utils import make_ssl_context
from tornado.netutil import ssl_options_to_context
from uvicorn.config import create_ssl_context

from gpuhub.errors import SetupError
from gpuhub.trust import internal, notebooks, renewal
from gpuhub.trust.internal import Pair, Store

HEAD, NODE = "10.77.0.1", "10.77.0.11"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """As `gpuhub up` makes it."""
    folder = tmp_path_factory.mktemp("secrets") / "internal"
    assert renewal.ensure(folder, HEAD).renewal is renewal.Renewal.FIRST
    return Store(folder)


@pytest.fixture(scope="module")
def notebook(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root folder of a container of ada's, with her notebook's files."""
    root = tmp_path_factory.mktemp("ada")
    issued = notebooks.issue(store.folder, "ada", NODE)
    with tarfile.open(fileobj=io.BytesIO(issued.archive(1001, 1001))) as archive:
        archive.extractall(root)
    return root


def inside(root: Path, file: str) -> Path:
    return root / file.lstrip("/")


def serve_notebook(root: Path) -> ssl.SSLContext:
    """As jupyter_server does with the files that its environment names."""
    return ssl_options_to_context(
        {
            "certfile": str(inside(root, internal.NOTEBOOK_CERTIFICATE)),
            "keyfile": str(inside(root, internal.NOTEBOOK_KEY)),
            "ca_certs": str(inside(root, internal.NOTEBOOK_TRUST)),
            "cert_reqs": ssl.CERT_REQUIRED,
        },
        server_side=True,
    )


def serve_hub(store: Store) -> ssl.SSLContext:
    """As JupyterHub does."""
    own = store.pair(internal.HUB)
    trusted = store.bundle(internal.HUB_AUTHORITY)
    return make_ssl_context(str(own.key), str(own.certificate), str(trusted), purpose=ssl.Purpose.CLIENT_AUTH)


def serve_broker(store: Store) -> ssl.SSLContext:
    """As uvicorn does with the broker's options."""
    options = store.broker_options()
    return create_ssl_context(
        certfile=options["ssl_certfile"],
        keyfile=options["ssl_keyfile"],
        password=None,
        ssl_version=ssl.PROTOCOL_TLS_SERVER,
        cert_reqs=options["ssl_cert_reqs"],
        ca_certs=options["ssl_ca_certs"],
        ciphers=None,
    )


def client(trusted: Path, own: Pair | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def of_notebook(root: Path, trusted: str) -> ssl.SSLContext:
    own = Pair(inside(root, internal.NOTEBOOK_CERTIFICATE), inside(root, internal.NOTEBOOK_KEY))
    return client(inside(root, trusted), own)


def of_proxy(store: Store) -> ssl.SSLContext:
    return client(store.bundle("proxy-targets"), store.pair(internal.PROXY_CLIENT))


def talk(server: ssl.SSLContext, one: ssl.SSLContext, address: str) -> bytes:
    """What comes back over a connection in memory; raises what either side says against it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    there = server.wrap_bio(to_server, to_client, server_side=True)
    here = one.wrap_bio(to_client, to_server, server_hostname=address)
    waiting = {here.do_handshake, there.do_handshake}
    while waiting:
        for side in list(waiting):
            try:
                side()
                waiting.discard(side)
            except ssl.SSLWantReadError:
                continue
    # With TLS 1.3 a client hears only now what the server thinks of its certificate.
    there.write(b"hello")
    return here.read(5)


def test_whoever_works_together_understands_each_other(store: Store, notebook: Path) -> None:
    """Every connection that there is, with the certificates that its two ends use."""
    assert talk(serve_notebook(notebook), store.to_notebooks(), NODE) == b"hello"
    assert talk(serve_notebook(notebook), of_proxy(store), NODE) == b"hello"
    assert talk(serve_hub(store), of_proxy(store), HEAD) == b"hello"
    assert talk(serve_hub(store), store.to_hub(), HEAD) == b"hello"
    assert talk(serve_hub(store), of_notebook(notebook, internal.NOTEBOOK_TRUST), HEAD) == b"hello"
    assert talk(serve_broker(store), of_proxy(store), HEAD) == b"hello"
    assert talk(serve_broker(store), store.to_broker(), HEAD) == b"hello"
    assert talk(serve_broker(store), of_notebook(notebook, internal.NOTEBOOK_BROKER_TRUST), HEAD) == b"hello"


def test_another_users_notebook_is_refused(store: Store, notebook: Path, tmp_path: Path) -> None:
    """Its certificate is good for hub and broker alone."""
    with tarfile.open(fileobj=io.BytesIO(notebooks.issue(store.folder, "ben", NODE).archive(1002, 1002))) as archive:
        archive.extractall(tmp_path)
    own = Pair(inside(tmp_path, internal.NOTEBOOK_CERTIFICATE), inside(tmp_path, internal.NOTEBOOK_KEY))
    ben = client(store.pair(internal.NOTEBOOKS_AUTHORITY).certificate, own)
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        talk(serve_notebook(notebook), ben, NODE)


def test_nobody_is_let_in_without_a_certificate(store: Store, notebook: Path) -> None:
    """Neither by a notebook, nor by the hub, nor by the broker."""
    for server, authority, address in (
        (serve_notebook(notebook), internal.NOTEBOOKS_AUTHORITY, NODE),
        (serve_hub(store), internal.HUB_AUTHORITY, HEAD),
        (serve_broker(store), internal.SERVICES_AUTHORITY, HEAD),
    ):
        with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
            talk(server, client(store.pair(authority).certificate, None), address)


def test_a_notebook_cannot_pass_for_hub_broker_or_a_notebook_elsewhere(store: Store, notebook: Path) -> None:
    """Whoever looks for those refuses its certificate: by its authority, and by its address."""
    server = serve_notebook(notebook)
    for one, address, reason in (
        (of_notebook(notebook, internal.NOTEBOOK_TRUST), NODE, "unable to get local issuer certificate"),
        (of_notebook(notebook, internal.NOTEBOOK_BROKER_TRUST), NODE, "unable to get local issuer certificate"),
        (store.to_broker(), NODE, "unable to get local issuer certificate"),
        (of_proxy(store), HEAD, "IP address mismatch"),
        (of_proxy(store), "10.77.0.12", "IP address mismatch"),
    ):
        with pytest.raises(ssl.SSLCertVerificationError, match=reason):
            talk(server, one, address)


def test_the_proxy_gets_jupyterhubs_own_options_and_trusts_the_broker_too(store: Store) -> None:
    """All but the bundle of whom it trusts."""
    pairs = {name: store.pair(name) for name in (internal.PROXY_API, internal.PROXY_CLIENT)}
    app = SimpleNamespace(
        internal_proxy_certs={
            name: {"keyfile": str(pair.key), "certfile": str(pair.certificate)} for name, pair in pairs.items()
        },
        internal_trust_bundles={name: str(store.bundle(name)) for name in internal.AUTHORITIES},
    )
    theirs = ConfigurableHTTPProxy._get_ssl_options(SimpleNamespace(app=app))
    targets = theirs.index("--client-ssl-ca") + 1
    assert theirs[targets] == str(store.folder / "proxy-client-ca_trust.crt")
    theirs[targets] = str(store.folder / "proxy-targets_trust.crt")
    assert store.proxy_flags() == theirs
    assert set(subjects(Path(theirs[targets]))) == {"hub-ca", "notebooks-ca", "services-ca"}
    assert all(Path(word).is_file() for word in theirs if word.startswith("/"))


def subjects(bundle: Path) -> list[str]:
    return [
        one.subject.rfc4514_string().removeprefix("CN=") for one in x509.load_pem_x509_certificates(bundle.read_bytes())
    ]


def test_a_notebooks_files_are_its_users_alone(store: Store) -> None:
    """Owner and mode of each; nothing else is put into the container."""
    issued = notebooks.issue(store.folder, "ada", NODE)
    with tarfile.open(fileobj=io.BytesIO(issued.archive(1001, 1002))) as archive:
        entries = {f"/{entry.name}": (entry.uid, entry.gid, oct(entry.mode)) for entry in archive}
    own = (
        internal.NOTEBOOK_KEY,
        internal.NOTEBOOK_CERTIFICATE,
        internal.NOTEBOOK_TRUST,
        internal.NOTEBOOK_BROKER_TRUST,
    )
    assert entries == {
        "/etc/gpuhub": (0, 0, "0o755"),
        "/etc/gpuhub/tls": (1001, 1002, "0o500"),
        **dict.fromkeys(own, (1001, 1002, "0o400")),
    }


def test_a_notebooks_certificate_names_its_node_and_ends_with_its_authority(store: Store) -> None:
    """And nothing else; every start has a key of its own."""
    issued = notebooks.issue(store.folder, "ada", NODE)
    certificate = x509.load_pem_x509_certificate(issued.certificate)
    authority = x509.load_pem_x509_certificate(store.pair(internal.NOTEBOOKS_AUTHORITY).certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [NODE]
    assert certificate.not_valid_after_utc == authority.not_valid_after_utc
    assert certificate.not_valid_before_utc < datetime.now(UTC)
    assert notebooks.issue(store.folder, "ada", NODE).key != issued.key


def test_missing_certificates_are_told(tmp_path: Path) -> None:
    """With what makes them."""
    for use in (Store(tmp_path).to_broker, lambda: notebooks.issue(tmp_path, "ada", NODE)):
        with pytest.raises(SetupError, match=r"cannot be used .*sudo gpuhub up` makes them"):
            use()


def test_what_was_made_is_left_alone(store: Store) -> None:
    """Bringing it up again changes no file."""
    before = renewal.fingerprint(store.folder)
    assert renewal.ensure(store.folder, HEAD).renewal is renewal.Renewal.NOTHING
    assert renewal.fingerprint(store.folder) == before


def test_another_address_gets_other_certificates_of_the_same_authorities(
    store: Store, notebook: Path, tmp_path: Path
) -> None:
    """So notebooks that run go on."""
    moved = Store(tmp_path / "internal")
    shutil.copytree(store.folder, moved.folder)
    index = moved.folder / "certipy.json"
    index.write_text(index.read_text(encoding="utf-8").replace(str(store.folder), str(moved.folder)), encoding="utf-8")
    done = renewal.ensure(moved.folder, "10.77.0.2")
    assert done.reason == "the head node's address is 10.77.0.2 now"
    assert renewal.fingerprint(moved.folder) != renewal.fingerprint(store.folder)
    assert talk(serve_hub(moved), of_notebook(notebook, internal.NOTEBOOK_TRUST), "10.77.0.2") == b"hello"
    assert talk(serve_broker(moved), of_notebook(notebook, internal.NOTEBOOK_BROKER_TRUST), "10.77.0.2") == b"hello"
    assert talk(serve_notebook(notebook), moved.to_notebooks(), NODE) == b"hello"


@pytest.mark.parametrize("harm", ["index", "key"])
def test_what_a_kill_left_half_made_is_made_anew(store: Store, tmp_path: Path, harm: str) -> None:
    """An index cut short, or an authority without its key."""
    broken = Store(tmp_path / "internal")
    shutil.copytree(store.folder, broken.folder)
    if harm == "index":
        (broken.folder / "certipy.json").write_text('{"hub-ca": {', encoding="utf-8")
    else:
        broken.pair(internal.HUB_AUTHORITY).key.unlink()
    assert renewal.ensure(broken.folder, HEAD).renewal is not renewal.Renewal.NOTHING
    assert renewal.ensure(broken.folder, HEAD).renewal is renewal.Renewal.NOTHING
    assert talk(serve_broker(broken), broken.to_broker(), HEAD) == b"hello"
