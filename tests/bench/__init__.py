"""Benchmarks: `make bench` prints one line `NAME VALUE UNIT` for each figure; docs/benchmarks.md lists them."""
