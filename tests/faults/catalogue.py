"""The catalogue: every fault that is considered, how it is injected here, and what must come of it.

What must hold after each case whatever it was is not repeated in each: see `oracle`.
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


@dataclass(frozen=True, slots=True)
class NotRun:
    """A fault, or a part of one, that cannot be injected on this kind of machine."""

    id: str
    title: str
    why: str


#: Every id of the catalogue, in its order; each is a case, or is not run for a reason.
IDS = (
    *("C1", "C2", "C3", "C4"),
    *("U1", "U2", "U3", "U4", "U5", "U6"),
    *("A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8"),
    *("K1", "K2", "K3", "K4", "K5", "K6", "K7", "K8", "K9"),
    *("P1", "P2", "P3", "P4", "P5"),
    *("N1", "N2"),
    *("G1", "G2", "G3", "G4", "G5"),
    *("S1", "S2", "S3", "S4", "S5", "S6"),
    *("L1", "L2", "L3"),
    *("V1", "V2", "V3"),
)

CASES = (
    # -- bad settings
    Case("C1", "Docker over plain TCP", "`tcp://…:2375` without tls in cluster.toml", "refused before anything starts, the node is named"),
    Case("C2", "Nobody may log in", "no `allowed`, `admins` or groups in cluster.toml", "refused before anything starts; the pattern of names is built in"),
    Case("C3", "One GPU on two nodes", "a simulated card gets the UUID of another node's", "given on neither; both nodes are named; others are given"),
    Case("C4", "A daemon's certificate is expired, or a stranger's", "the wire to a node shows such a certificate", "the node is unauthenticated, and says why; others serve"),
    # -- bad input
    Case("U1", "Names that mean something elsewhere", "logins as `..`, `$(id)`, with other alphabets, of 5,000 characters", "refused; no user, no home; the log grows by little"),
    Case("U2", "Server names that differ in case", "`gpu` and `GPU` over the REST API", "the second is refused, the first goes on"),
    Case("U3", "Options that nobody offers", "nested values, wrong types, `mounts`, `privileged`, `NVIDIA_VISIBLE_DEVICES`", "400, the field is named"),
    Case("U4", "An image of one's own", "`image` and a profile that does not exist, over the REST API", "400; the image runs that the profile names"),
    Case("U5", "Numbers that are none", "-1, 0, 1e9, NaN and `1; rm` as nodes and GPUs of a job", "422, the field is named"),
    Case("U6", "A home that leads elsewhere", "the home is a symbolic link to another folder", "refused; the other folder is untouched"),
    # -- rights
    Case("A1", "Another one's lease and job", "a user's token reads, extends, forces and ends what is another's", "404 or 403; it goes on"),
    Case("A2", "An owner in the body or a header", "`owner` in the request, `X-Forwarded-User` and the like", "403 or ignored: the owner is the token's"),
    Case("A3", "Wrong tokens", "none, garbage, a revoked one, one without the scope, on every route", "401 or 403"),
    Case("A4", "A worker asks the hub", "from inside a worker's container, with what its environment has", "it has no token; without one 403 or 401"),
    Case("A6", "A user scans another", "connections from a container to another's notebook, its workers, Docker, SSH, metadata", "none is answered"),
    Case("A7", "Another GPU's device, another's home", "mknod and open in a container; the other's home by path", "refused; only the own ones are there"),
    Case("A8", "The same request again", "the same key twice, at once and later", "one lease"),
    # -- kills
    Case("K1", "The hub is killed during a start", "SIGKILL while the request waits, and with Docker's create, start and network calls held or their answers lost", "adopted or removed, once; the user can start again"),
    Case("K2", "The hub is killed with servers up", "SIGKILL with 8 servers on three nodes", "all resume: same containers, same GPUs"),
    Case("K3", "The broker is killed in a grant or a release", "SIGKILL right after the request was sent, 3 times each", "one outcome, the same for table and containers"),
    Case("K4", "A Docker daemon is killed", "SIGKILL of dockerd, with which its containers end (live-restore off)", "the lease ends after proof; the GPU is given again"),
    Case("K5", "A notebook's process, an engine's", "SIGKILL of the container's first process; of an engine under a launch", "the lease ends; the launch names the lost engine"),
    Case("K6", "One rank of several", "SIGKILL of one worker's container of a job; of one rank under a launch", "the job fails in time; all GPUs return"),
    Case("K7", "The broker stands still", "SIGSTOP for longer than any promise lasts; a container of an old epoch appears meanwhile", "nothing is doubled; the old epoch's container is removed"),
    Case("K8", "A second broker, a second hub", "the same commands again while they run", "refused: the store, the hub are locked"),
    # -- partitions
    Case("P1", "A node is cut off", "iptables DROP in the node's namespace, both ways", "unreachable; its lease stays; not given again; back after it heals"),
    Case("P2", "Cut off while the hub restarts", "P1, and SIGKILL of the hub", "the server is kept, and used again when it heals"),
    Case("P3", "Cut off, stopped and started elsewhere", "P1; the user stops the server and starts another", "the old GPU is quarantined until its node proves it; the new one is on another node"),
    Case("P4", "Half cut, lossy, slow", "DROP of one direction; `statistic` DROP of 30 %; answers of Docker 5 s late", "no flapping; other nodes start as quickly"),
    Case("P5", "Docker's answer is lost", "the create is done, its answer swallowed by the wire", "removed or adopted, never two"),
    # -- nodes
    Case("N1", "A node dies and returns", "SIGKILL of all its processes; the daemon starts anew", "its containers count as ended, its GPU is read, then given"),
    Case("N2", "A node returns with fewer GPUs", "as N1, and a simulated card taken out", "the missing one is failed, and named"),
    # -- GPUs
    Case("G1", "A GPU fails", "simulated driver: lost, fallen off the bus, ECC, failed row remap", "not given; the page names the GPU and the fault; its user's lease stays"),
    Case("G2", "NVML hangs", "simulated driver: calls do not return", "the node's GPUs are not given within 30 s; the broker answers at once"),
    Case("G3", "Containers lose their devices", "simulated driver: containers started before a moment get Unknown Error, as after `systemctl daemon-reload`", "seen through the agent, which is made anew; users there are told to restart their servers"),
    Case("G4", "Something is left on a GPU", "simulated driver: a process, and memory, after the lease has ended", "not given until it is gone"),
    Case("G5", "The driver was upgraded under way", "simulated driver: library and kernel module differ", "the node's GPUs are not given: reboot needed"),
    # -- storage
    Case("S1", "The file server is gone", "the home's folder hangs", "the start fails with the reason; others start"),
    Case("S2", "A stale handle", "the home's folder answers ESTALE", "a clear error; nothing is deleted"),
    Case("S3", "No space left", "a full file system below Docker's containers; below the broker's store", "told; no GPU is held; 503, and no lease is recorded"),
    Case("S4", "The store is locked, the store is torn", "another process holds a write transaction; a killed broker's WAL is cut in the middle", "503, then it goes on; what was committed is there"),
    Case("S5", "An image is missing", "a profile whose image no node has", "told which node lacks what; no GPU is held"),
    Case("S6", "A container runs wild", "in a container: fork bomb, memory, shared memory, a flood of log", "it alone suffers"),
    # -- load
    Case("L1", "Everybody at once", "100 requests at once to the broker for three GPUs; 10 starts at once through the hub", "three are granted, the rest wait; beyond the limit 429 with Retry-After"),
    Case("L2", "The hub restarts with many servers", "as K2, with 12 servers", "it answers below the bound while it takes them up"),
    Case("L3", "10,000 leases", "10,000 leases come and go at a real broker on simulated nodes", "no file, row, or container more than before"),
    # -- upgrades
    Case("V1", "From the last version to this, and back", "the store is taken back one migration under a live server, and forward again", "the server and its lease live on"),
    Case("V3", "The clock is set", "the broker's clock is set by an hour, forth and back", "no lease ends, nothing is given twice"),
)  # fmt: skip

NOT_RUN = (
    NotRun("A5", "The batch port API", "there is one with `engine = \"slurm\"` and no Docker only, where it is tested on a real hub and Slurm: `tests/integration/test_slurm_spawner.py`, `tests/unit/batch/test_ports.py`"),
    NotRun("K4", "A Docker daemon is killed with live-restore on", "a closet node is a process namespace that ends with its daemon, so no container can outlive it; a daemon that stands still while its containers run is in P1 and S1"),
    NotRun("K9", "Slurm's controller is down", "with `engine = \"slurm\"`, in a closet of its own: slurmctld, slurmd and munged killed, a node lost, hub and broker killed, in `tests/acceptance/slurm/test_faults.py`"),
    NotRun("V2", "Docker and the toolkit are upgraded under way", "one version of Docker is installed here, and the toolkit is simulated"),
    NotRun("N1", "A new boot id", "closet nodes share one kernel and its boot id; the decision is tested on simulated nodes (`test_a_restart_of_the_machine_is_proof`)"),
    NotRun("P4", "Delay on the link", "this kernel has no netem; the delay is in front of the daemon instead"),
    NotRun("G1", "DCGM's error injection", "there is no real GPU here to inject into; faults are the simulated driver's"),
)  # fmt: skip
