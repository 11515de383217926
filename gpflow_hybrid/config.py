"""Settings of the package, beside GPflow's own in :mod:`gpflow.config`."""

from .linalg import linear_algebra, set_linear_algebra

__all__ = ["linear_algebra", "set_linear_algebra"]
