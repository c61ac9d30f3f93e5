"""Internal certificates in the TLS of the real servers: who is let in by whom, and when they are renewed."""

from __future__ import annotations

import io
import shutil
import ssl
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from jupyterhub.proxy import ConfigurableHTTPProxy
from jupyterhub.utils import make_ssl_context
from tornado.netutil import ssl_options_to_context
from uvicorn.config import create_ssl_context

from gpuhub.common.errors import SetupError
from gpuhub.tls import internal_certificates, notebook_certificate
from gpuhub.tls.internal_certificates import (
    AUTHORITIES,
    CERTIFICATES,
    RENEW_BEFORE,
    CertificateFiles,
    CertificateInfo,
    CertificateStore,
    RenewalScope,
    decide_renewal,
)

HEAD, NODE = "10.77.0.1", "10.77.0.11"
NOW = datetime(2026, 11, 21, tzinfo=UTC)
LATER = NOW + timedelta(days=5 * 365)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CertificateStore:
    """As `gpuhub up` makes it."""
    folder = tmp_path_factory.mktemp("secrets") / "internal"
    assert (
        internal_certificates.ensure_internal_certificates(folder, HEAD).scope
        is internal_certificates.RenewalScope.FIRST
    )
    return CertificateStore(folder)


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    # Debian 12's Python has no filters, later ones warn where none is set.
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder)


@pytest.fixture(scope="module")
def notebook(store: CertificateStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root folder of a container of ada's, with her notebook's files."""
    root = tmp_path_factory.mktemp("ada")
    issued = notebook_certificate.issue_certificate(store.folder, "ada", NODE)
    with tarfile.open(fileobj=io.BytesIO(issued.build_archive(1001, 1001))) as archive:
        unpack(archive, root)
    return root


def map_container_path(root: Path, file: str) -> Path:
    return root / file.lstrip("/")


def serve_notebook(root: Path) -> ssl.SSLContext:
    """As jupyter_server does with the files that its environment names."""
    return ssl_options_to_context(
        {
            "certfile": str(map_container_path(root, internal_certificates.NOTEBOOK_CERTIFICATE)),
            "keyfile": str(map_container_path(root, internal_certificates.NOTEBOOK_KEY)),
            "ca_certs": str(map_container_path(root, internal_certificates.NOTEBOOK_TRUST)),
            "cert_reqs": ssl.CERT_REQUIRED,
        },
        server_side=True,
    )


def serve_hub(store: CertificateStore) -> ssl.SSLContext:
    """As JupyterHub does."""
    own = store.files(internal_certificates.HUB)
    trusted = store.bundle(internal_certificates.HUB_AUTHORITY)
    return make_ssl_context(str(own.key), str(own.certificate), str(trusted), purpose=ssl.Purpose.CLIENT_AUTH)


def serve_broker(store: CertificateStore) -> ssl.SSLContext:
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


def client(trusted: Path, own: CertificateFiles | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def build_notebook_context(root: Path, trusted: str) -> ssl.SSLContext:
    own = CertificateFiles(
        map_container_path(root, internal_certificates.NOTEBOOK_CERTIFICATE),
        map_container_path(root, internal_certificates.NOTEBOOK_KEY),
    )
    return client(map_container_path(root, trusted), own)


def build_proxy_context(store: CertificateStore) -> ssl.SSLContext:
    return client(store.bundle("proxy-targets"), store.files(internal_certificates.PROXY_CLIENT))


def exchange_hello(server: ssl.SSLContext, one: ssl.SSLContext, address: str) -> bytes:
    """Return the answer over a connection in memory; raise an error of either side."""
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
    # With TLS 1.3 a client learns only now whether the server accepts its certificate.
    there.write(b"hello")
    return here.read(5)


@pytest.mark.process
def test_all_peers_connect_with_their_certificates(store: CertificateStore, notebook: Path) -> None:
    """Every connection that there is, with the certificates that its two ends use."""
    assert exchange_hello(serve_notebook(notebook), store.build_notebook_context(), NODE) == b"hello"
    assert exchange_hello(serve_notebook(notebook), build_proxy_context(store), NODE) == b"hello"
    assert exchange_hello(serve_hub(store), build_proxy_context(store), HEAD) == b"hello"
    assert exchange_hello(serve_hub(store), store.build_hub_context(), HEAD) == b"hello"
    assert (
        exchange_hello(serve_hub(store), build_notebook_context(notebook, internal_certificates.NOTEBOOK_TRUST), HEAD)
        == b"hello"
    )
    assert exchange_hello(serve_broker(store), build_proxy_context(store), HEAD) == b"hello"
    assert exchange_hello(serve_broker(store), store.build_broker_context(), HEAD) == b"hello"
    assert (
        exchange_hello(
            serve_broker(store), build_notebook_context(notebook, internal_certificates.NOTEBOOK_BROKER_TRUST), HEAD
        )
        == b"hello"
    )


def test_notebook_of_another_user_is_refused(store: CertificateStore, notebook: Path, tmp_path: Path) -> None:
    """A notebook's certificate is valid only for connections with hub and broker."""
    with tarfile.open(
        fileobj=io.BytesIO(notebook_certificate.issue_certificate(store.folder, "ben", NODE).build_archive(1002, 1002))
    ) as archive:
        unpack(archive, tmp_path)
    own = CertificateFiles(
        map_container_path(tmp_path, internal_certificates.NOTEBOOK_CERTIFICATE),
        map_container_path(tmp_path, internal_certificates.NOTEBOOK_KEY),
    )
    ben = client(store.files(internal_certificates.NOTEBOOKS_AUTHORITY).certificate, own)
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        exchange_hello(serve_notebook(notebook), ben, NODE)


def test_a_workers_certificate_is_that_of_a_client_alone(store: CertificateStore, tmp_path: Path) -> None:
    """The broker accepts it; hub and proxy refuse it as that of a notebook, under any address."""
    issued = notebook_certificate.issue_certificate(store.folder, "ada")
    with tarfile.open(fileobj=io.BytesIO(issued.build_archive(1001, 1001))) as archive:
        unpack(archive, tmp_path)
    own = build_notebook_context(tmp_path, internal_certificates.NOTEBOOK_BROKER_TRUST)
    assert exchange_hello(serve_broker(store), own, HEAD) == b"hello"
    for one in (store.build_notebook_context(), build_proxy_context(store)):
        with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
            exchange_hello(serve_notebook(tmp_path), one, NODE)


def test_connections_without_client_certificate_are_refused(store: CertificateStore, notebook: Path) -> None:
    """Neither by a notebook, nor by the hub, nor by the broker."""
    for server, authority, address in (
        (serve_notebook(notebook), internal_certificates.NOTEBOOKS_AUTHORITY, NODE),
        (serve_hub(store), internal_certificates.HUB_AUTHORITY, HEAD),
        (serve_broker(store), internal_certificates.SERVICES_AUTHORITY, HEAD),
    ):
        with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
            exchange_hello(server, client(store.files(authority).certificate, None), address)


def test_notebook_cannot_impersonate_hub_broker_or_other_notebooks(store: CertificateStore, notebook: Path) -> None:
    """Clients of hub and broker refuse the certificate, by its authority and by its address."""
    server = serve_notebook(notebook)
    for one, address, reason in (
        (
            build_notebook_context(notebook, internal_certificates.NOTEBOOK_TRUST),
            NODE,
            "unable to get local issuer certificate",
        ),
        (
            build_notebook_context(notebook, internal_certificates.NOTEBOOK_BROKER_TRUST),
            NODE,
            "unable to get local issuer certificate",
        ),
        (store.build_broker_context(), NODE, "unable to get local issuer certificate"),
        (build_proxy_context(store), HEAD, "IP address mismatch"),
        (build_proxy_context(store), "10.77.0.12", "IP address mismatch"),
    ):
        with pytest.raises(ssl.SSLCertVerificationError, match=reason):
            exchange_hello(server, one, address)


def test_proxy_options_also_trust_the_broker(store: CertificateStore) -> None:
    """All but the bundle of whom it trusts."""
    pairs = {name: store.files(name) for name in (internal_certificates.PROXY_API, internal_certificates.PROXY_CLIENT)}
    app = SimpleNamespace(
        internal_proxy_certs={
            name: {"keyfile": str(pair.key), "certfile": str(pair.certificate)} for name, pair in pairs.items()
        },
        internal_trust_bundles={name: str(store.bundle(name)) for name in internal_certificates.AUTHORITIES},
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


def test_notebook_certificate_files_are_private(store: CertificateStore) -> None:
    """Owner and mode of each; nothing else is put into the container."""
    issued = notebook_certificate.issue_certificate(store.folder, "ada", NODE)
    with tarfile.open(fileobj=io.BytesIO(issued.build_archive(1001, 1002))) as archive:
        entries = {f"/{entry.name}": (entry.uid, entry.gid, oct(entry.mode)) for entry in archive}
    own = (
        internal_certificates.NOTEBOOK_KEY,
        internal_certificates.NOTEBOOK_CERTIFICATE,
        internal_certificates.NOTEBOOK_TRUST,
        internal_certificates.NOTEBOOK_BROKER_TRUST,
    )
    assert entries == {
        "/etc/gpuhub": (0, 0, "0o755"),
        "/etc/gpuhub/tls": (1001, 1002, "0o500"),
        **dict.fromkeys(own, (1001, 1002, "0o400")),
    }


def test_notebook_certificate_has_node_name_and_authority_expiry(store: CertificateStore) -> None:
    """The container has no other files, and every start has a new key."""
    issued = notebook_certificate.issue_certificate(store.folder, "ada", NODE)
    certificate = x509.load_pem_x509_certificate(issued.certificate)
    authority = x509.load_pem_x509_certificate(
        store.files(internal_certificates.NOTEBOOKS_AUTHORITY).certificate.read_bytes()
    )
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [NODE]
    assert certificate.not_valid_after_utc == authority.not_valid_after_utc
    assert certificate.not_valid_before_utc < datetime.now(UTC)
    assert notebook_certificate.issue_certificate(store.folder, "ada", NODE).key != issued.key


def test_missing_certificates_are_reported(tmp_path: Path) -> None:
    """With what makes them."""
    for use in (
        CertificateStore(tmp_path).build_broker_context,
        lambda: notebook_certificate.issue_certificate(tmp_path, "ada", NODE),
    ):
        with pytest.raises(SetupError, match=r"cannot be used .*sudo gpuhub up` creates them"):
            use()


def test_existing_certificates_are_kept(store: CertificateStore) -> None:
    """Bringing it up again changes no file."""
    before = internal_certificates.hash_certificates(store.folder)
    assert (
        internal_certificates.ensure_internal_certificates(store.folder, HEAD).scope
        is internal_certificates.RenewalScope.NOTHING
    )
    assert internal_certificates.hash_certificates(store.folder) == before


def test_address_change_renews_certificates_and_keeps_authorities(
    store: CertificateStore, notebook: Path, tmp_path: Path
) -> None:
    """So notebooks that run continue."""
    moved = CertificateStore(tmp_path / "internal")
    shutil.copytree(store.folder, moved.folder)
    index = moved.folder / "certipy.json"
    index.write_text(index.read_text(encoding="utf-8").replace(str(store.folder), str(moved.folder)), encoding="utf-8")
    done = internal_certificates.ensure_internal_certificates(moved.folder, "10.77.0.2")
    assert done.reason == "the head node's address is 10.77.0.2 now"
    assert internal_certificates.hash_certificates(moved.folder) != internal_certificates.hash_certificates(
        store.folder
    )
    assert (
        exchange_hello(
            serve_hub(moved), build_notebook_context(notebook, internal_certificates.NOTEBOOK_TRUST), "10.77.0.2"
        )
        == b"hello"
    )
    assert (
        exchange_hello(
            serve_broker(moved),
            build_notebook_context(notebook, internal_certificates.NOTEBOOK_BROKER_TRUST),
            "10.77.0.2",
        )
        == b"hello"
    )
    assert exchange_hello(serve_notebook(notebook), moved.build_notebook_context(), NODE) == b"hello"


@pytest.mark.parametrize("harm", ["index", "key"])
def test_incomplete_certificates_are_created_again(store: CertificateStore, tmp_path: Path, harm: str) -> None:
    """An index cut short, or an authority without its key."""
    broken = CertificateStore(tmp_path / "internal")
    shutil.copytree(store.folder, broken.folder)
    if harm == "index":
        (broken.folder / "certipy.json").write_text('{"hub-ca": {', encoding="utf-8")
    else:
        broken.files(internal_certificates.HUB_AUTHORITY).key.unlink()
    assert (
        internal_certificates.ensure_internal_certificates(broken.folder, HEAD).scope
        is not internal_certificates.RenewalScope.NOTHING
    )
    assert (
        internal_certificates.ensure_internal_certificates(broken.folder, HEAD).scope
        is internal_certificates.RenewalScope.NOTHING
    )
    assert exchange_hello(serve_broker(broken), broken.build_broker_context(), HEAD) == b"hello"


def build_certificates(**changes: CertificateInfo | None) -> dict[str, CertificateInfo | None]:
    """Return valid certificates of a head node at 10.77.0.1, except for `changes` (with _ for -)."""
    good: dict[str, CertificateInfo | None] = dict.fromkeys(AUTHORITIES, CertificateInfo(ends=LATER))
    good |= dict.fromkeys(CERTIFICATES, CertificateInfo(ends=LATER, names=frozenset({"IP:10.77.0.1", "IP:127.0.0.1"})))
    return good | {name.replace("_", "-"): one for name, one in changes.items()}


def build_expiring_certificate(left: timedelta) -> CertificateInfo:
    return CertificateInfo(ends=NOW + left, names=frozenset({"IP:10.77.0.1"}))


@pytest.mark.parametrize(
    ("changes", "renewal", "reason"),
    [
        ({}, RenewalScope.NOTHING, ""),
        (
            dict.fromkeys((name.replace("-", "_") for name in AUTHORITIES), None),
            RenewalScope.FIRST,
            "there are none yet",
        ),
        ({"hub_ca": None}, RenewalScope.EVERYTHING, "hub-ca is missing"),
        ({"broker": None}, RenewalScope.CERTIFICATES, "broker is missing"),
        ({"broker": build_expiring_certificate(RENEW_BEFORE)}, RenewalScope.NOTHING, ""),
        (
            {"broker": build_expiring_certificate(RENEW_BEFORE - timedelta(days=1))},
            RenewalScope.CERTIFICATES,
            "broker ends on 2026-12-20",
        ),
        (
            {"services_ca": build_expiring_certificate(timedelta(days=-1))},
            RenewalScope.EVERYTHING,
            "services-ca ends on 2026-11-20",
        ),
        (
            {"broker": None, "notebooks_ca": build_expiring_certificate(timedelta(days=3))},
            RenewalScope.EVERYTHING,
            "notebooks-ca ends on 2026-11-24",
        ),
    ],
)
def test_missing_or_expiring_certificates_are_renewed(
    changes: dict[str, CertificateInfo | None], renewal: RenewalScope, reason: str
) -> None:
    """New authorities are created only if necessary, because running notebooks do not trust them."""
    decision = decide_renewal(build_certificates(**changes), "10.77.0.1", NOW)
    assert (decision.scope, decision.reason) == (renewal, reason)


def test_ipv6_addresses_are_compared_in_normal_form() -> None:
    """Certificates hold the shortest one."""
    same = CertificateInfo(ends=LATER, names=frozenset({"IP:fd00::1"}))
    decision = decide_renewal(
        build_certificates(**{name.replace("-", "_"): same for name in CERTIFICATES}), "FD00:0::1", NOW
    )
    assert decision.scope is RenewalScope.NOTHING


@pytest.mark.parametrize("address", ["10.77.0.2", "fd00::1"])
def test_address_change_requires_new_certificates(address: str) -> None:
    """The authorities stay."""
    decision = decide_renewal(build_certificates(), address, NOW)
    assert (decision.scope, decision.reason) == (RenewalScope.CERTIFICATES, f"the head node's address is {address} now")
