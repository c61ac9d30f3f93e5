"""Options as `%gpu_launch`'s words again, as far as a job's driver needs them. Pure."""

from __future__ import annotations

from gpu_launch.options import Options


def build(options: Options) -> tuple[str, ...]:
    """Words that parse to the same ranks. What was wanted of the GPUs is not among them: that is the broker's."""
    least = "" if options.least_nnodes is None else f"{options.least_nnodes}:"
    flags = [
        f"--nnodes={least}{options.nnodes}",
        f"--nproc-per-node={options.nproc_per_node}",
        f"--max-restarts={options.max_restarts}",
        f"--tee={options.tee}",
        f"--redirects={options.redirects}",
        *options.passed,
    ]
    if options.shown_ranks:
        flags.append(f"--local-ranks-filter={','.join(map(str, options.shown_ranks))}")
    if options.log_dir is not None:
        flags.append(f"--log-dir={options.log_dir}")
    if options.preload:
        flags.append(f"--preload={','.join(options.preload)}")
    switches = {"--module": options.module, "--no-python": options.no_python, "--cold": options.cold}
    flags += [flag for flag, is_on in switches.items() if is_on]
    script = (options.script,) if options.script else ()
    return (*flags, "--", *script, *options.arguments)
