"""Where λ lives: one Gaussian site per datum and latent, ``t(f) = exp(λ₁f − ½λ₂f²)``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gpflow.base import Module, Parameter, TensorType
from gpflow.config import default_float

from .errors import InvalidDataError


class SiteValues(NamedTuple):
    """The numbers of the sites, ``[N, L]`` each, ``λ₂`` signed; tensors or arrays."""

    lambda_1: Any
    lambda_2: Any


class Follower:
    """A method of the model that sites belong to, without keeping it alive; of its copy, after a copy."""

    def __init__(self, owner: Any, method: str) -> None:
        self._owner = weakref.ref(owner)
        self._method = method

    def __call__(self) -> None:
        """Call it, if there is a model."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)()

    def __reduce__(self) -> tuple[Any, ...]:
        # A model is pickled before its sites, which find it again.
        owner = self._owner()
        return (Follower, (owner, self._method)) if owner is not None else (type(None), ())

    def __deepcopy__(self, memo: dict[int, Any]) -> Follower | None:
        copy = memo.get(id(self._owner()))
        return None if copy is None else Follower(copy, self._method)


class SiteParameter(Parameter):
    """λ₁ or λ₂: never trainable, and read for the hyperparameters as they are.

    Whoever reads it by GPflow's ways (``read_values``, ``freeze``, a summary) sees λ after it has
    followed the hyperparameters, or an error that says why it could not.
    """

    _follow: Follower | None = None

    @property
    def trainable(self) -> bool:
        """False, whatever ``set_trainable`` was told: λ is inferred."""
        return False

    def follow(self, follower: Follower) -> None:
        """Call this before a value is read outside of graphs."""
        self._follow = follower

    def bring_up_to_date(self) -> None:
        """λ to the present hyperparameters, if it follows them."""
        if self._follow is not None:
            self._follow()

    def _value(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        if tf.executing_eagerly():
            self.bring_up_to_date()
        return super()._value(*args, **kwargs)


class Sites(Module):
    """Natural parameters of the sites, non-trainable parameters that start at zero (q = prior).

    ``λ₂`` is a precision, but a signed one: it is negative where a likelihood is not log-concave.
    """

    # Kept out of summaries and parameter dictionaries; checkpoints still carry them.
    _TF_MODULE_IGNORED_PROPERTIES = frozenset(
        ("_is_inferred", "_inferred", "_inferred_for", *Module._TF_MODULE_IGNORED_PROPERTIES)
    )

    def __init__(self, num_data: int, static_num_data: int | None, num_latent_gps: int):
        shape = (static_num_data, num_latent_gps)
        zeros = tf.zeros((num_data, num_latent_gps), dtype=default_float())
        self._make(zeros, zeros, shape, shape)

    def _make(self, first: tf.Tensor, second: tf.Tensor, *shapes: tuple[int | None, ...]) -> None:
        """Both parameters, from their first values."""
        super().__init__()
        #: ``λ₁`` ``[N, L]``
        self.lambda_1 = SiteParameter(first, trainable=False, shape=shapes[0], name="lambda_1")
        #: ``λ₂`` ``[N, L]``, signed
        self.lambda_2 = SiteParameter(second, trainable=False, shape=shapes[1], name="lambda_2")
        # What a training loss inferred, and for which hyperparameters; or λ is the user's own.
        self._is_inferred = tf.Variable(False, trainable=False, name="is_inferred")
        both = _in_a_row((first, second))
        size = None if any(None in shape for shape in shapes) else both.shape[0]
        self._inferred = tf.Variable(both, trainable=False, shape=[size], name="inferred")
        self._inferred_for = _vector(0)

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """Those of both parameters, without the search of modules in which TensorFlow finds them."""
        found = (_variable_of(x) for x in (self.lambda_1, self.lambda_2))
        return tuple(v for v in found if isinstance(v, tf.Variable))

    @property
    def values(self) -> SiteValues:
        """Both parameters as tensors."""
        return SiteValues(
            *(tf.convert_to_tensor(_variable_of(x)) for x in (self.lambda_1, self.lambda_2))
        )

    def follow(self, owner: Any, method: str) -> None:
        """Let both parameters be read after this method, which brings them to the hyperparameters."""
        for site in (self.lambda_1, self.lambda_2):
            site.follow(Follower(owner, method))

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
        """TensorFlow asks for these before it writes a checkpoint or a SavedModel."""
        if not self.is_frozen and tf.executing_eagerly():
            self.lambda_1.bring_up_to_date()
        return super()._trackable_children(*args, **kwargs)

    @property
    def is_frozen(self) -> bool:
        """Whether the sites are constants, as in a frozen copy of a model."""
        return not isinstance(self.lambda_1, Parameter)

    def require_rows(self, X: TensorType) -> None:
        """Refuse data whose number of rows is not that of the sites."""
        message = (
            "The data have changed their number of rows and the sites have not: set new data with "
            "model.update_data((X, Y))."
        )
        if tf.executing_eagerly():
            # Of data in a variable of any size the present number.
            if self.values.lambda_1.shape[0] != tf.convert_to_tensor(X).shape[0]:
                raise InvalidDataError(message)
            return
        tf.debugging.assert_equal(tf.shape(self.values.lambda_1)[0], tf.shape(X)[0], message)

    def assign(self, values: SiteValues) -> None:
        """Set both parameters; they are the user's own: nothing moves them with the hyperparameters."""
        _variable_of(self.lambda_1).assign(values.lambda_1)
        _variable_of(self.lambda_2).assign(values.lambda_2)
        self.release()

    def reset(self, num_data: tf.Tensor) -> None:
        """Back to zero, for ``num_data`` data: q = prior."""
        zeros = tf.zeros((num_data, self.lambda_1.shape[1]), dtype=self.lambda_1.dtype)
        self.assign(SiteValues(zeros, zeros))
        self._inferred.assign(_in_a_row((zeros, zeros)))

    def store_inferred(self, values: SiteValues, hyperparameters: tf.Tensor) -> None:
        """Set both parameters to what was inferred for these hyperparameters."""
        self.assign(values)
        self.expect_hyperparameters(hyperparameters)
        self._inferred.assign(_in_a_row(values))
        self._inferred_for.assign(hyperparameters)
        self._is_inferred.assign(True)

    def memory(self) -> Callable[[], None]:
        """What sets everything here back to what it is now."""
        variables = self._remembered()
        values = [tf.identity(v) for v in variables]

        def put_back() -> None:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

        return put_back

    def _remembered(self) -> list[tf.Variable]:
        return [*self.variables, self._is_inferred, self._inferred, self._inferred_for]

    def expect_hyperparameters(self, hyperparameters: tf.Tensor) -> None:
        """Make room to remember so many; their number changes only when a part of a model is replaced."""
        if self._inferred_for.shape != hyperparameters.shape:
            with tf.init_scope():
                self._inferred_for = _vector(hyperparameters.shape[0])

    def release(self) -> None:
        """λ is the user's own: it belongs to whatever the hyperparameters are."""
        self._is_inferred.assign(False)

    def is_inferred(self) -> tf.Tensor:
        """Whether a training loss has inferred λ."""
        return tf.convert_to_tensor(self._is_inferred)

    def is_stale(self, hyperparameters: tf.Tensor) -> Any:
        """Whether λ was inferred for other hyperparameters, and has not been touched since."""
        # By NumPy where it can be: TensorFlow takes milliseconds for the first operation of a kind.
        if tf.executing_eagerly():
            is_same = np.array_equal(self._inferred_for, hyperparameters)
            is_untouched = np.array_equal(self._inferred, _in_a_row(self.values))
            return np.bool_(self.is_inferred() and is_untouched and not is_same)
        if self._inferred_for.shape != hyperparameters.shape:  # a part of the model was replaced
            is_same = tf.constant(False)
        else:
            is_same = tf.reduce_all(tf.equal(self._inferred_for, hyperparameters))
        is_untouched = tf.reduce_all(tf.equal(self._inferred, _in_a_row(self.values)))
        return self.is_inferred() & is_untouched & ~is_same


class InducingSites(Sites):
    """Natural parameters of the sites of a sparse model, summed over the data.

    In whitened inducing variables w, ``q(w) ∝ N(w; 0, I) exp(λ₁ᵀw − ½ wᵀΛ₂w)``, so that the precision of q
    is ``I + Λ₂`` and its mean ``(I + Λ₂)⁻¹λ₁``.
    """

    # As those of Sites: checkpoints carry them.
    _TF_MODULE_IGNORED_PROPERTIES = frozenset(
        ("num_steps", "weights", *Sites._TF_MODULE_IGNORED_PROPERTIES)
    )

    def __init__(self, num_inducing: int, num_latent_gps: int) -> None:
        M, L = num_inducing, num_latent_gps
        zeros = [tf.zeros(shape, default_float()) for shape in ((M, L), (L, M, M))]
        self._make(*zeros, (M, L), (L, M, M))
        # Steps on batches since the sites were zero or inferred, and what these know of the total gradient.
        self.num_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="num_steps")
        self.weights = tf.Variable(_in_a_row(zeros), trainable=False, name="adjoint_weights")

    def reset(self, num_data: tf.Tensor = None) -> None:
        """Back to zero: q = prior."""
        zeros = SiteValues(*(tf.zeros_like(x) for x in self.values))
        self.assign(zeros)
        self._inferred.assign(_in_a_row(zeros))
        self._forget_batches()

    def store_inferred(self, values: SiteValues, hyperparameters: tf.Tensor) -> None:
        """Set both parameters to what was inferred for these hyperparameters, from all data."""
        super().store_inferred(values, hyperparameters)
        self._forget_batches()

    def _remembered(self) -> list[tf.Variable]:
        return [*super()._remembered(), self.num_steps, self.weights]

    def _forget_batches(self) -> None:
        self.num_steps.assign(0)
        self.weights.assign(tf.zeros_like(self.weights))


def zeros_like(x: tf.Tensor) -> tf.Tensor:
    """Zeros, by the same operation for any size: ``tf.zeros_like`` writes few of them into a graph."""
    return tf.raw_ops.ZerosLike(x=tf.convert_to_tensor(x))


def _in_a_row(values: Sequence[Any]) -> Any:
    if tf.executing_eagerly():
        return np.concatenate([np.ravel(x) for x in values])
    return tf.concat([tf.reshape(x, [-1]) for x in values], 0)


def _vector(size: int) -> tf.Variable:
    return tf.Variable(tf.zeros([size], tf.float64), trainable=False, name="inferred_for")


def _variable_of(site: TensorType) -> TensorType:
    """The variable under a parameter without a transform, read and written without its detours; of a
    frozen copy, the constant itself."""
    return site.unconstrained_variable if isinstance(site, Parameter) else site
