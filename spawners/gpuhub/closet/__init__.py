"""The practice closet: several nodes simulated on one Linux machine.

A node is a real Docker daemon in namespaces of its own (network, host name, mounts, process ids), joined to the
others by a bridge whose links run at 2.5 Gbit/s; this machine is the head node on that bridge. Simulated is the
hardware, at the NVIDIA driver's edge and nowhere else: each daemon finds a container toolkit (`hook`) that gives
containers a small NVML library and an nvidia-smi (`nvidia/`), which report the cards of `plan` with the load and
faults set by `cards`.

`lifecycle` is what others call; `plan` and `commands` decide, and touch nothing.
"""
