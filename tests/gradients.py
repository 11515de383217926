"""Gradients of a training loss against finite differences."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import gpflow_hybrid as gh


def loss_gradient(model: gh.CollapsedModel) -> list[np.ndarray]:
    """Of the training loss, for every trainable variable."""
    with tf.GradientTape() as tape:
        loss = model.training_loss()
    return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]


def check_gradient(model: gh.CollapsedModel, rtol: float = 1e-6, step: float = 1e-3) -> None:
    """Against differences of the loss of fourth order, each value at its own fixed point λ*.

    Their own error, ``O(step⁴)`` and the loss's rounding over the step, is about 1e-9.
    """
    gradients = loss_gradient(model)
    norm = max(float(np.max(np.abs(g))) for g in gradients)
    assert norm > 1e-2, "a vanishing gradient tests nothing"
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        kept = np.array(variable.numpy())
        for index in np.ndindex(kept.shape):
            values = []
            for sign in (2, 1, -1, -2):
                moved = kept.copy()
                moved[index] += sign * step
                variable.assign(moved)
                values.append(float(model.training_loss()))
            variable.assign(kept)
            difference = (-values[0] + 8 * values[1] - 8 * values[2] + values[3]) / (12 * step)
            np.testing.assert_allclose(
                gradient[index], difference, atol=rtol * norm, err_msg=variable.name
            )
