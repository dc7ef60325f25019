"""Planted faults, each of which must make the tests fail: `python -m mutants`."""
