"""The practice closet: several nodes simulated on one Linux machine.

A node is a real Docker daemon in its own namespaces (network, host name, mounts, process ids). A bridge whose links
run at 2.5 Gbit/s joins the nodes; this machine is the head node on that bridge. Only the hardware is simulated, at the
interface of the NVIDIA driver: each daemon finds a container toolkit (`hook`) that gives containers a small NVML
library and an nvidia-smi (`nvidia/`). These report the GPUs of the plan (`topology`), and the load and faults that
`gpu_state` wrote. One node may have this machine's own GPUs instead (`real_gpus`).

`provider` is what `gpuhub up` and `gpuhub down` call; `lifecycle` sets the closet up and takes it down.
"""
