"""The catalogue: every fault that is considered, how it is injected here, and the expected result.

Invariants that hold after every case are not repeated; see `invariants`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """A fault that is injected."""

    id: str
    title: str
    how: str
    expect: str
    #: What the fault is injected into: the running product, or parts of it in tests of other folders.
    where: str = "product"


@dataclass(frozen=True, slots=True)
class NotRun:
    """A fault, or a part of one, that cannot be injected on this kind of machine."""

    id: str
    title: str
    why: str


#: All ids of the catalogue in its order; each is a case, or has a reason why it is not run.
IDS = (
    *("C1", "C2", "C3", "C4"),
    *("U1", "U2", "U3", "U4", "U5", "U6"),
    *("A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8"),
    *("K1", "K2", "K3", "K4", "K5", "K6", "K7", "K8", "K9"),
    *("P1", "P2", "P3", "P4", "P5"),
    *("N1", "N2", "N3"),
    *("G1", "G2", "G3", "G4", "G5"),
    *("S1", "S2", "S3", "S4", "S5", "S6"),
    *("L1", "L2", "L3"),
    *("V1", "V2", "V3"),
)

PARTS = "parts"
BOTH = "product and parts"

CASES = (
    # -- bad settings
    Case("C1", "Docker over plain TCP", "`tcp://…:2375` without tls in cluster.toml", "refused before anything starts; the node is named"),
    Case("C2", "No user may log in", "no `allowed`, `admins` or groups in cluster.toml", "refused before anything starts; the pattern of user names is built in"),
    Case("C3", "One GPU on two nodes", "a simulated GPU gets the UUID of another node's", "granted on neither node; both nodes are named; other GPUs are granted"),
    Case("C4", "A daemon's certificate is expired or issued by an unknown authority", "the relay to a node presents such a certificate", "the node is unauthenticated, and the reason is shown; other nodes accept work"),
    # -- bad input
    Case("U1", "User names with special meaning", "logins as `..`, `$(id)`, with other alphabets, of 5,000 characters", "refused; no user, no home; the log grows by little"),
    Case("U2", "Server names that differ in case", "`gpu` and `GPU` over the REST API", "the second is refused, the first continues"),
    Case("U3", "Options that do not exist", "nested values, wrong types, `mounts`, `privileged`, `NVIDIA_VISIBLE_DEVICES`", "400; the field is named"),
    Case("U4", "A user's own image", "`image` and a profile that does not exist, over the REST API", "400; only the image that the profile names runs"),
    Case("U5", "Invalid numbers", "-1, 0, 1e9, NaN and `1; rm` as nodes and GPUs of a job", "422; the field is named"),
    Case("U6", "A home that is a link", "the home is a symbolic link to another folder", "refused; the other folder is unchanged"),
    # -- rights
    Case("A1", "Another user's lease and job", "a user's token reads, extends, forces and ends another user's lease and job", "404 or 403; both continue"),
    Case("A2", "An owner in the body or a header", "`owner` in the request, `X-Forwarded-User` and similar headers", "403 or ignored: the owner is the token's"),
    Case("A3", "Wrong tokens", "no token, garbage, a revoked token, one without the scope, on every route", "401 or 403"),
    Case("A4", "A worker calls the hub", "requests from inside a worker's container to the hub's and the broker's ports; the same from a notebook, without its token", "a worker has neither token nor certificate: its connections are closed; the notebook gets 401 or 403"),
    Case("A6", "A user scans another user", "connections from a container to another user's notebook and workers, Docker, SSH, metadata", "none is answered"),
    Case("A7", "Another user's GPU device and home", "on the same node: mknod in a container, and open of a device that was left in the home; a file of another user's home by path", "refused; only the user's own home is present"),
    Case("A8", "The same request again", "the same key twice, at once and later", "one lease"),
    # -- kills
    Case("K1", "The hub is killed during a start", "SIGKILL while the request waits, and while Docker's create, start and network calls are held or their responses lost", "the container is adopted or removed, once; the user can start again"),
    Case("K2", "The hub is killed with servers up", "SIGKILL with 8 servers on three nodes", "all servers resume: same containers, same GPUs"),
    Case("K3", "The broker is killed during a grant or a release", "SIGKILL right after the request was sent, 3 times each", "one outcome, the same in the database and for containers"),
    Case("K4", "A Docker daemon is killed", "SIGKILL of dockerd, which ends its containers (live-restore off)", "the lease ends after proof; the GPU is granted again"),
    Case("K5", "A notebook's process or an ipyparallel engine is killed", "SIGKILL of the container's first process; of an engine during a launch", "the lease ends; the launch names the lost engine", BOTH),
    Case("K6", "One of several ranks is killed", "SIGKILL of one worker's container of a job; of one rank during a launch", "the job shows the lost worker and runs on with the other; when it is deleted, both GPUs are free; the launch ends and names the rank", BOTH),
    Case("K7", "The broker is suspended", "SIGSTOP for longer than any timeout; a container of an old epoch appears in the meantime", "nothing runs twice; the old epoch's container is removed"),
    Case("K8", "A second broker or hub", "the same commands again while they run", "refused: the store or the hub is locked"),
    # -- partitions
    Case("P1", "A node is cut off", "iptables DROP in the node's namespace, both directions", "unreachable; its lease is kept; its GPU is not granted; back after the link is restored"),
    Case("P2", "Cut off while the hub restarts", "P1, and SIGKILL of the hub", "the server is kept, and usable again when the link is restored"),
    Case("P3", "Cut off, stopped and started elsewhere", "P1 on the first node, which keeps users' networks with two others; the user stops the server and starts another, and so does a new user", "the old GPU is quarantined until its node proves the release; both start on other nodes"),
    Case("P4", "Link cut in one direction, lossy, slow", "DROP of one direction; `statistic` DROP of 30 %; Docker's responses 5 s late", "the node's state changes at most three times; a server on another node starts in at most three times the usual time and 5 s, and 30 s more where the node helps to keep users' networks"),
    Case("P5", "Docker's response is lost", "the relay drops the response after the container was created", "removed or adopted, never two containers"),
    # -- nodes
    Case("N1", "A node dies and returns", "SIGKILL of all its processes; the daemon starts again", "its containers count as ended; its GPU is read, then granted", BOTH),
    Case("N2", "A node returns with fewer GPUs", "as N1, and a simulated GPU removed", "the missing GPU is failed, and named"),
    Case("N3", "A node reboots under a server that its user keeps", "as N1, the server started with `keep`", "it waits for its GPU again, and is ready on the same node"),
    # -- GPUs
    Case("G1", "A GPU fails", "simulated driver: lost, fallen off the bus, ECC, failed row remap", "not granted; the page names the GPU and the fault; its user keeps the lease"),
    Case("G2", "NVML hangs", "simulated driver: calls do not return", "within 30 s the node's GPUs are no longer granted; the broker answers at once"),
    Case("G3", "Containers lose their devices", "simulated driver: containers that were started before a given time get Unknown Error, as after `systemctl daemon-reload`", "detected through the agent, which is recreated; users there are asked to restart their servers"),
    Case("G4", "A process or memory is left on a GPU", "simulated driver: a process, and memory, after the lease has ended", "not granted until it is gone"),
    Case("G5", "The driver is upgraded while the node runs", "simulated driver: library and kernel module differ", "the node's GPUs are not granted: reboot needed"),
    # -- storage
    Case("S1", "The file server is gone", "a silent NFS server; a mount of the home's folder that hangs", "the start fails with the reason; others start", PARTS),
    Case("S2", "A stale file handle", "making the home, and Docker's mount of it, fail with ESTALE", "a clear error; nothing is made, changed or deleted", PARTS),
    Case("S3", "No space left", "a full file system below Docker's containers; below the broker's store", "an error with the reason, and no GPU held; 503, and no lease recorded"),
    Case("S4", "The store is locked or truncated", "another process holds a write transaction; a killed broker's write-ahead log is cut within its last frame", "503, then normal service; the cut transaction is absent as a whole, everything before it is present"),
    Case("S5", "An image is missing", "a profile whose image no node has", "the error names the node and the missing image; no GPU is held"),
    Case("S6", "A container exhausts its resources", "in a container, for 8 s: fork bomb, memory, shared memory, a flood of log messages", "meanwhile the hub, the broker and another container on the node answer within 10 s"),
    # -- load
    Case("L1", "All users at once", "100 requests at once to the broker for three GPUs; 10 starts at once through the hub", "three are granted, the others wait; above the limit 429 with Retry-After"),
    Case("L2", "The hub restarts with many servers", "as K2, with 12 servers", "the hub answers within the limit while it resumes them"),
    Case("L3", "10,000 leases", "10,000 leases start and end at a real broker on simulated nodes", "no open row, file or container is left; the rows of ended leases go with time"),
    # -- upgrades
    Case("V1", "The store of the previous version", "the store is downgraded by one migration while a server runs and the broker is stopped; this version's broker upgrades it (no older code runs)", "the server and its lease continue", BOTH),
    Case("V3", "The clock is set", "the broker's clock is set forward and back by an hour", "no lease ends; nothing is granted twice"),
)  # fmt: skip

NOT_RUN = (
    NotRun("A5", "The batch port API", "exists only with `engine = \"slurm\"` without Docker, and is tested there on a real hub and Slurm: `tests/integration/slurm/test_spawner.py`, `tests/unit/gpuhub/spawners/slurm/test_port.py`"),
    NotRun("K4", "A Docker daemon is killed with live-restore on", "a simulated node is a process namespace that ends with its daemon, so no container can outlive it; P1 and S1 have a daemon that stops answering while its containers run"),
    NotRun("K9", "Slurm's controller is down", "run with `engine = \"slurm\"` in a separate practice closet: slurmctld, slurmd and munged killed, a node lost, hub and broker killed, in `tests/acceptance/slurm/test_faults.py`"),
    NotRun("V2", "Docker and the toolkit are upgraded while the node runs", "only one version of Docker is installed here, and the toolkit is simulated"),
    NotRun("N1", "A new boot id", "simulated nodes share one kernel and its boot id; unit tests cover the decision (`test_machine_restart_proves_a_release`)"),
    NotRun("P4", "Delay on the link", "this kernel has no netem; the relay in front of the daemon delays responses instead"),
    NotRun("G1", "DCGM's error injection", "there is no real GPU here; the simulated driver injects faults"),
)  # fmt: skip
