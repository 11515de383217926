"""Slow, obvious NumPy versions of what the package computes: dense inverses, brute-force integrals.

Shapes are the package's: ``K [L, N, N]`` (or ``[1, N, N]`` if shared), everything else ``[N, L]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.optimize
import scipy.stats
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr

LogProb = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""``log p(y|f)`` element by element, for arrays that broadcast."""


def _squeezed_probit(f: np.ndarray) -> np.ndarray:
    """GPflow's ``inv_probit``: probabilities stay in ``[1e-3, 1 − 1e-3]``."""
    return 1e-3 + (1.0 - 2e-3) * ndtr(f)


def _bernoulli(f: np.ndarray, y: np.ndarray) -> np.ndarray:
    p = _squeezed_probit(f)
    return np.log(np.where(y == 1.0, p, 1.0 - p))


def _beta(f: np.ndarray, y: np.ndarray) -> np.ndarray:
    p = _squeezed_probit(f)
    return scipy.stats.beta.logpdf(y, 5.0 * p, 5.0 * (1.0 - p))


def _ordinal(f: np.ndarray, y: np.ndarray) -> np.ndarray:
    edges, y = np.array([-np.inf, -0.4, 0.4, np.inf]), np.asarray(y, int)
    return np.log((1.0 - 2e-3) * (ndtr(edges[y + 1] - f) - ndtr(edges[y] - f)) + 1e-6)


def _student_t(f: np.ndarray, y: np.ndarray) -> np.ndarray:
    return scipy.stats.t.logpdf(y, 4.0, f, 0.5)


def _exp(f: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(f) = ∞ is p = 0
        return np.exp(f)


LOG_PROBS: dict[str, LogProb] = {
    "gaussian": lambda f, y: log_normal(y, f, np.asarray(0.1)),
    "bernoulli_probit": _bernoulli,
    "bernoulli_logit": lambda f, y: -np.logaddexp(0.0, (1.0 - 2.0 * y) * f),
    "probit_bernoulli": lambda f, y: log_ndtr((2.0 * y - 1.0) * f),
    "student_t": _student_t,
    "poisson": lambda f, y: y * f - _exp(f) - gammaln(y + 1.0),
    "exponential": lambda f, y: -y * _exp(-f) - f,
    "gamma": lambda f, y: np.log(y) - y * _exp(-f) - 2.0 * f,
    "beta": _beta,
    "ordinal": _ordinal,
    "own_log_cosh": lambda f, y: -np.logaddexp(2.0 * (y - f), 2.0 * (f - y)) - np.log(np.pi / 4.0),
}
"""The scalar likelihoods of ``tests.likelihood_cases``, by SciPy."""

REACH = 16.0
"""Half-width of the brute-force integrals, in standard deviations of q and of the cavity."""

NUM_POINTS = 20_001


class Posterior(NamedTuple):
    mean: np.ndarray  # [N, L]
    variance: np.ndarray  # [N, L]
    covariance: np.ndarray  # [L, N, N]
    log_normaliser: float


def posterior(
    K: np.ndarray, mean: np.ndarray, lambda_1: np.ndarray, lambda_2: np.ndarray
) -> Posterior:
    """``q(f) ∝ N(f; μ₀, K) Π exp(λ₁f − ½λ₂f²)``; K may be singular, λ₂ has any sign."""
    N, L = lambda_1.shape
    m, v, Sigmas, log_Z = np.empty((N, L)), np.empty((N, L)), [], 0.0
    for i, K_i in enumerate(np.broadcast_to(K, (L, N, N))):
        mu, lam = mean[:, i], lambda_2[:, i]
        r = lambda_1[:, i] - lam * mu
        M = np.eye(N) + K_i * lam  # I + KΛ
        Sigma = np.linalg.inv(M) @ K_i
        m[:, i], v[:, i] = mu + Sigma @ r, np.diag(Sigma)
        _, log_det = np.linalg.slogdet(M)
        log_Z += -0.5 * log_det + 0.5 * r @ Sigma @ r
        log_Z += mu @ lambda_1[:, i] - 0.5 * mu @ (lam * mu)
        Sigmas.append(Sigma)
    return Posterior(m, v, np.stack(Sigmas), float(log_Z))


def smallest_eigenvalue(K: np.ndarray, lambda_2: np.ndarray) -> float:
    """Of ``I + KΛ`` over all latents, through the similar symmetric ``I + √K Λ √K``."""
    N, L = lambda_2.shape
    smallest = np.inf
    for K_i, lam in zip(np.broadcast_to(K, (L, N, N)), lambda_2.T, strict=True):
        values, vectors = np.linalg.eigh(K_i)
        root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
        smallest = min(smallest, np.linalg.eigvalsh(np.eye(N) + root * lam @ root)[0])
    return float(smallest)


def log_normal(f: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    return -0.5 * (np.log(2.0 * np.pi * v) + (f - m) ** 2 / v)


def grid(*gaussians: tuple[np.ndarray, np.ndarray], num: int = NUM_POINTS) -> np.ndarray:
    """Points ``[num, ...]`` that cover every one of the Gaussians ``(m, v)``, equally spaced."""
    low = np.min([m - REACH * np.sqrt(v) for m, v in gaussians], axis=0)
    high = np.max([m + REACH * np.sqrt(v) for m, v in gaussians], axis=0)
    return np.linspace(low, high, num)


def log_integral(log_values: np.ndarray, f: np.ndarray) -> np.ndarray:
    """``log ∫ exp(log_values) df`` over the leading axis; the integrand vanishes at both ends."""
    return logsumexp(log_values, axis=0) + np.log(f[1] - f[0])


def log_expected_power(
    m: np.ndarray, v: np.ndarray, Y: np.ndarray, log_prob: LogProb, alpha: float
) -> np.ndarray:
    """``(1/α) log E_N(f; m, v)[p(y|f)^α]``, element by element."""
    f = grid((m, v))
    return log_integral(log_normal(f, m, v) + alpha * log_prob(f, Y), f) / alpha


def expected_log_prob(m: np.ndarray, v: np.ndarray, Y: np.ndarray, log_prob: LogProb) -> np.ndarray:
    """``E_N(f; m, v)[log p(y|f)]``, element by element."""
    f = grid((m, v))
    density = np.exp(log_normal(f, m, v))
    # 0 · (−∞) in the far tails is 0.
    terms = np.where(density > 0.0, density * log_prob(f, Y), 0.0)
    return np.sum(terms, axis=0) * (f[1] - f[0])


def power_ep(
    K: np.ndarray,
    mean: np.ndarray,
    lambda_1: np.ndarray,
    lambda_2: np.ndarray,
    Y: np.ndarray,
    log_prob: LogProb,
    alpha: float,
) -> float:
    """``L_α = log Z + (1/α) Σ log E_q[(p/t)^α]``, one observation for each datum and latent."""
    q = posterior(K, mean, lambda_1, lambda_2)

    def log_t(f: np.ndarray) -> np.ndarray:
        return lambda_1 * f - 0.5 * lambda_2 * f**2

    if alpha == 0.0:
        ratio = expected_log_prob(q.mean, q.variance, Y, lambda f, y: log_prob(f, y) - log_t(f))
        return q.log_normaliser + float(np.sum(ratio))
    cavity_variance = 1.0 / (1.0 / q.variance - alpha * lambda_2)
    cavity_mean = cavity_variance * (q.mean / q.variance - alpha * lambda_1)
    f = grid((q.mean, q.variance), (cavity_mean, cavity_variance))
    log_values = log_normal(f, q.mean, q.variance) + alpha * (log_prob(f, Y) - log_t(f))
    return q.log_normaliser + float(np.sum(log_integral(log_values, f))) / alpha


class Tilted(NamedTuple):
    """Of ``q(f) (p(y|f)/t(f))^α``: ``(1/α)`` times the log normaliser, mean and variance."""

    log_ratio: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


def tilted(
    m: np.ndarray,
    v: np.ndarray,
    lambda_1: np.ndarray,
    lambda_2: np.ndarray,
    Y: np.ndarray,
    log_prob: LogProb,
    alpha: float,
) -> Tilted:
    """Moments of the tilted distribution of ``q = N(m, v)``, element by element."""
    cavity_variance = 1.0 / (1.0 / v - alpha * lambda_2)
    cavity_mean = cavity_variance * (m / v - alpha * lambda_1)
    f = grid((m, v), (cavity_mean, cavity_variance))
    log_t = lambda_1 * f - 0.5 * lambda_2 * f**2
    log_values = log_normal(f, m, v) + alpha * (log_prob(f, Y) - log_t)
    log_mass = log_integral(log_values, f)
    density = np.exp(log_values - log_mass) * (f[1] - f[0])
    mean = np.sum(density * f, axis=0)
    return Tilted(log_mass / alpha, mean, np.sum(density * (f - mean) ** 2, axis=0))


def expectation_propagation(
    K: np.ndarray,
    mean: np.ndarray,
    Y: np.ndarray,
    log_prob: LogProb,
    alpha: float = 1.0,
    num_sweeps: int = 25,
) -> tuple[np.ndarray, np.ndarray]:
    """``λ₁, λ₂`` of sequential EP (Rasmussen & Williams' Algorithm 3.5), one site after the other."""
    lambda_1, lambda_2 = np.zeros_like(mean), np.zeros_like(mean)
    for _ in range(num_sweeps):
        for n in np.ndindex(mean.shape):
            q = posterior(K, mean, lambda_1, lambda_2)
            m, v = q.mean[n], q.variance[n]
            new = tilted(m, v, lambda_1[n], lambda_2[n], Y[n], log_prob, alpha)
            lambda_1[n] += (new.mean / new.variance - m / v) / alpha
            lambda_2[n] += (1.0 / new.variance - 1.0 / v) / alpha
    return lambda_1, lambda_2


class Laplace(NamedTuple):
    """The mode f̂ of ``p(f|y)``, ``W = −∂² log p(y|f̂)/∂f²``, and the log marginal likelihood."""

    mode: np.ndarray
    W: np.ndarray
    log_marginal_likelihood: float


def laplace(
    K: np.ndarray,
    mean: np.ndarray,
    Y: np.ndarray,
    log_prob: LogProb,
    derivatives: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> Laplace:
    """The mode by SciPy's trust region, in ``z`` with ``f = μ₀ + chol(K) z``.

    :param derivatives: first and second derivative of ``log_prob`` in f.
    """
    N, L = mean.shape
    chol = np.linalg.cholesky(np.broadcast_to(K, (L, N, N)))

    def f_of(z: np.ndarray) -> np.ndarray:
        return mean + np.einsum("lnm,ml->nl", chol, z.reshape(N, L))

    def loss(z: np.ndarray) -> float:
        return 0.5 * z @ z - float(np.sum(log_prob(f_of(z), Y)))

    def gradient(z: np.ndarray) -> np.ndarray:
        return z - np.einsum("lnm,nl->ml", chol, derivatives(f_of(z), Y)[0]).ravel()

    def hessian(z: np.ndarray) -> np.ndarray:
        W = -derivatives(f_of(z), Y)[1]
        H = np.einsum("lnm,nl,lnk,lj->mlkj", chol, W, chol, np.eye(L)).reshape(N * L, N * L)
        return np.eye(N * L) + H

    found = scipy.optimize.minimize(
        loss,
        np.zeros(N * L),
        method="trust-exact",
        jac=gradient,
        hess=hessian,
        options={"gtol": 1e-10},
    )
    z = found.x
    for _ in range(2):  # what the trust region has left, by Newton's method
        z = z - np.linalg.solve(hessian(z), gradient(z))
    mode = f_of(z)
    W = -derivatives(mode, Y)[1]
    log_det = sum(
        np.linalg.slogdet(np.eye(N) + K_i * W[:, i])[1]
        for i, K_i in enumerate(np.broadcast_to(K, (L, N, N)))
    )
    return Laplace(mode, W, -loss(z) - 0.5 * log_det)


def cavities(
    K: np.ndarray, mean: np.ndarray, lambda_1: np.ndarray, lambda_2: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of every ``q₋ₙ(fₙ)``, ``[N, L]``: the posterior without the nth site."""
    m, v = np.empty_like(lambda_1), np.empty_like(lambda_1)
    for n in range(len(lambda_1)):
        without_1, without_2 = lambda_1.copy(), lambda_2.copy()
        without_1[n], without_2[n] = 0.0, 0.0
        q = posterior(K, mean, without_1, without_2)
        m[n], v[n] = q.mean[n], q.variance[n]
    return m, v


def loo(
    K: np.ndarray,
    mean: np.ndarray,
    lambda_1: np.ndarray,
    lambda_2: np.ndarray,
    Y: np.ndarray,
    log_prob: LogProb,
) -> np.ndarray:
    """``log ∫ q₋ₙ(f) p(yₙ|f) df``, ``[N]``."""
    m, v = cavities(K, mean, lambda_1, lambda_2)
    return log_expected_power(m, v, Y, log_prob, 1.0).sum(axis=1)


def log_evidence_2d(
    m: np.ndarray, v: np.ndarray, log_prob: Callable[[np.ndarray], np.ndarray], num: int = 601
) -> float:
    """``log ∫ N(f; m, diag v) p(y|f) df`` for one datum, two latents; ``log_prob`` of [Q, 2]."""
    f = np.linspace(m - 12.0 * np.sqrt(v), m + 12.0 * np.sqrt(v), num)  # [num, 2]
    points = np.stack(np.meshgrid(f[:, 0], f[:, 1], indexing="ij"), -1).reshape(-1, 2)
    log_values = log_normal(points, m, v).sum(-1) + log_prob(points)
    return float(logsumexp(log_values) + np.log(f[1] - f[0]).sum())
