"""Faults of `install()`."""

from __future__ import annotations

from .fault import Mutant

INSTALL_TESTS = ("test_flashinfer_install.py", "-k", "decides or restores")

MUTANTS = (
    Mutant(
        "install: a CPU's calls go where the current CUDA device's do",
        (
            (
                "upstream.py",
                'if device.type != "cuda":\n        return False',
                "if False:\n        return False",
            ),
        ),
        INSTALL_TESTS,
    ),
    Mutant(
        "install: a second one wraps what the first has put there",
        (("upstream.py", "if theirs in _originals:", "if False:"),),
        INSTALL_TESTS,
    ),
    Mutant(
        "install: the module that defines the functions keeps ours",
        (
            (
                "upstream.py",
                "in map(importlib.import_module, MODULES)",
                "in [importlib.import_module(MODULES[0])]",
            ),
        ),
        INSTALL_TESTS,
    ),
    Mutant(
        "install: a plan of CPU lengths is made where they lie",
        (
            (
                "upstream.py",
                '_named(kwargs.get("device"))',
                'getattr(args[0], "device", None) if args else None',
            ),
        ),
        INSTALL_TESTS,
    ),
    Mutant(
        "install: a missing library of CUDA ends it without a remedy",
        (("upstream.py", "except (ImportError, OSError) as error:", "except ImportError as error:"),),
        (*INSTALL_TESTS[:2], "lacks_a_library"),
    ),
)
