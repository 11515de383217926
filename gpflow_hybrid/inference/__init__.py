"""How sites are found: variational inference, expectation propagation, Laplace's method.

Each is a generator on arrays, from a :class:`~gpflow_hybrid.priors.Prior` and sites to a
:class:`~gpflow_hybrid.inference.common.Solution` or, for a training loss, a
:class:`~gpflow_hybrid.inference.common.Collapse`. What it needs to know of the likelihood it asks for
(:mod:`~gpflow_hybrid.inference.questions`); :mod:`~gpflow_hybrid.inference.servers` answers.
"""
