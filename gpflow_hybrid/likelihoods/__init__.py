"""Likelihoods with exact expectations, and expectations that can be trusted for all others."""

from .ordinal import Ordinal
from .probit import ProbitBernoulli
from .ratios import log_expected_power

__all__ = ["Ordinal", "ProbitBernoulli", "log_expected_power"]
