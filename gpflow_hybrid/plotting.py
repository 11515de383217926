"""matplotlib, where it is there."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """``matplotlib.pyplot``, or an ImportError that says how to get it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plot() needs matplotlib, which is not installed: pip install "
            "'gpflow_hybrid[tensorboard]', which has it."
        ) from error
    return plt
