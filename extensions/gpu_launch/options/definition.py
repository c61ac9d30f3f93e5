"""A launch's options: their one definition with flags, help, checks, and where each can be typed."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_launch.options import value_types as types
from gpu_launch.options.option import LaunchOption, Surface

_RANKS, _FUNCTION, _COMMAND = Surface.RANKS, Surface.FUNCTION, Surface.COMMAND
_SPANS = ("10m", "30m", "1h", "4h", "1d")
_STREAMS = ("0", "1", "2", "3")
_PARTS, _TIMES, _STARTS = "What takes part", "When", "How ranks start"
_VARIABLES, _OUTPUT, TORCHRUN = "The notebook's variables", "Output", "As in torchrun"
#: All options in the order of the help.
OPTIONS: tuple[LaunchOption, ...] = (
    LaunchOption(
        "--nnodes",
        section=_PARTS,
        type=types.NODES,
        metavar="N",
        help="nodes that take part (1); MIN:MAX starts with what is free, and continues with less when others need "
        "GPUs: the ranks get SIGTERM and start again on what is left",
    ),
    LaunchOption(
        "--nproc-per-node",
        section=_PARTS,
        type=types.PROCESSES,
        metavar="N",
        help="ranks, and GPUs, a node (1)",
    ),
    LaunchOption(
        "--model",
        "models",
        section=_PARTS,
        type=types.MODELS,
        metavar="NAME[,NAME...]",
        help='only GPUs of these models, the preferred one first, such as "RTX 5090,RTX 5070" (any)',
    ),
    LaunchOption(
        "--memory",
        "least_memory_mib",
        section=_PARTS,
        type=types.MEMORY,
        metavar="SIZE",
        help="only GPUs with at least this much memory, such as 24G (any)",
        completions=("8G", "12G", "16G", "24G", "32G", "48G", "80G"),
    ),
    LaunchOption(
        "--cpus",
        "cpus",
        section=_PARTS,
        type=types.CPUS,
        metavar="N[+]",
        help="CPU cores for each node's ranks, such as 8, or 8+ for at least 8; the notebook's own GPU does not take "
        "part (the GPUs' share of the node)",
    ),
    LaunchOption(
        "--ram",
        "ram_mib",
        section=_PARTS,
        type=types.RAM,
        metavar="SIZE[+]",
        help="memory of the machine for each node's ranks, such as 64G, or 64G+ for at least that; the notebook's own "
        "GPU does not take part (the GPUs' share of the node)",
    ),
    LaunchOption(
        "--shm",
        "shm_mib",
        section=_PARTS,
        type=types.MEMORY,
        metavar="SIZE",
        help="size of /dev/shm, which counts in the memory; the notebook's own GPU does not take part (half of the "
        "memory)",
    ),
    LaunchOption("--same-model", section=_PARTS, help="all GPUs of one model (mixed ones are allowed)"),
    LaunchOption(
        "--exclusive",
        section=_PARTS,
        help="nothing else may run on the nodes; the notebook's own GPU does not take part",
    ),
    LaunchOption(
        "--stage",
        "stage",
        section=_PARTS,
        type=types.DATASETS,
        metavar="datasets/NAME[,...]",
        help="copy these folders of /datasets to the disk of each node first, where all users' launches then read them "
        "(read them from the file server)",
    ),
    LaunchOption(
        "--scavenge",
        section=_TIMES,
        surfaces=(_FUNCTION, _COMMAND),
        help="release the GPUs when others need them: the ranks get SIGTERM and some time for a checkpoint, the launch "
        "waits again and then runs the same command from its start",
    ),
    LaunchOption(
        "--guests",
        section=_PARTS,
        surfaces=(_COMMAND,),
        help="run the job on a guest, a machine that its owner lends, and only there: its folder is sent to the guest, "
        "whose owner can read it, and what it wrote is copied to ~/guest-results; for one node",
    ),
    LaunchOption(
        "--priority",
        section=_TIMES,
        type=types.number(-types.MAX_PRIORITY, types.MAX_PRIORITY),
        metavar="N",
        help="-100 to 100, higher goes first; above 0 for administrators (0)",
    ),
    LaunchOption(
        "--time-limit",
        "time_limit_s",
        section=_TIMES,
        type=types.span(types.MIN_TIME_LIMIT_S, types.MAX_TIME_LIMIT_S),
        metavar="SPAN",
        help="the longest time with the GPUs, such as 30m, 2h or 1d; a short one starts sooner where it fits in before "
        "others (as the administrator set)",
        completions=_SPANS,
    ),
    LaunchOption(
        "--timeout-s",
        section=_TIMES,
        surfaces=(_RANKS, _FUNCTION),
        type=types.SECONDS,
        metavar="SECONDS",
        help="stop waiting when no GPUs were free for this long (wait without limit)",
    ),
    LaunchOption(
        "--max-restarts",
        section=_TIMES,
        surfaces=(_FUNCTION, _COMMAND),
        type=types.number(0, 1000),
        metavar="N",
        help="start all ranks again after a failure, up to N times (0)",
    ),
    LaunchOption(
        "--detach",
        section=_TIMES,
        surfaces=(),
        help="submit it as a job that runs without this notebook; %gpu_logs and %gpu_status show it",
    ),
    LaunchOption(
        "--array",
        section=_TIMES,
        surfaces=(_COMMAND,),
        type=types.ARRAY,
        metavar="INDEXES[%N]",
        help="one task of one GPU for each index, such as 0-9, 0-100:10 or 1,3,5, N at the same time; its index "
        "is in GPU_LAUNCH_ARRAY_INDEX",
    ),
    LaunchOption(
        "--after",
        section=_TIMES,
        surfaces=(_COMMAND,),
        type=types.RUN,
        metavar="RUN",
        help="wait for GPUs only when this run, or all tasks of this array, have succeeded; end if they do not",
    ),
    LaunchOption(
        "--retry",
        "retries",
        section=_TIMES,
        surfaces=(_COMMAND,),
        type=types.number(0, types.MAX_RETRIES),
        metavar="N",
        help="run the job again after a failure, up to N times, but not after a cancel (0)",
    ),
    LaunchOption("--dry-run", section=_TIMES, surfaces=(), help="show the request and the commands, and do nothing"),
    LaunchOption(
        "--predict",
        section=_TIMES,
        surfaces=(_COMMAND,),
        help="run some steps of the script on one card, and predict the speed on 1 to N cards of the last %gpu_bench",
    ),
    LaunchOption(
        "-m", "--module", section=_STARTS, surfaces=(_FUNCTION, _COMMAND), help="the script is a module's name"
    ),
    LaunchOption("--no-python", section=_STARTS, surfaces=(_FUNCTION, _COMMAND), help="the script is a program"),
    LaunchOption(
        "--preload",
        section=_STARTS,
        type=types.names(dotted=True),
        metavar="MODULE[,MODULE...]",
        help="import these, besides torch, before ranks are forked: the next launches start sooner",
    ),
    LaunchOption("--cold", section=_STARTS, help="start every rank with torchrun itself, nothing imported beforehand"),
    LaunchOption(
        "--comm",
        section=_STARTS,
        surfaces=(_FUNCTION, _COMMAND),
        type=types.COMM,
        metavar="MODE",
        help="how DistributedDataParallel exchanges gradients: exact, bf16, powersgd or local; auto takes what the "
        "last --predict of this script found best (as the script says)",
        completions=types.COMM_MODES,
    ),
    LaunchOption(
        "--keep",
        "keep_s",
        section=_STARTS,
        surfaces=(_RANKS, _FUNCTION),
        type=types.span(0, types.MAX_KEEP_S),
        metavar="SPAN",
        help="the workers stay with this notebook for this long after the launch, such as 30m; 0s frees them at once "
        "(as the administrator set)",
        completions=("0s", *_SPANS),
    ),
    LaunchOption(
        "--send",
        section=_VARIABLES,
        surfaces=(_RANKS, _FUNCTION),
        type=types.names(dotted=False),
        metavar="NAME[,NAME...]",
        help="give these variables of the notebook to the ranks",
    ),
    LaunchOption(
        "--return",
        "returns",
        section=_VARIABLES,
        surfaces=(_RANKS, _FUNCTION),
        type=types.names(dotted=False),
        metavar="NAME[,NAME...]",
        help="copy these of the ranks' variables to the notebook, each as a list by rank",
    ),
    LaunchOption(
        "-t",
        "--tee",
        section=_OUTPUT,
        surfaces=(_RANKS, _COMMAND),
        type=types.STREAMS,
        metavar="STREAMS",
        help="redirected streams that are shown as well: 1 stdout, 2 stderr, 3 both, or RANK:STREAMS,...",
        completions=_STREAMS,
    ),
    LaunchOption(
        "-r",
        "--redirects",
        section=_OUTPUT,
        surfaces=(_RANKS, _COMMAND),
        type=types.STREAMS,
        metavar="STREAMS",
        help="streams that go to the log files only",
        completions=_STREAMS,
    ),
    LaunchOption(
        "--local-ranks-filter",
        "shown_ranks",
        section=_OUTPUT,
        surfaces=(_RANKS, _COMMAND),
        type=types.LOCAL_RANKS,
        metavar="RANKS",
        help="show only these local ranks, such as 0,2",
    ),
    LaunchOption(
        "--log-dir",
        section=_OUTPUT,
        surfaces=(_RANKS, _FUNCTION),
        type=types.FOLDER,
        metavar="DIR",
        help="where log files go (~/.gpu_launch/jobs/<run>/logs)",
    ),
    LaunchOption(
        "--stacks-after",
        "stacks_after_s",
        section=_OUTPUT,
        type=types.span(0, types.MAX_KEEP_S),
        metavar="SPAN",
        help="show where all ranks are when none has written or reported anything for this long, such as 2m; 0s for "
        "never (5m)",
        completions=("0s", "2m", *_SPANS),
    ),
    LaunchOption(
        "--debug",
        section=_OUTPUT,
        type=types.number(0, types.MAX_RANK),
        metavar="RANK",
        help="open the debugger where this rank fails, and stop it alone at breakpoint(); the others wait for up to a "
        "day in collectives for which the script sets no timeout",
    ),
    LaunchOption(
        "--monitor-interval",
        section=TORCHRUN,
        surfaces=(),
        type=types.SECONDS_TEXT,
        metavar="S",
        is_torchruns=True,
        help="as in torchrun",
    ),
    LaunchOption(
        "--role",
        section=TORCHRUN,
        surfaces=(),
        type=types.ROLE,
        metavar="NAME",
        is_torchruns=True,
        help="as in torchrun",
    ),
    LaunchOption(
        "--numa-binding",
        section=TORCHRUN,
        surfaces=(),
        type=types.NUMA_BINDING,
        metavar="KIND",
        completions=types.NUMA_BINDINGS,
        is_torchruns=True,
        help="as in torchrun",
    ),
    LaunchOption(
        "--signals-to-handle",
        section=TORCHRUN,
        surfaces=(),
        type=types.SIGNALS,
        metavar="NAMES",
        is_torchruns=True,
        help="as in torchrun",
    ),
    LaunchOption(
        "--shutdown-timeout",
        section=TORCHRUN,
        surfaces=(),
        type=types.number(0, types.MAX_KEEP_S),
        metavar="S",
        is_torchruns=True,
        help="as in torchrun",
    ),
    LaunchOption("--virtual-local-rank", section=TORCHRUN, surfaces=(), is_torchruns=True, help="as in torchrun"),
    LaunchOption("-h", "--help", section="", surfaces=(_RANKS,), hidden=True),
)
#: What `%gpu_bench` and `gpu-launch bench` run, and the options that they take.
BENCH_MODULE = "gpu_launch.prediction.bench_main"
BENCH_OPTIONS = tuple(
    option
    for option in OPTIONS
    if option.section == _PARTS or option.name in ("priority", "time_limit_s", "timeout_s", "help")
)
#: The options of `gpu-launch serve` that ask for GPUs.
SERVE_OPTIONS = tuple(
    option
    for option in OPTIONS
    if (option.section == _PARTS and option.name not in ("guests", "stage"))
    or option.name in ("priority", "time_limit_s", "scavenge")
)
BY_LABEL: Mapping[str, LaunchOption] = {option.label: option for option in OPTIONS}
BY_NAME: Mapping[str, LaunchOption] = {str(option.name): option for option in OPTIONS}
