"""The tables of cluster.toml as frozen values, each refusing what is wrong within it; `settings` joins them."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, field_validator, model_validator

from gpuhub import names
from gpuhub.quantities import Size, Span, Span0
from gpuhub.storage.options import check_options, is_read_only

NodeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
ProfileName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
UserName = Annotated[str, StringConstraints(pattern=f"^{names.USERNAME_PATTERN}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=300)]
HostName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$")
]
Label = Annotated[str, StringConstraints(min_length=1, max_length=64)]
#: What Slurm calls nodes, partitions, accounts, QOS, reservations and types of GPUs.
SlurmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@+-]{0,63}$")]
Driver = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$")]
Capability = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$")]


def as_float(value: object) -> object:
    """A whole number where a number is meant: TOML tells `4` from `4.0`."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def as_tuple(value: object) -> object:
    """TOML's lists as frozen values have them."""
    return tuple(value) if isinstance(value, list) else value


T = TypeVar("T")
#: A number, written with or without a point.
Number = Annotated[float, BeforeValidator(as_float)]
#: A list in the file, frozen here.
Many = Annotated[tuple[T, ...], BeforeValidator(as_tuple)]


class Value(BaseModel):
    """Base of every setting: frozen, unknown keys and wrong types refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Tls(Value):
    """Files for mutual TLS with a node's Docker daemon."""

    ca: Path
    cert: Path
    key: Path

    @field_validator("ca", "cert", "key", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value


class CardCount(Value):
    """GPUs that a node is known to have, for checks before the node is asked."""

    model: Text
    memory: Size
    count: Annotated[int, Field(ge=1, le=64)] = 1


class Node(Value):
    """A machine with a Docker daemon and GPUs."""

    name: NodeName
    #: Where the other nodes and the head node reach it: an IP address.
    address: str
    #: `unix:///path`, `ssh://user@host[:port]` or `tcp://host:2376` with `tls`; empty where no container runs there.
    docker: str = ""
    tls: Tls | None = None
    #: What the administrator expects there; empty: whatever NVML reports.
    gpus: Many[CardCount] | None = None
    #: Slurm's name of it; None: the same.
    slurm: SlurmName | None = None
    #: Gangs prefer nodes on one switch, then in one rack; None: not said.
    switch: Label | None = None
    rack: Label | None = None
    #: What the limits of the containers there may add up to; None: nobody counts.
    cpus: Annotated[Number, Field(gt=0, le=4096)] | None = None
    memory: Size | None = None

    @property
    def slurm_name(self) -> str:
        """What Slurm calls it."""
        return self.slurm or self.name

    @field_validator("address")
    @classmethod
    def _address(cls, value: str) -> str:
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f'{value!r} is no IP address: write one such as "192.168.1.21"') from None
        if address.is_unspecified or address.is_multicast:
            raise ValueError(f"{value!r} is not the address of one machine")
        return value

    @field_validator("docker")
    @classmethod
    def _docker(cls, value: str) -> str:
        url = urlsplit(value)
        if url.scheme == "unix" and not url.netloc and url.path.startswith("/"):
            return value
        if url.scheme in {"ssh", "tcp"} and url.hostname and url.path in {"", "/"}:
            return value
        raise ValueError(
            f'{value!r} is no Docker URL: write "unix:///run/docker.sock", "ssh://user@host" '
            'or "tcp://host:2376" with tls'
        )

    @model_validator(mode="after")
    def _no_plain_tcp(self) -> Self:
        if self.docker.startswith("tcp://") and self.tls is None:
            raise ValueError(
                f"docker = {self.docker!r} has no tls (node {self.name}): a Docker daemon on plain TCP gives root to "
                'everybody who reaches it. Use "ssh://user@host", or give tls = {ca = …, cert = …, key = …}'
            )
        if self.tls is not None and not self.docker.startswith("tcp://"):
            raise ValueError(f"tls goes with a tcp:// URL only, not with docker = {self.docker!r}")
        return self


class Profile(Value):
    """What a user picks: a GPU request with an image and limits."""

    name: ProfileName
    title: Text
    description: Annotated[str, StringConstraints(max_length=500)] = ""
    image: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-zA-Z0-9._/:@-]{0,200}$")] = "gpuhub/notebook:latest"
    #: How many GPUs, all on one node; 0 for a CPU-only profile.
    gpu_count: Annotated[int, Field(ge=0, le=64)] = 1
    #: Only this model, as NVML names it without "NVIDIA GeForce"; None for any.
    gpu_model: Text | None = None
    #: Any of these models, best liked first; stands instead of gpu_model.
    gpu_models: Many[Text] = ()
    #: Least memory of each GPU, bytes.
    gpu_memory: Size = 0
    #: Oldest driver of NVIDIA that will do, such as "570" or "570.86.15"; None for any.
    gpu_driver: Driver | None = None
    #: Least CUDA compute capability, such as "8.9"; None for any.
    gpu_capability: Capability | None = None
    #: One of so many parts of a GPU, with that part of its memory as a cap; 1 for a whole GPU.
    gpu_share: Annotated[int, Field(ge=1, le=64)] = 1
    #: Nothing else runs on the node.
    exclusive: bool = False
    cpus: Annotated[Number, Field(gt=0, le=1024)] = 4.0
    memory: Size = 16 * 1024**3
    shm: Size = 8 * 1024**3
    pids: Annotated[int, Field(ge=64, le=1_000_000)] = 4096
    #: The most that a container may write outside home, scratch and datasets, bytes; None: no limit. Docker can do it
    #: where its data is on XFS with project quotas, and refuses it elsewhere.
    disk: Size | None = None
    #: Seconds from the grant to the end; None for no limit.
    time_limit: Span | None = None
    #: With Slurm as the engine; None: as `[slurm]` says.
    partition: SlurmName | None = None
    account: SlurmName | None = None
    qos: SlurmName | None = None
    reservation: SlurmName | None = None

    @model_validator(mode="after")
    def _cpu_only(self) -> Self:
        asks = (self.gpu_model, self.gpu_models, self.gpu_memory, self.gpu_driver, self.gpu_capability)
        if self.gpu_count == 0 and any(asks):
            raise ValueError(
                "gpu_model, gpu_models, gpu_memory, gpu_driver and gpu_capability need gpu_count of at least 1"
            )
        if self.gpu_model is not None and self.gpu_models:
            raise ValueError("gpu_model and gpu_models exclude each other")
        if self.gpu_share > 1 and (self.gpu_count != 1 or self.exclusive):
            raise ValueError("gpu_share above 1 is a part of one GPU: it needs gpu_count = 1, and no exclusive")
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The models that will do, best liked first; empty for any."""
        return self.gpu_models or ((self.gpu_model,) if self.gpu_model is not None else ())


class Storage(Value):
    """Home and datasets, the same on every node."""

    #: A path (bound from each node's own file system) or `nfs://server/path`; `{username}` stands for the user.
    home: str = "/home/{username}"
    #: Where the head node makes missing homes; None: they exist already. Needed for `nfs://` only when
    #: the head node should make them: the same folder as the head node sees it.
    home_create: str | None = None
    #: A path or `nfs://server/path`, mounted read-only at /datasets; None for none.
    datasets: str | None = None
    #: Mount options for `nfs://` volumes, without `addr=`.
    nfs_options: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_=,.:-]*$")] = "nfsvers=4.2,hard,noatime"
    #: A fast folder of the node's own at /scratch for each user, the same for all their containers there.
    scratch: bool = True
    #: A user's scratch on a node goes when no container has used it for so long, seconds.
    scratch_keep: Span = 14 * 86400
    #: How long an NFS server may take to answer before a start is refused, seconds.
    patience: Annotated[Span, Field(le=60)] = 10

    @field_validator("nfs_options")
    @classmethod
    def _options(cls, value: str) -> str:
        check_options(value)
        return value

    @field_validator("home", "home_create", "datasets")
    @classmethod
    def _place(cls, value: str | None) -> str | None:
        if value is None:
            return value
        url = urlsplit(value)
        if url.scheme == "nfs" and url.hostname and len(url.path) > 1 and ".." not in url.path:
            if url.netloc not in {url.hostname, f"[{url.hostname}]"} or not re.fullmatch(r"[a-z0-9.:-]+", url.hostname):
                raise ValueError(
                    f"{value!r}: nfs://SERVER/PATH is needed, with a host name or an IP address alone; "
                    'another port is written as nfs_options = "…,port=2050"'
                )
            return value
        if value.startswith("/") and len(value) > 1 and ".." not in value.split("/"):
            return value
        raise ValueError(f"{value!r} is neither an absolute path nor nfs://server/path")

    @model_validator(mode="after")
    def _per_user(self) -> Self:
        for key in ("home", "home_create"):
            value = getattr(self, key)
            if value is not None and "{username}" not in value:
                raise ValueError(f"{key} = {value!r} is one folder for everybody: put {{username}} into it")
        if self.home_create is not None and self.home_create.startswith("nfs://"):
            raise ValueError("home_create is a path on the head node, not an nfs:// address")
        if self.home.startswith("nfs://") and is_read_only(self.nfs_options):
            raise ValueError("nfs_options: with ro nobody could write to their home; datasets are read-only without it")
        return self


class Network(Value):
    """How containers of one user reach each other."""

    #: `overlay`: one private network a user over all nodes (Docker Swarm keeps it); `bridge`: one on a single node.
    kind: Literal["auto", "overlay", "bridge"] = "auto"
    #: From here users' overlays get their subnets, /24 each.
    overlay_pool: str = "10.201.0.0/16"
    #: MTU of the nodes' own network, bytes; `auto`: that of the head node's ways to the nodes. Overlays get 50 less for
    #: VXLAN's header.
    mtu: Literal["auto"] | Annotated[int, Field(ge=576, le=9216)] = "auto"
    #: Packet filter on every node for users' containers: they reach hub and broker, each their own user's, and what
    #: `egress` allows; their published ports are reached from the head node only.
    guard: bool = True
    #: `internet`: all but private addresses; `open`: all but the nodes themselves and cloud metadata; `none`: nothing.
    egress: Literal["internet", "open", "none"] = "internet"
    #: Further networks that containers may reach, a licence server say; never a node.
    reach: Many[str] = ()

    @field_validator("reach")
    @classmethod
    def _reach(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(f'{text!r} is no address or network: {error}; write such as "192.168.1.50"') from None
        return value

    @field_validator("overlay_pool")
    @classmethod
    def _pool(cls, value: str) -> str:
        try:
            network = ipaddress.ip_network(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is no network: {error}") from None
        if not network.is_private or network.prefixlen > 22:
            raise ValueError(f'{value!r}: a private network of /22 or larger is needed, such as "10.201.0.0/16"')
        return value


class Jobs(Value):
    """What a worker container of `%gpu_launch` may use."""

    cpus: Annotated[Number, Field(gt=0, le=1024)] = 4.0
    memory: Size = 16 * 1024**3
    shm: Size = 8 * 1024**3
    pids: Annotated[int, Field(ge=64, le=1_000_000)] = 4096
    #: As a profile's.
    disk: Size | None = None
    time_limit: Span | None = None
    #: A launch whose notebook does not report for this long ends, and its GPUs are free.
    renew_within: Span = 25
    #: Workers stay with a notebook for so long after a launch, so that the next one starts at once; they are given back
    #: sooner when anybody waits for GPUs. 0 for not at all.
    keep_workers: Span0 = 600
    #: The most that `gpu-launch` may send or fetch at once.
    upload_limit: Size = 2 * 1024**3
    #: Ended jobs are told of for so long.
    remember: Span = 14 * 86400


class Hub(Value):
    """Where the head node listens, and what secures it."""

    #: What browsers connect to; from elsewhere than this machine over HTTPS only.
    bind: str = "127.0.0.1"
    port: Port = 8000
    #: `local`: a certificate of an authority made here; `files`: `certificate` and `key`; `proxy`: a reverse proxy in
    #: front does it; `off`: none, on loopback only; `auto`: `files` where they are given, else `off` on loopback and
    #: `local` elsewhere.
    https: Literal["auto", "local", "files", "proxy", "off"] = "auto"
    #: PEM files, the certificate with its chain.
    certificate: Path | None = None
    key: Path | None = None
    #: Names under which browsers reach the hub, the first of them in every address that is shown.
    hostnames: Many[HostName] = ()
    #: What browsers are told, where neither `hostnames` nor `bind` and `port` say it, such as behind a reverse proxy.
    url: str | None = None
    #: Each user's notebooks under a name of their own, `ada.HOSTNAME`, out of each other's reach in the browser.
    subdomains: bool = False
    #: TLS with certificates on both sides between proxy, hub, broker and notebooks; `auto`: with more than one node.
    internal_tls: bool | Literal["auto"] = "auto"
    #: The head node's address as the nodes and their containers reach it; None: found from the route to the nodes.
    address: str | None = None
    api_port: Port = 8081
    broker_port: Port = 8010
    proxy_api_port: Port = 8001

    @field_validator("certificate", "key", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value

    @field_validator("bind")
    @classmethod
    def _bind(cls, value: str) -> str:
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f'{value!r} is no IP address: write "127.0.0.1", or "0.0.0.0" for all') from None
        return value

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None:
            url = urlsplit(value)
            if url.scheme not in {"http", "https"} or not url.hostname or url.path not in {"", "/"} or url.query:
                raise ValueError(f'{value!r} is no address of a hub: write such as "https://gpuhub.example.org"')
            return value.rstrip("/")
        return value

    @field_validator("address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                ipaddress.ip_address(value)
            except ValueError:
                raise ValueError(f'{value!r} is no IP address: write one such as "192.168.1.20"') from None
        return value

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        ports = Counter((self.port, self.api_port, self.broker_port, self.proxy_api_port))
        twice = [port for port, count in ports.items() if count > 1]
        if twice:
            raise ValueError(f"port {twice[0]} is used twice: port, api_port, broker_port, proxy_api_port must differ")
        return self

    @model_validator(mode="after")
    def _secured(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together: give both, or neither")
        if self.https == "files" and self.certificate is None:
            raise ValueError('https = "files" needs certificate and key')
        if self.certificate is not None and self.https not in {"auto", "files"}:
            raise ValueError(f'certificate and key mean nothing with https = "{self.https}": write https = "files"')
        if self.https == "off" and not self.is_loopback:
            raise ValueError(
                f'https = "off" with bind = {self.bind!r}: passwords would cross the network readable. Write https = '
                '"local", or keep bind = "127.0.0.1" and reach it by ssh -L 8000:127.0.0.1:8000'
            )
        if self.https == "proxy" and self.url is None:
            raise ValueError('https = "proxy" needs url: the address that browsers use, such as "https://gpuhub.lan"')
        return self

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.subdomains and not self.hostnames:
            raise ValueError('subdomains = true needs hostnames, such as ["gpuhub.lan"], and a wildcard name in DNS')
        first = self.hostnames[0] if self.hostnames else ""
        if self.subdomains and ("." not in first or first.rpartition(".")[2].isdigit()):
            raise ValueError(
                f'subdomains = true with hostnames = ["{first}", …]: browsers share no cookie below an address, nor '
                'below a name without a dot; put a name such as "gpuhub.lan" first'
            )
        if self.tls == "files" and not self.hostnames and self.url is None:
            raise ValueError('https = "files" needs hostnames: the names in the certificate, such as ["gpuhub.lan"]')
        if self.url is None:
            return self
        scheme, is_plain = urlsplit(self.url).scheme, self.tls == "off"
        if (scheme == "http") != is_plain:
            right = '"proxy" if a reverse proxy does it' if is_plain else '"off" on loopback, or write https:// there'
            raise ValueError(f'url = {self.url!r} does not go with https = "{self.tls}": write https = {right}')
        if self.subdomains and urlsplit(self.url).hostname != first:
            raise ValueError(f"url = {self.url!r} with subdomains = true: the first of hostnames must be its name")
        return self

    @property
    def is_loopback(self) -> bool:
        """Browsers on this machine only."""
        return ipaddress.ip_address(self.bind).is_loopback

    @property
    def tls(self) -> Literal["local", "files", "proxy", "off"]:
        """`https` with `auto` decided."""
        if self.https != "auto":
            return self.https
        if self.certificate is not None:
            return "files"
        return "off" if self.is_loopback else "local"


class Login(Value):
    """What `users.login` needs to know of the provider; which keys each kind takes is said in `gpuhub.logins`."""

    #: OAuth and OpenID Connect: as registered with the provider.
    client_id: Text | None = None
    #: A file with the secret, readable by root alone.
    client_secret_file: Path | None = None
    #: `oidc`: where the provider's `/.well-known/openid-configuration` is found; `gitlab`: one's own server.
    issuer: str | None = None
    #: The claim that is the user's name here (`oidc`, `cilogon`), and the one that lists groups (`oidc`).
    username_claim: Text | None = None
    groups_claim: Text | None = None
    #: `google`, `oidc`, `cilogon`: accounts of these domains only; with one, the name is what stands before the @.
    domains: Many[HostName] = ()
    #: `cilogon`: identity providers that may vouch for somebody, as entity ids.
    idps: Many[Text] = ()
    #: `ldap`: the server, and how a user's own entry is found: `uid={username},ou=people,dc=example,dc=org`.
    server: str | None = None
    user_dn: Text | None = None
    #: `ldap`: where groups are searched.
    group_base: Text | None = None
    #: A file with the certificate of the authority that the provider's or server's certificate comes from; None: the
    #: system's.
    ca: Path | None = None

    @field_validator("client_secret_file", "ca", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value

    @field_validator("issuer")
    @classmethod
    def _issuer(cls, value: str | None) -> str | None:
        if value is not None:
            url = urlsplit(value)
            if url.scheme != "https" and not (url.scheme == "http" and url.hostname in {"127.0.0.1", "localhost"}):
                raise ValueError(f'{value!r}: an https:// address is needed, such as "https://auth.example.org/"')
        return value

    @field_validator("server")
    @classmethod
    def _server(cls, value: str | None) -> str | None:
        if value is not None and (urlsplit(value).scheme not in {"ldap", "ldaps"} or not urlsplit(value).hostname):
            raise ValueError(f'{value!r} is no LDAP server: write such as "ldaps://ldap.example.org"')
        return value


class Images(Value):
    """How the images are built."""

    debian_suite: Annotated[str, StringConstraints(pattern=r"^[a-z]+$")] = "bookworm"
    torch: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")] = "2.13.0"
    #: `auto`: what pip finds; `cpu` or `cuda`: that build, refused when pip finds the other.
    torch_build: Literal["auto", "cpu", "cuda"] = "auto"
    #: Another package index to look for torch on, for the CPU build; None: pip's own.
    torch_index: str | None = None
