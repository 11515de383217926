"""The numbers of the paper's Table 1: mean and standard deviation over five folds."""

from __future__ import annotations

# data set → learner → (accuracy, its deviation, log predictive density, its deviation)
TABLE_1 = {
    "ionosphere": {"vi": (0.940, 0.016, -0.179, 0.023), "ours": (0.946, 0.016, -0.176, 0.023)},
    "sonar": {"vi": (0.836, 0.036, -0.353, 0.013), "ours": (0.860, 0.034, -0.340, 0.015)},
    "diabetes": {"vi": (0.783, 0.015, -0.473, 0.030), "ours": (0.781, 0.013, -0.473, 0.030)},
    "usps": {"vi": (0.974, 0.010, -0.080, 0.011), "ours": (0.974, 0.010, -0.077, 0.011)},
}

SIGNIFICANT = {
    "ionosphere": (False, False),
    "sonar": (True, True),
    "diabetes": (False, False),
    "usps": (False, True),
}
"""Whether the paper calls the difference in accuracy, and in density, significant."""
