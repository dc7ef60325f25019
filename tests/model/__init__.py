"""An explicit-state model of the exchange: both row forms, over memory whose stores become visible in any
order that the memory model allows (docs/exchange.md).

    python -m model [WORD ...]      from tests/: every check, or those whose name contains a word

`memory.py` is what a rank may see, `exchange.py` what the two protocols have in common, `tagged.py` and
`legacy.py` are the protocols, `planted.py` are protocols with a fault, `checks.py` says what is explored and
what must come out, `explore.py` explores. It needs nothing but Python.
"""
