"""Surfaces put together and drawn: every value where it belongs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.contour import QuadContourSet

from examples.paper import figures, report
from examples.paper.grids import Surfaces, load_surfaces
from examples.paper.plans import SurfacePlan, title_of
from examples.paper.store import ResultStore

PLAN = SurfacePlan("usps", num_grid=4, num_chains=10)
BEST = {"elbo": (1.0, 3.0), "ep_like": (3.0, 1.0), "ep": (1.0, 5.0), "mcmc": (5.0, -1.0)}
"""Optima (log ℓ, log σ) that the surfaces below are made to have."""


@pytest.fixture
def surfaces(tmp_path: Path) -> Surfaces:
    store = ResultStore(tmp_path)
    sigmas = np.array(PLAN.log_values)

    def row(name: str, log_lengthscale: float) -> list[float]:
        x, y = BEST[name]
        return list(-50.0 - (log_lengthscale - x) ** 2 - (sigmas - y) ** 2)

    for x in PLAN.log_values:
        density = list(-0.5 + 0.01 * x + 0.001 * sigmas)
        shared = {"test_log_density": density, "num_data": 100}
        flags = {"converged": [1.0, 1.0, 1.0, float(x > 0.0)], "residual": [0.0] * 4}
        contents = {
            "vi": {"elbo": row("elbo", x), "ep_like": row("ep_like", x), **flags},
            "ep": {"ep": row("ep", x), **flags},
            "mcmc": {
                "mcmc": row("mcmc", x),
                "standard_error": [0.1] * 4,
                "effective_sample_size": [9.0, 9.0, 9.0, 0.5],
            },
        }
        for method, content in contents.items():
            store.save(PLAN.row(method, x), {"result": {**content, **shared}, "seconds": 1.0})
    found = load_surfaces(PLAN, store)
    assert found is not None
    return found


def test_optima_and_their_densities(surfaces: Surfaces) -> None:
    for name, (x, y) in BEST.items():
        best = surfaces.optimum(name)
        assert (best.log_lengthscale, best.log_sigma) == (x, y)
        np.testing.assert_allclose(best.value, -0.5)
        np.testing.assert_allclose(best.log_density, -0.5 + 0.01 * x + 0.001 * y)
    assert surfaces.not_converged == {"vi": 1, "ep": 1}
    assert surfaces.trusted is not None
    assert surfaces.trusted.sum() == 12


def test_what_is_not_trusted_is_no_optimum_of_mcmc(surfaces: Surfaces) -> None:
    assert surfaces.trusted is not None
    values = surfaces.log_marginal["mcmc"].copy()
    values[~surfaces.trusted] = 0.0  # above all others
    marginal = {**surfaces.log_marginal, "mcmc": values}
    best = dataclasses.replace(surfaces, log_marginal=marginal).optimum("mcmc")
    assert (best.log_lengthscale, best.log_sigma) == BEST["mcmc"]


def test_errors_are_means_over_what_is_trusted(surfaces: Surfaces) -> None:
    _, rows = report._errors([surfaces])
    assert [row[1] for row in rows] == ["EP", "VI", "Ours"]
    assert {row[4] for row in rows} == {"12 of 16"}
    difference = surfaces.log_marginal["ep"] - surfaces.log_marginal["mcmc"]
    expected = np.abs(difference[:, :3]).mean()  # the last column's chains disagree
    np.testing.assert_allclose(float(rows[0][2]), expected, atol=1e-5)


def test_an_optimum_on_the_border_is_remarked(surfaces: Surfaces, tmp_path: Path) -> None:
    remarks = [text for _, text in report._remarks([surfaces], [], ResultStore(tmp_path))]
    border = [text.partition(":")[0] for text in remarks if "border" in text]
    assert border == ["MCMC", "EP"]
    assert "mcmc: chains disagree at 4 of 16 points" in remarks


def test_markers_and_numbers_are_at_the_optima(surfaces: Surfaces) -> None:
    figure = figures.paper_figure(surfaces)
    panels = {axis.get_title(): axis for axis in figure.axes if axis.get_title()}
    titles = {"elbo": "VI", "ep_like": "Ours", "ep": "EP", "mcmc": "MCMC"}
    assert set(panels) == set(titles.values())
    for name, title in titles.items():
        (marker,) = panels[title].lines
        assert (marker.get_xdata()[0], marker.get_ydata()[0]) == BEST[name]
        (text,) = panels[title].texts
        assert text.get_text() == f"${surfaces.optimum(name).log_density:.3f}$"
    plt.close(figure)


def test_log_lengthscale_is_drawn_to_the_right(surfaces: Surfaces) -> None:
    """The brightest cell of the error's panel is where the estimate is most above the truth."""
    figure = figures.error_figure(surfaces)
    assert figure is not None
    panel = next(axis for axis in figure.axes if axis.get_title().startswith("EP"))
    mesh = panel.collections[0]
    drawn = np.asarray(mesh.get_array()).reshape(4, 4)  # rows upwards: log σ
    error = surfaces.log_marginal["ep"] - surfaces.log_marginal["mcmc"]
    np.testing.assert_allclose(drawn, error.T)
    plt.close(figure)


def test_all_panels_share_a_colour_scale(surfaces: Surfaces) -> None:
    low, high = figures.colour_scale(surfaces)
    assert low < np.log(0.5) < high
    assert figures.colour_scale(Surfaces(SurfacePlan("sonar"), 1, {}, {}, None, None, {}, [])) == (
        -1.2,
        -0.2,
    )
    figure = figures.paper_figure(surfaces)
    drawn = [c for axis in figure.axes for c in axis.collections if isinstance(c, QuadContourSet)]
    filled = [contours for contours in drawn if contours.filled]
    assert len(filled) == 7  # four above, three below: VI and Ours share theirs
    for contours in filled:
        assert contours.levels[0] == low
        assert contours.levels[-1] == high
    plt.close(figure)


def test_panels_have_log_sigma_upwards_and_missing_values_blank(surfaces: Surfaces) -> None:
    values = np.full((4, 4), -0.6)
    values[3, 0] = -0.1  # long lengthscale, small σ: bottom right
    values[0, 3] = np.nan  # top left
    figure, axis = plt.subplots(figsize=(4, 4), dpi=50)
    figures._panel(axis, surfaces, values, (-1.0, 0.0))
    axis.set_axis_off()
    figure.subplots_adjust(0, 0, 1, 1)
    figure.canvas.draw()
    grey = np.asarray(figure.canvas.buffer_rgba())[..., 0]
    top_left, bottom_right, middle = grey[2, 2], grey[-3, -3], grey[100, 100]
    assert top_left == 255
    assert bottom_right > middle
    plt.close(figure)


def test_incomplete_methods_are_left_out_and_named(tmp_path: Path, surfaces: Surfaces) -> None:
    store = ResultStore(tmp_path)
    store.path(PLAN.row("ep", 5.0)).unlink()
    found = load_surfaces(PLAN, store)
    assert found is not None
    assert "ep" not in found.log_marginal
    assert found.incomplete == ["ep"]


def test_titles() -> None:
    assert title_of("usps") == "USPS"
    assert title_of("sonar") == "Sonar"
