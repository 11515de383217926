"""The densities of GPflow's likelihoods, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from .density import Array, Density, Expected, ExpectedPower, InParameter
from .log_cdf import log_cdf
from .node_rules import PointDerivatives
from .ordinal import FAR, FLOOR
from .probit_powers import expected_cdf_power

SQUEEZE = 1e-3
"""GPflow's ``inv_probit`` keeps probabilities so far from 0 and 1."""

UNDERFLOW = -37.0
"""Below this Φ has few digits or none."""


def _scalar(log_prob: Array, first: Array, second: Array | None) -> PointDerivatives:
    return PointDerivatives(log_prob, first, [] if second is None else [second])


class LinearMinusExponential(Density):
    """``log p = a f − c exp(s f) + b`` with ``s = ±1``: counts, waiting times, positive data."""

    def __init__(self, a: Any, c: Any, s: float, b: Any) -> None:
        self.a, self.c, self.s, self.b = a, c, s, b

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        e = self.c * np.exp(self.s * f)
        return _scalar(self.a * f - e + self.b, self.a - self.s * e, -e if second else None)

    def expected(self, m: Array, v: Array) -> Expected:
        e = self.c * np.exp(self.s * m + 0.5 * v)
        value = self.a * m - e + self.b
        return Expected(value, self.a - self.s * e, -0.5 * e, -e, -0.5 * self.s * e, -0.25 * e)


def poisson(y: Array, binsize: float) -> Density:
    """Counts with rate ``binsize exp(f)``."""
    return LinearMinusExponential(y, binsize, 1.0, y * np.log(binsize) - special.gammaln(y + 1.0))


def exponential(y: Array) -> Density:
    """Waiting times with mean ``exp(f)``."""
    return LinearMinusExponential(-1.0, y, -1.0, 0.0)


class GammaDensity(LinearMinusExponential):
    """Positive data of shape k and scale ``exp(f)``."""

    def __init__(self, y: Array, shape: Any) -> None:
        log_y = np.log(y)
        super().__init__(-shape, y, -1.0, (shape - 1.0) * log_y - special.gammaln(shape))
        self.in_shape = log_y - special.digamma(shape)

    def in_parameters(self, f: Array) -> list[InParameter]:
        return [InParameter(self.in_shape - f, -np.ones_like(f))]


class GaussianDensity(Density):
    """``N(y; f, s)``, with s one number or one a datum."""

    def __init__(self, y: Array, variance: Any) -> None:
        self.y, self.variance = y, variance

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        s, r = self.variance, self.y - f
        log_prob = -0.5 * (np.log(2.0 * np.pi * s) + r * r / s)
        return _scalar(log_prob, r / s, np.broadcast_to(-1.0 / s, f.shape) if second else None)

    def in_parameters(self, f: Array) -> list[InParameter]:
        s, r = self.variance, self.y - f
        return [InParameter(0.5 * (r * r / s - 1.0) / s, -r / (s * s))]

    def expected(self, m: Array, v: Array) -> Expected:
        s, r = self.variance, self.y - m
        value = -0.5 * (np.log(2.0 * np.pi * s) + (r * r + v) / s)
        zero, precision = np.zeros_like(m), np.broadcast_to(1.0 / s, m.shape)
        return Expected(value, r / s, -0.5 * precision, -precision, zero, zero)

    def with_noise(self, variance: Array) -> tuple[Density, Callable[[Any], Any]]:
        return GaussianDensity(self.y, self.variance + variance), lambda d: [d[0], d[0]]

    def expected_power(self, m: Array, v: Array, alpha: float) -> ExpectedPower:
        # E[N(y; f, s)^α]^(1/α) = (2πs)^−½ (1 + αv/s)^(−1/2α) exp(−½ (y − m)² / (s + αv))
        s, r = self.variance, self.y - m
        wide = s + alpha * v
        b = r / wide
        value = -0.5 * (np.log(2.0 * np.pi * s) + np.log1p(alpha * v / s) / alpha + r * b)
        in_s = -0.5 * ((1.0 - v / wide) / s - b * b)
        return ExpectedPower(value, b, -0.5 * (1.0 / wide - alpha * b * b), [in_s])


class StudentTDensity(Density):
    """Student's t with ν degrees of freedom and scale s around f."""

    def __init__(self, y: Array, scale: Any, df: float) -> None:
        self.y, self.scale, self.df = y, scale, df
        self.constant = special.gammaln(0.5 * (df + 1.0)) - special.gammaln(0.5 * df)
        self.constant = self.constant - 0.5 * np.log(np.pi * df) - np.log(scale)

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        r = f - self.y
        r2, wide = r * r, self.df * self.scale * self.scale
        weight = (self.df + 1.0) / (wide + r2)
        log_prob = self.constant - 0.5 * (self.df + 1.0) * np.log1p(r2 / wide)
        H = weight * (r2 - wide) / (wide + r2) if second else None
        return _scalar(log_prob, -weight * r, H)

    def in_parameters(self, f: Array) -> list[InParameter]:
        r = f - self.y
        r2, wide = r * r, self.df * self.scale * self.scale
        weight = (self.df + 1.0) / (wide + r2)
        in_scale = (weight * r2 - 1.0) / self.scale
        return [InParameter(in_scale, 2.0 * weight * r * wide / (self.scale * (wide + r2)))]


class ProbitDensity(Density):
    """``Φ((2y − 1) f)``."""

    def __init__(self, y: Array) -> None:
        self.sign = 2.0 * y - 1.0

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        z = self.sign * f
        H = log_cdf(z, 2) if second else None
        return _scalar(log_cdf(z), self.sign * log_cdf(z, 1), H)

    def log_prob(self, f: Array) -> Array:
        z = self.sign * f
        cdf = special.ndtr(z)
        with np.errstate(divide="ignore"):
            value = np.log(cdf, out=cdf)
        if z.min(initial=0.0) < UNDERFLOW:
            value[z < UNDERFLOW] = special.log_ndtr(z[z < UNDERFLOW])
        return value

    def expected_power(self, m: Array, v: Array, alpha: float) -> ExpectedPower:
        z = (self.sign * m).ravel()
        value, d_m, d_v = (x.reshape(m.shape) for x in expected_cdf_power(z, v.ravel(), alpha))
        return ExpectedPower(value, self.sign * d_m, d_v, [])


class SqueezedProbitDensity(Density):
    """GPflow's ``Bernoulli``: Φ squeezed into [0.001, 0.999], of ``κf`` with κ = 1, or less under noise."""

    def __init__(self, y: Array, kappa: Any = 1.0) -> None:
        self.sign, self.kappa = np.where(y == 1, 1.0, -1.0), kappa

    def _slope(self, f: Array) -> tuple[Array, Array, Array]:
        z = self.sign * self.kappa * f
        p = special.ndtr(z) * (1.0 - 2.0 * SQUEEZE) + SQUEEZE
        return z, p, (1.0 - 2.0 * SQUEEZE) * _gaussian(z) / p

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        z, p, h = self._slope(f)
        H = -(self.kappa**2) * h * (z + h) if second else None
        return _scalar(np.log(p), self.sign * self.kappa * h, H)

    def in_parameters(self, f: Array) -> list[InParameter]:
        """In κ, under noise; GPflow's has none."""
        if np.ndim(self.kappa) == 0:
            return []
        z, _, h = self._slope(f)
        return [InParameter(self.sign * f * h, self.sign * h * (1.0 - z * (z + h)))]

    def with_noise(self, variance: Array) -> tuple[Density, Callable[[Any], Any]]:
        kappa = 1.0 / np.sqrt(1.0 + variance)
        density = SqueezedProbitDensity(0.5 * (self.sign + 1.0), kappa)
        return density, lambda d: [-0.5 * kappa**3 * d[0]]


class LogitDensity(Density):
    """``1 / (1 + exp(−(2y − 1) f))``."""

    def __init__(self, y: Array) -> None:
        self.sign = np.where(y == 1, 1.0, -1.0)

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        z = self.sign * f
        p = special.expit(-z)
        return _scalar(-np.logaddexp(0.0, -z), self.sign * p, -p * (1.0 - p) if second else None)


class BetaDensity(Density):
    """Data in (0, 1) with mean ``μ = Φ(f)``, squeezed as by GPflow, and ``a = μs``, ``b = (1 − μ)s``."""

    def __init__(self, y: Array, scale: Any) -> None:
        y = np.clip(y, 1e-6, 1.0 - 1e-6)
        self.log_y, self.log_1y, self.scale = np.log(y), np.log1p(-y), scale

    def _mean(self, f: Array) -> tuple[Array, Array, Array]:
        slope = (1.0 - 2.0 * SQUEEZE) * _gaussian(f)
        mean = special.ndtr(f) * (1.0 - 2.0 * SQUEEZE) + SQUEEZE
        return mean, slope, -f * slope

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        mean, slope, bend = self._mean(f)
        s, a = self.scale, mean * self.scale
        b = s - a
        log_prob = (a - 1.0) * self.log_y + (b - 1.0) * self.log_1y - special.betaln(a, b)
        in_mean = s * (self.log_y - self.log_1y - special.digamma(a) + special.digamma(b))
        if not second:
            return _scalar(log_prob, in_mean * slope, None)
        curved = -s * s * (special.polygamma(1, a) + special.polygamma(1, b))
        return _scalar(log_prob, in_mean * slope, curved * slope * slope + in_mean * bend)

    def in_parameters(self, f: Array) -> list[InParameter]:
        mean, slope, _ = self._mean(f)
        s, a = self.scale, mean * self.scale
        b = s - a
        in_a, in_b = self.log_y - special.digamma(a), self.log_1y - special.digamma(b)
        trigamma = special.polygamma
        both = in_a - in_b + s * ((1.0 - mean) * trigamma(1, b) - mean * trigamma(1, a))
        return [InParameter(mean * in_a + (1.0 - mean) * in_b + special.digamma(s), both * slope)]


class OrdinalDensity(Density):
    """``Φ((aₖ − f)/σ) − Φ((aₖ₋₁ − f)/σ)``, squeezed and with a floor as GPflow's; σ one number or one a
    datum."""

    def __init__(self, y: Array, edges: Array, sigma: Any) -> None:
        level = y.astype(int)
        self.level, self.edges, self.sigma = y, edges, sigma
        self.upper = np.append(edges, np.inf)[level]
        self.lower = np.append(-np.inf, edges)[level]

    def _parts(self, f: Array) -> tuple[Array, ...]:
        up, low = (np.clip((e - f) / self.sigma, -FAR, FAR) for e in (self.upper, self.lower))
        scale = 1.0 - 2.0 * SQUEEZE
        p = scale * (special.ndtr(up) - special.ndtr(low)) + FLOOR
        pu, pl = scale * _gaussian(up) / p, scale * _gaussian(low) / p
        return up, low, p, pu, pl

    def at(self, f: Array, second: bool = True) -> PointDerivatives:
        up, low, p, pu, pl = self._parts(f)
        g = (pl - pu) / self.sigma
        H = (low * pl - up * pu) / self.sigma**2 - g * g if second else None
        return _scalar(np.log(p), g, H)

    def in_parameters(self, f: Array) -> list[InParameter]:
        up, low, _, pu, pl = self._parts(f)
        g = (pl - pu) / self.sigma
        d = (low * pl - up * pu) / self.sigma
        curved = (low * low * pl - up * up * pu) / self.sigma**2
        return [InParameter(d, curved - g / self.sigma - g * d)]

    def with_noise(self, variance: Array) -> tuple[Density, Callable[[Any], Any]]:
        sigma = np.sqrt(self.sigma**2 + variance)
        return OrdinalDensity(self.level, self.edges, sigma), lambda d: [
            0.5 * d[0] / sigma,
            self.sigma * d[0] / sigma,
        ]


def _gaussian(z: Array) -> Array:
    return np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi)
