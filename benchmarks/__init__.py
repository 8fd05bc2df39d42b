"""Benchmarks. Each `bench_*.py` is a script; `harness/` has what they share."""
