"""gh.fit: it finds what GPflow's optimiser finds, goes on where that gives up, and says what is no fit."""

from __future__ import annotations

import os
import re
import signal
import warnings
from typing import Any

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from gpflow.utilities import set_trainable

import gpflow_hybrid as gh
from gpflow_hybrid.training import fitting, starts
from gpflow_hybrid.training.fit_verdicts import Assessment, Ending, verdict_on

PROBIT = gh.likelihoods.ProbitBernoulli()


def labelled(num: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, 2))
    return X, (X[:, :1] + 0.3 * rng.normal(size=(num, 1)) > 0.0).astype(float)


def classifier(scale: float = 1.0, cls: Any = gh.CVIModel) -> Any:
    X, Y = labelled()
    return cls((scale * X, Y), gpflow.kernels.Matern52(), PROBIT)


def wave(num: int = 30) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    X = np.linspace(0.0, 1.0, num)[:, None]
    return X, np.sin(8.0 * X) + 0.1 * rng.normal(size=X.shape)


@pytest.mark.parametrize("cls", [gh.CVIModel, gh.EPModel, gh.LaplaceModel])
def test_it_ends_where_gpflows_optimiser_ends(cls: Any) -> None:
    ours, theirs = classifier(cls=cls), classifier(cls=cls)
    result = gh.fit(ours)
    expected = gpflow.optimizers.Scipy().minimize(theirs.training_loss, theirs.trainable_variables)
    assert result.converged
    assert result.status == "converged"
    np.testing.assert_allclose(result.loss, expected.fun, atol=1e-6)
    np.testing.assert_allclose(float(ours.training_loss()), result.loss, atol=1e-8)
    assert result.gradient_norm < 1e-2
    assert result.residual < 1e-6
    assert result.gain > 10.0
    assert set(result.hyperparameters) == {".kernel.variance", ".kernel.lengthscales"}


def test_sites_follow_the_hyperparameters_after_a_fit() -> None:
    model = classifier()
    gh.fit(model, max_iterations=3)
    model.kernel.lengthscales.assign(2.5)
    found = model.elbo().numpy()
    model.infer(tolerance=1e-10)
    np.testing.assert_allclose(found, model.elbo().numpy(), atol=1e-8)


def test_it_is_begun_again_where_the_line_search_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    minimise = gpflow.optimizers.Scipy.minimize

    def giving_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:  # as after "relative reduction of F" on a slope
            kwargs["options"] = {"maxiter": 2}
        result = minimise(self, *args, **kwargs)
        result.status, result.success = 0, True
        return result

    model = classifier()
    monkeypatch.setattr(gpflow.optimizers.Scipy, "minimize", giving_up)
    result = gh.fit(model)
    assert len(calls) > 1
    assert result.converged
    assert result.gradient_norm < 1e-2


def test_a_slope_at_the_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    minimise = gpflow.optimizers.Scipy.minimize

    def stuck(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["options"] = {"maxiter": 1}
        result = minimise(self, *args, **kwargs)
        result.status, result.success, result.jac = 0, True, np.array([9.4, 0.1])
        return result

    monkeypatch.setattr(gpflow.optimizers.Scipy, "minimize", stuck)
    result = gh.fit(classifier())
    assert not result.converged
    assert result.status == "steep"
    assert "gradient of 9.4e+00" in result.message


def test_inputs_of_another_scale_are_no_fit_until_it_starts_from_the_data() -> None:
    model = classifier(1e4)
    with pytest.warns(gh.ConvergenceWarning, match="no datum tells of another"):
        result = gh.fit(model)
    assert result.status == "no_better_than_prior"
    assert not result.converged
    assert abs(result.gain) < 1e-6
    np.testing.assert_allclose(result.loss, 40 * np.log(2.0), rtol=1e-9)
    again = gh.fit(model, start="data")
    assert again.converged
    np.testing.assert_allclose(again.loss, gh.fit(classifier()).loss, atol=1e-4)


def test_gpflows_optimiser_warns_of_it_too() -> None:
    model = classifier(1e4)
    with pytest.warns(gh.ConvergenceWarning, match='start="data"'):
        gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)


def test_a_line_search_among_short_lengthscales_is_not_warned_of() -> None:
    model = classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.training_loss()
        model.kernel.lengthscales.assign(1e-4)
        model.training_loss()


def test_labels_without_a_signal_are_no_fit() -> None:
    X, _ = labelled()
    Y = np.random.default_rng(5).integers(0, 2, size=(40, 1)).astype(float)
    result = gh.fit(gh.CVIModel((X, Y), gpflow.kernels.Matern52(), PROBIT))
    assert result.status == "no_better_than_prior"


def test_the_objective_of_independent_data_is_that_of_a_white_kernel() -> None:
    model = classifier()
    X, Y = labelled()
    white = gh.CVIModel((X, Y), gpflow.kernels.White(variance=1.0), PROBIT)
    with pytest.warns(gh.ConvergenceWarning, match="no datum"):
        expected = -float(white.training_loss())
    np.testing.assert_allclose(model.objective_of_independent_data(), expected, rtol=1e-9)


def test_other_starts_leave_a_poor_optimum() -> None:
    def model() -> Any:
        kernel = gpflow.kernels.SquaredExponential(lengthscales=2.0)
        return gh.CVIModel(wave(), kernel, gpflow.likelihoods.Gaussian(1.0))

    one, many = gh.fit(model()), gh.fit(trained := model(), num_starts=6, seed=3)
    assert len(many.losses) == 6
    assert many.loss == min(many.losses) <= many.losses[0] == pytest.approx(one.loss, abs=1e-6)
    assert many.loss < one.loss - 5.0
    np.testing.assert_allclose(float(trained.training_loss()), many.loss, atol=1e-6)


def test_gpflows_own_models() -> None:
    X, Y = wave()
    ours = gh.fit(gh.CVIModel((X, Y), gpflow.kernels.Matern52(), gpflow.likelihoods.Gaussian()))
    gpr = gh.fit(gpflow.models.GPR((X, Y), gpflow.kernels.Matern52()))
    assert gpr.converged
    assert np.isnan(gpr.residual)
    np.testing.assert_allclose([gpr.loss, gpr.gain], [ours.loss, ours.gain], atol=1e-4)
    svgp = gpflow.models.SVGP(gpflow.kernels.Matern52(), gpflow.likelihoods.Gaussian(), X[::3])
    assert gh.fit(svgp, data=(X, Y), max_iterations=5).status == "max_iterations"


def test_a_sparse_model() -> None:
    X, Y = labelled()
    model = gh.SparseCVIModel(gpflow.kernels.Matern52(), PROBIT, X[:10].copy())
    set_trainable(model.inducing_variable, False)
    result = gh.fit(model, data=(X, Y), start="data")
    assert result.converged
    assert result.residual < 1e-5
    np.testing.assert_allclose(float(model.training_loss((X, Y))), result.loss, atol=1e-7)
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    stream = gh.SparseCVIModel(gpflow.kernels.Matern52(), PROBIT, X[:10].copy())
    set_trainable(stream.inducing_variable, False)
    again = gh.fit(stream, data=batches, start="data")
    np.testing.assert_allclose(again.loss, result.loss, atol=1e-5)


def test_a_coarse_quadrature_is_not_called_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "refined", lambda likelihood: None)  # as of a user's own
    X, Y = wave()
    rough = gpflow.quadrature.NDiagGHQuadrature(1, 2)
    likelihood = gpflow.likelihoods.StudentT(0.01, df=3.0, quadrature=rough)
    set_trainable(likelihood, False)
    model = gh.CVIModel((X, Y + 5.0), gpflow.kernels.Matern52(100.0, 0.01), likelihood)
    set_trainable(model.kernel.lengthscales, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gh.ConvergenceWarning)
        result = gh.fit(model, max_iterations=20)
    assert not result.converged
    assert result.status == "inaccurate"
    assert result.quadrature_error > 0.01


def test_a_quadrature_is_refined_and_the_fit_goes_on() -> None:
    def model(num: int) -> Any:
        rule = gpflow.quadrature.NDiagGHQuadrature(1, num)
        likelihood = gpflow.likelihoods.StudentT(0.1, df=3.0, quadrature=rule)
        return gh.CVIModel(wave(), gpflow.kernels.Matern52(1.0, 0.3), likelihood)

    coarse = model(3)
    with pytest.warns(
        gh.ConvergenceWarning, match="too coarse for the posteriors of this training"
    ):
        result = gh.fit(coarse)
    assert result.converged
    assert re.search(r"quadrature now has \d+ points", result.message)
    assert result.quadrature_error < 0.01
    fine = gh.fit(model(100))
    np.testing.assert_allclose(result.loss, fine.loss, atol=0.02)  # what an error of 0.01 leaves
    assert coarse.infer().converged


def test_a_callback_ends_the_fit_while_a_quadrature_is_refined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = gpflow.quadrature.NDiagGHQuadrature(1, 3)
    likelihood = gpflow.likelihoods.StudentT(0.1, df=3.0, quadrature=rule)
    model = gh.CVIModel(wave(), gpflow.kernels.Matern52(1.0, 0.3), likelihood)
    rules: list[int | None] = []
    refine = fitting.refined

    def refining(given: Any) -> int | None:
        rules.append(refine(given))
        return rules[-1]

    def stop(step: Any) -> None:
        if rules:
            raise StopIteration

    monkeypatch.setattr(fitting, "refined", refining)
    with pytest.warns(gh.ConvergenceWarning):
        result = gh.fit(model, callback=stop)
    assert result.status == "interrupted"
    assert len(rules) == 1


def test_iterations_that_are_used_up() -> None:
    result = gh.fit(classifier(), max_iterations=2)
    assert result.status == "max_iterations"
    assert result.num_iterations == 2
    assert not result.converged
    again = gh.fit(classifier(), max_iterations=2, tolerance=2.0 * result.gradient_norm)
    assert again.status == "converged"  # flat is flat, whatever is left


def test_nothing_to_train() -> None:
    model = classifier()
    set_trainable(model, False)
    result = gh.fit(model)
    assert result.status == "inferred"
    assert result.residual < 1e-6


def test_an_interrupt_leaves_the_best_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    before = float(model.training_loss())
    bars = []

    class Bar:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bars.append(self)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *args: Any) -> None: ...

        def set_postfix(self, **kwargs: Any) -> None: ...

        def update(self, num: int) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("gpflow_hybrid.training.fitting.progress_bar", Bar)
    result = gh.fit(model)
    assert result.status == "interrupted"
    assert result.loss < before
    np.testing.assert_allclose(float(model.training_loss()), result.loss, atol=1e-7)


def test_results_print_in_a_few_short_lines() -> None:
    model = classifier()
    result = gh.fit(model, num_starts=2)
    for shown in (result, model.infer()):
        text = str(shown)
        assert not re.search(r"\d\.\d{7}", text)  # no more digits than anybody reads
        assert len(text.splitlines()) <= 14
        assert text.splitlines()[0] == shown.message
        assert "<pre>" in shown._repr_html_()
        assert repr(shown).count("\n") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "random"}, "start must be"),
        ({"num_starts": 0}, "num_starts must be a positive integer; found 0."),
        ({"max_iterations": 1.5}, "max_iterations must be"),
        ({"tolerance": -1.0}, "tolerance must be"),
        ({"seed": -1}, "seed must be"),
        ({"data": labelled()}, "data must be left out for CVIModel"),
    ],
)
def test_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(gh.InvalidDataError, match=message):
        gh.fit(classifier(), **arguments)


def test_models_and_data_are_refused() -> None:
    X, Y = labelled()
    with pytest.raises(gh.InvalidDataError, match="model must be a GPflow model"):
        gh.fit(gpflow.kernels.Matern52())
    sparse = gh.SparseCVIModel(gpflow.kernels.Matern52(), PROBIT, X[:5].copy())
    with pytest.raises(gh.InvalidDataError, match="data must be given for SparseCVIModel"):
        gh.fit(sparse)
    batches = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(5))
    with pytest.raises(gh.InvalidDataError, match="an iterator over batches"):
        gh.fit(sparse, data=batches)
    with pytest.raises(gh.InvalidDataError, match="Y must be 0 or 1"):
        gh.fit(sparse, data=(X, 2.0 * Y - 1.0))


def test_a_start_from_the_data() -> None:
    rng = np.random.default_rng(0)
    X = np.hstack([rng.normal(size=(200, 1)), 100.0 * rng.normal(size=(200, 1)), np.ones((200, 1))])
    each = starts.lengthscales(X, 1)
    scaled = X / each
    distances = np.linalg.norm(scaled[:, None] - scaled, axis=-1)[np.triu_indices(200, 1)]
    assert 0.5 < np.median(distances) < 2.0
    np.testing.assert_allclose(each[2], np.sqrt(3.0))  # a constant column has no scale
    every = starts.lengthscales(X, 0)
    pairs = np.linalg.norm(X[:, None] - X, axis=-1)[np.triu_indices(200, 1)]
    np.testing.assert_allclose(every, np.median(pairs))
    kernel = gpflow.kernels.Matern52(7.0, [1.0, 1.0]) + gpflow.kernels.RBF(3.0, active_dims=[1])
    set_trainable(kernel.kernels[1].variance, False)
    Y = (X[:, :1] > 0.0).astype(float)
    model = gh.CVIModel((X[:, :2], Y), kernel, PROBIT)
    starts.start_from_data(model, X[:, :2], Y)
    np.testing.assert_allclose(kernel.kernels[0].variance, 1.0)
    np.testing.assert_allclose(kernel.kernels[1].variance, 3.0)  # not trainable
    np.testing.assert_allclose(kernel.kernels[0].lengthscales, starts.lengthscales(X[:, :2], 1))
    np.testing.assert_allclose(kernel.kernels[1].lengthscales, starts.lengthscales(X[:, 1:2], 0))


@pytest.mark.parametrize(
    "kernel",
    [
        lambda k: k.SeparateIndependent([k.Matern52(), k.RationalQuadratic()]),
        lambda k: k.SharedIndependent(k.RationalQuadratic(), 2),
        lambda k: k.SharedIndependent(k.RBF(), 2),
    ],
)
def test_a_kernel_for_each_latent(kernel: Any) -> None:
    """The gain over independent data is that of the model, with or without a graph."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 1))
    Y = np.sin(3.0 * X) + 0.1 * rng.normal(size=X.shape)
    likelihood = gpflow.likelihoods.HeteroskedasticTFPConditional()
    model = gh.CVIModel((X, Y), kernel(gpflow.kernels), likelihood)
    result = gh.fit(model, max_iterations=3)
    expected = -result.loss - model.objective_of_independent_data()
    # Quadratures of two latents at different q, wide ones: a tenth of what a gain is judged by.
    assert result.gain == pytest.approx(expected, abs=0.1)


def test_an_e_step_that_did_not_converge_is_no_fit() -> None:
    flat = Ending(10.0, 1e-6, 1e-2, False, False, "")
    assert verdict_on(flat, Assessment(50.0, residual=1e-9))[0] == "converged"
    status, message = verdict_on(flat, Assessment(50.0, residual=0.1))
    assert status == "inaccurate"
    assert "the E-step did not converge, its residual is 1.0e-01" in message
