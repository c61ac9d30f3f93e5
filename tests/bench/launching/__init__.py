"""What the launch benchmarks run: the same scripts and the same kernel on the practice closet and on real GPUs."""
