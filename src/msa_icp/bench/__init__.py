"""Benchmarks: how to time, the plain read that judges a kernel, and one module a stage."""
