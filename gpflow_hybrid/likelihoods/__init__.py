"""Likelihoods with exact expectations, and expectations that can be trusted for all others."""

from .expectations import log_expected_power
from .ordinal import Ordinal
from .probit import ProbitBernoulli

__all__ = ["Ordinal", "ProbitBernoulli", "log_expected_power"]
