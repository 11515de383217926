"""What sites act on: a Gaussian prior at the data, with its posterior given sites, on arrays.

:class:`Prior`, :class:`Posterior` and :class:`Covariance` say what inference needs of one;
:class:`DensePrior` has the kernel matrix. Inference knows the protocols only.
"""

from .dense import DensePrior, PriorMoments
from .kernel_matrix import KernelMatrix
from .protocol import Array, Covariance, Posterior, Prior

__all__ = [
    "Array",
    "Covariance",
    "DensePrior",
    "KernelMatrix",
    "Posterior",
    "Prior",
    "PriorMoments",
]
