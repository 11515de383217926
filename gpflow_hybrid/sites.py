"""Where λ lives: one Gaussian site per datum and latent, ``t(f) = exp(λ₁f − ½λ₂f²)``."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf
from gpflow.base import Module, Parameter, TensorType
from gpflow.config import default_float


class SiteValues(NamedTuple):
    """The numbers of the sites, ``[N, L]`` each, ``λ₂`` signed."""

    lambda_1: tf.Tensor
    lambda_2: tf.Tensor


class Sites(Module):
    """Natural parameters of the sites, non-trainable parameters that start at zero (q = prior).

    ``λ₂`` is a precision, but a signed one: it is negative where a likelihood is not log-concave.
    """

    # Kept out of summaries and parameter dictionaries; checkpoints still carry it.
    _TF_MODULE_IGNORED_PROPERTIES = frozenset(("_bound_to", *Module._TF_MODULE_IGNORED_PROPERTIES))

    def __init__(self, num_data: tf.Tensor, static_num_data: int | None, num_latent_gps: int):
        super().__init__()
        shape = (static_num_data, num_latent_gps)
        zeros = tf.zeros((num_data, num_latent_gps), dtype=default_float())
        #: ``λ₁`` ``[N, L]``
        self.lambda_1 = Parameter(zeros, trainable=False, shape=shape, name="lambda_1")
        #: ``λ₂`` ``[N, L]``, signed
        self.lambda_2 = Parameter(zeros, trainable=False, shape=shape, name="lambda_2")
        # Fingerprints of λ and of the hyperparameters that a training loss inferred λ for; zero
        # when λ is the user's own. Of fixed shape: deepcopy of a variable keeps no dynamic one.
        self._bound_to = tf.Variable(tf.zeros([3, 8], tf.uint8), trainable=False, name="bound_to")

    @property
    def values(self) -> SiteValues:
        """Both parameters as tensors."""
        return SiteValues(
            *(tf.convert_to_tensor(_variable_of(x)) for x in (self.lambda_1, self.lambda_2))
        )

    def require_rows(self, X: TensorType) -> None:
        """Refuse data whose number of rows is not that of the sites."""
        if tf.executing_eagerly() and self.values.lambda_1.shape[0] == tf.shape(X)[0]:
            return  # the assertion below takes milliseconds to say the same
        tf.debugging.assert_equal(
            tf.shape(self.lambda_1)[0],
            tf.shape(X)[0],
            "The data have changed their number of rows and the sites have not: set new data with "
            "model.update_data((X, Y)).",
        )

    def assign(self, values: SiteValues) -> None:
        """Set both parameters."""
        _variable_of(self.lambda_1).assign(values.lambda_1)
        _variable_of(self.lambda_2).assign(values.lambda_2)

    def reset(self, num_data: tf.Tensor) -> None:
        """Back to zero, for ``num_data`` data: q = prior."""
        zeros = tf.zeros((num_data, self.lambda_1.shape[1]), dtype=self.lambda_1.dtype)
        self.assign(SiteValues(zeros, zeros))
        self.release()

    def bind(self, hyperparameters: tf.Tensor) -> None:
        """Remember that the present λ was inferred for these hyperparameters."""
        self._bound_to.assign(self._binding(hyperparameters))

    def release(self) -> None:
        """λ is the user's own: it belongs to whatever the hyperparameters are."""
        self._bound_to.assign(tf.zeros_like(self._bound_to))

    def is_bound(self) -> tf.Tensor:
        """Whether a training loss has inferred λ."""
        return tf.reduce_any(tf.not_equal(self._bound_to, 0))

    def bound_elsewhere(self, hyperparameters: tf.Tensor) -> tf.Tensor:
        """Whether λ was inferred for other hyperparameters, and has not been touched since."""
        same = tf.reduce_all(tf.equal(self._bound_to, self._binding(hyperparameters)), axis=1)
        return tf.reduce_all(same[:2]) & ~same[2]

    def _binding(self, hyperparameters: tf.Tensor) -> tf.Tensor:
        return tf.concat([tf.fingerprint(x[None]) for x in (*self.values, hyperparameters)], axis=0)


def _variable_of(site: TensorType) -> TensorType:
    """The variable under a parameter without a transform, read and written without its detours; of a
    frozen copy, the constant itself."""
    return site.unconstrained_variable if isinstance(site, Parameter) else site
