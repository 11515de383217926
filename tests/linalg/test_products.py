"""Products by BLAS against NumPy's."""

import numpy as np
import pytest

from gpflow_hybrid.linalg import products

A = np.random.default_rng(0).normal(size=(4, 9))
B = np.random.default_rng(1).normal(size=(9, 5))
S = A @ A.T
SIGNED = np.random.default_rng(2).normal(size=9)


@pytest.mark.parametrize(("left", "right"), [(A, B), (A, A.T), (A.T, A), (B.T, A.T)])
def test_product_takes_either_order(left, right):
    found = products.product(left, right)
    np.testing.assert_allclose(found, left @ right, rtol=1e-13)
    assert found.flags.c_contiguous


@pytest.mark.parametrize("weights", [SIGNED, np.abs(SIGNED), -np.abs(SIGNED), 0.0 * SIGNED])
def test_weighted_gram_for_weights_of_either_sign(weights):
    found = products.weighted_gram(A, weights)
    np.testing.assert_allclose(found, (A * weights) @ A.T, atol=1e-13)
    np.testing.assert_array_equal(found, found.T)


def test_forms_and_vectors():
    np.testing.assert_allclose(products.quadratic_forms(A, S), np.diag(A.T @ S @ A), rtol=1e-13)
    np.testing.assert_allclose(products.squared_norms(A), np.diag(A.T @ A), rtol=1e-13)
    np.testing.assert_allclose(products.combine(A, SIGNED), A @ SIGNED, rtol=1e-13)
    np.testing.assert_allclose(products.project(A, SIGNED[:4]), A.T @ SIGNED[:4], rtol=1e-13)
    np.testing.assert_allclose(products.congruence(A.T, S), A.T @ S @ A, rtol=1e-13)


def test_cholesky_and_triangular_systems():
    K = S + np.eye(4)
    before = K.copy()
    L = products.cholesky(K)
    np.testing.assert_array_equal(K, before)
    np.testing.assert_allclose(L @ L.T, K, rtol=1e-13)
    np.testing.assert_array_equal(L, np.tril(L))
    np.testing.assert_allclose(products.solve_lower(L, A), np.linalg.solve(L, A), rtol=1e-12)
    found = products.solve_lower(L, A, transpose=True)
    np.testing.assert_allclose(found, np.linalg.solve(L.T, A), rtol=1e-12)


@pytest.mark.parametrize("K", [-np.eye(3), np.full((3, 3), np.nan), np.full((3, 3), np.inf)])
def test_cholesky_of_no_covariance_is_nan(K):
    assert np.isnan(products.cholesky(K)).all()
