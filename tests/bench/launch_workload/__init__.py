"""The scripts and the kernel of the launch benchmarks, for the practice closet and for real GPUs."""
