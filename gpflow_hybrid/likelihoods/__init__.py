"""Likelihoods with exact expectations, and expectations that can be trusted for all others."""

from .expectations import log_expected_power
from .probit import ProbitBernoulli

__all__ = ["ProbitBernoulli", "log_expected_power"]
