"""Means of blocks in groups, against one product a block."""

from __future__ import annotations

import numpy as np
import pytest

from gpflow_hybrid.evidence.block_means import COLUMNS, BlockMeans


@pytest.mark.parametrize("shared", [True, False], ids=["one kernel", "a kernel per latent"])
@pytest.mark.parametrize("num_data", [5, 2 * COLUMNS + 19])
def test_means_are_those_of_all_other_data_as_they_are_now(num_data: int, shared: bool) -> None:
    # Blocks of eight, or of three of five data; the last overlaps with the one before.
    size = min(8, num_data - 2)
    starts = [*range(0, num_data - size, size), num_data - size]
    parts = [(start, start + size) for start in starts]
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((len(parts), 2, 1 if shared else 3, num_data, size))
    for w, (start, end) in zip(weights, parts, strict=True):
        w[..., start:end, :] = 0.0
    x = rng.standard_normal((2, 3, 4, num_data))
    seen = []
    for i, mean in BlockMeans(parts, weights).follow(x):
        np.testing.assert_allclose(mean, x @ weights[i], rtol=1e-10, atol=1e-10)
        start, end = parts[i]
        x[..., start:end] = rng.standard_normal((2, 3, 4, size))  # the block moves
        seen.append(i)
    assert seen == list(range(len(parts)))
