"""The numerical constants of inference, with their reasons.

What was tuned to a machine is in :mod:`gpflow_hybrid.tuning`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class NewtonOptions:
    """Of the damped Newton iteration."""

    max_damping: float = 1e10
    """μ at which it gives up: the ELBO cannot be raised any more at this precision."""
    first_damping: float = 0.1
    """μ after a first step that failed,"""
    damping_factor: float = 4.0
    """by how much it rises after further ones, and falls after a success,"""
    no_damping_below: float = 0.04
    """and where it falls to nothing."""
    rounding_errors: float = 100.0
    """Rounding errors of the ELBO's terms that its own is taken for: sums of many;"""
    mean_errors: float = 4.0
    """and of those that a wide prior's mean is a difference of."""
    few_digits: float = 1e-3
    """Rounding error, relative to the ELBO, above which the ELBO is not a number any more."""
    shrink_limit: float = 0.95
    """No step may take away more than this part of a marginal's precision, or of a positive site."""
    near: float = 0.3
    """Residual above which natural-gradient steps take the place of Newton's where those go too far and
    latents are coupled: uncoupled systems are cheap, and wide priors make natural gradients slow;"""
    slow_gain: float = 1e-3
    """what they have to gain, in nats a datum,"""
    first_lr: float = 0.5
    """size ρ of the first,"""
    lr_growth: float = 1.5
    """by how much it grows after one that raised the ELBO,"""
    lr_decay: float = 0.5
    """and shrinks after one that did not,"""
    smallest_lr: float = 0.05
    """down to this."""
    wild_site: float = 1e3
    """Precision of a first site, in units of the prior's, at which the prior's variance is not believed."""
    step_tolerance: float = 1e-4
    """Relative error of a step: exact enough for fast convergence."""
    iterations: int = 60
    """Of GMRES without factors."""
    size_per_iteration: int = 40
    """For a step, one iteration without factors for so many data: more cost what factors do;"""
    fewest_iterations: int = 10
    """but so many at least."""
    gradient_tolerance: float = 1e-5
    """Relative error below which a system is not one of a step: :attr:`iterations` may be made."""
    solved_errors: float = 10.0
    """Rounding errors that no system is solved below."""
    preconditioned_iterations: int = 200
    """Of GMRES with factors."""
    strong_curvature: float = 0.2
    """Curvature of a datum's likelihood, in units of the posterior, in directions that are factorised to
    precondition a coupled system."""
    eliminated_error: float = 0.01
    """Error of the likelihood's quadrature, in units of the posterior, up to which a is eliminated from a
    Newton system as if the quadrature were exact."""


@dataclasses.dataclass(frozen=True)
class ResidualOptions:
    """Of residuals in units of the posterior."""

    rounding_errors: float = 1e3
    """Rounding errors that no residual is asked to be below."""
    least_target: float = 1e-30
    """Size of sites that the residual is relative to, where the data say nothing at all."""


@dataclasses.dataclass(frozen=True)
class CollapseOptions:
    """Of the collapsed objective and its gradient."""

    acceptable_residual: float = 1e-4
    """Above, an iteration from a warm start is tried again from zero sites."""
    polished_from: float = 1e-6
    """Residual from which the last step needs no new factorisation."""
    last_step_tolerance: float = 1e-3
    """Relative error of that step: what it leaves of the residual."""
    left_residual: float = 0.1
    """Part of the residual that it may leave, if that is above the tolerance: more is no Newton step."""
    long_step: float = 1e-5
    """In units of the posterior: a last step for which first derivatives are not enough."""
    weights_tolerance: float = 1e-8
    """Relative error of the weights in the total gradient, an order below that of Σ."""
    gradient_error: float = 1e-5
    """Relative error of the solved system above which the gradient is not called exact."""
    widest_cavity: float = 2.0
    """Variance of a cavity, in prior variances, up to which a whole site is taken out of q; at most one
    where no other site is negative."""
    removable_leverage: float = 0.5
    """``αλ₂v`` up to which one is, however wide q is."""


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Of inference inside a training loss."""

    tolerance: float = 1e-9
    """Residual to which it infers: its gradient feels the residual to first order, its value to second."""
    max_steps: int = 200
    """Steps that it may try from one start."""
    warn_residual: float = 1e-3
    """Residual above which it says that value and gradient are not exact."""
    no_correlation: float = 1e-10
    """Correlation of data below which derivatives in lengthscales are less than what optimisers stop at."""
    penalty_per_datum: float = 1e3
    """Loss per datum, in nats, at hyperparameters that have no objective."""


@dataclasses.dataclass(frozen=True)
class SmoothStartOptions:
    """Of the start under a likelihood that is a step function of f."""

    steepness: float = 16.0
    """β of its smooth relative, in units of one over the prior's deviation: of 4, 8, …, 64, eight and
    sixteen have the highest ELBOs behind them, sixteen in fewer evaluations;"""
    tolerance: float = 0.1
    """residual to which that is solved: a start need not be better,"""
    max_steps: int = 50
    """and steps that it may try."""


@dataclasses.dataclass(frozen=True)
class PropagationOptions:
    """Of expectation propagation."""

    smallest_step: float = 1e-4
    """ρ below which it gives up: every step, however short, leaves the valid region."""
    growth: float = 1.2
    """How ρ follows the mismatch: up after it shrank,"""
    decay: float = 0.75
    """down after it grew,"""
    floor: float = 0.05
    """never below this."""
    memory: int = 5
    """Updates that the acceleration remembers."""
    enough_steps: int = 40
    """Steps that the first attempt may always try; of more, half are kept for a second."""
    cautious_step: float = 0.2
    """Largest ρ of the second attempt, from zero sites and without memory, where the first fails."""
    ridge: float = 1e-10
    """Of the acceleration's least squares: keeps updates that depend on each other out."""
    shrink_limit: float = 0.05
    """An accelerated step may not take a site below this part of what it is and of what it should be."""


@dataclasses.dataclass(frozen=True)
class LaplaceOptions:
    """Of the search for the mode."""

    sufficient_rise: float = 1e-4
    """Part of the predicted rise of ψ that a step has to keep (Armijo)."""
    smallest_step: float = 1e-9
    """Part of a Newton step below which ψ cannot be raised any more at this precision."""
    shortening: float = 0.5
    """Of a step that did not raise ψ."""
    rounding_errors: float = 100.0
    """Rounding errors of ψ's terms that its own is taken for."""


@dataclasses.dataclass(frozen=True)
class InducingOptions:
    """Of inference of inducing variables."""

    accelerated_from: float = 1.0
    """Residual below which steps are accelerated: farther out the map is not smooth enough for it,"""
    remembered_from: float = 10.0
    """and below which they are remembered."""
    memory: int = 8
    """Steps that are remembered."""
    caution: float = 0.25
    """Factor of the former residual after an accelerated step that did not raise the ELBO."""
    least_squares: float = 1e-8
    """Relative size of singular values that take part: keeps steps that depend on each other out."""
    first_variance: float = 1.0
    """Largest marginal variance that the first step from the prior believes in."""
    smallest_step: float = 1e-8
    """Part of a natural-gradient step below which the ELBO cannot be raised any more."""
    rounding_error: float = 1e-13
    """Of the ELBO, relative to its terms: sums of many."""
    tolerance: float = 1e-7
    """Residual to which a training loss infers: the value feels it to second order, the gradient and
    predictions to first, in units of q."""
    max_steps: int = 200
    """Steps that it may try from one start."""
    patience: int = 8
    """Evaluations after which the residual should have shrunk"""
    slow: float = 0.3
    """by this factor, or Newton's method takes over;"""
    newton_tolerance: float = 1e-3
    """relative error of its steps,"""
    newton_iterations: int = 40
    """and of GMRES for them."""
    weights_tolerance: float = 1e-8
    """Relative error of the weights in the total gradient,"""
    weights_error: float = 1e-7
    """or the absolute one, nats for a standard deviation of q: where data are many the weights are small,
    and the gradient hardly has to do with them;"""
    weights_iterations: int = 100
    """and of GMRES for them."""


@dataclasses.dataclass(frozen=True)
class MinibatchOptions:
    """Of natural-gradient steps on batches."""

    first_step: float = 0.7
    """ρ of the first steps, in units of the root of the part of the data that a batch has; at most one."""
    steps_before_decay: float = 50.0
    """Steps after which it begins to fall,"""
    decay: float = 0.75
    """and the power with which it does: between ½ and 1, noise averages out and steps do not end."""
    smallest_step: float = 1e-6
    """ρ below which no step is valid."""


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Of what is said after inference; errors of quadratures are in units of the posterior."""

    own_error: float = 1e-2
    """Of the likelihood's own quadrature; above, neither value nor sites are to be trusted."""
    tilted_error: float = 1e-3
    """Of the rule that expectation propagation chooses itself, not worth a remark."""
    inner_error: float = 1e-2
    """Of a log likelihood of projections, above which q(u) is not called converged."""


INDUCING = InducingOptions()
MINIBATCH = MinibatchOptions()
NEWTON = NewtonOptions()
COLLAPSE = CollapseOptions()
SMOOTH_START = SmoothStartOptions()
TRAINING = TrainingOptions()
PROPAGATION = PropagationOptions()
LAPLACE = LaplaceOptions()
REPORT = ReportOptions()
RESIDUAL = ResidualOptions()
