"""stepscope: where did the time of a distributed training step go, who caused it, and what would fixing it give?"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

__version__ = "0.1.0"


def open(path: str | PathLike[str] | Sequence[str | PathLike[str]], peak_tflops: float | None = None) -> Any:
    """A run directory, or traces of other programs, as an `analysis.opened.OpenedRun`: see docs/python.md.

    `peak_tflops`: peak of one device in TFLOP/s, for MFU. StepscopeError where nothing can be read.
    """
    from importlib import import_module  # by name: whoever only trains imports this package, but never the analysis

    return import_module("stepscope.analysis.opened").open(path, peak_tflops)
