"""All ranks at once, a process each: the exchange on several GPUs of one host.

`runner.py` runs the parts and writes what they find; `team.py` starts the ranks, `together.py` times them by
their slowest; the parts are a module each.
"""
