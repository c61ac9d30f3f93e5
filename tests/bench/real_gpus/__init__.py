"""`%gpu_launch` on real GPUs over NCCL, on nodes of one GPU each; docs/benchmarks.md has the commands."""
