"""The matrix product of Triton's interpreter, in FP64 and rounded once.

NumPy leaves the order of its additions to a BLAS, where it depends on the shape, on the processor and,
without AVX-512, on a row's place in the matrix. A GPU's instruction adds every row alike: the kernels' equal
bits rest on that. Products of e4m3 numbers and sums of 128 of them are exact in FP64, so here too a score's
bits depend on its query and its keys alone, and tests that compare bits show what the kernels do with rows,
pages and tiles.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np


def install() -> None:
    """From here on, in this process."""
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def create_dot(builder: Any, a: Any, b: Any, accumulator: Any, *_: Any) -> Any:
        wide = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        total = (wide + accumulator.data).astype(accumulator.data.dtype)
        return interpreter.TensorHandle(total, accumulator.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
