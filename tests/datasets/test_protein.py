"""The regression benchmark that comes with the checkout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples import data


def test_shapes_types_and_the_first_row_of_the_original() -> None:
    X, Y = data.load_protein()
    assert X.shape == (45730, 9)
    assert Y.shape == (45730, 1)
    assert X.dtype == Y.dtype == np.float64
    assert np.isfinite(X).all()
    assert np.ptp(X, axis=0).min() > 0
    first = [13558.3, 4305.35, 0.31754, 162.173, 1872790.507, 215.359, 4287.87, 102.0, 27.0302]
    np.testing.assert_array_equal(X[0], first)
    assert Y[0, 0] == 17.284
    assert Y.min() >= 0
    assert Y.max() < 21


def test_damage_is_found_before_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(data.FILE.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "protein.npz").write_bytes(content)
    monkeypatch.setattr(data, "FILE", tmp_path / "protein.npz")
    with pytest.raises(ValueError, match="protein.npz is damaged: expected SHA-256 d4e2778"):
        data.load_protein()
