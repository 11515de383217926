"""GPflow models whose approximate posterior is a prior times Gaussian sites."""

from .base import SiteModel
from .cvi import CVIModel

__all__ = ["CVIModel", "SiteModel"]
