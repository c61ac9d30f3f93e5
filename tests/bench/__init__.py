"""Benchmarks: `make bench` prints one line a figure, `NAME VALUE UNIT`; docs/benchmarks.md keeps them."""
