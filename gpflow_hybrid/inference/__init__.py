"""How sites are found: variational inference, expectation propagation, Laplace's method.

Each is an iteration from ``(K, μ₀, X, Y, λ)`` to a :class:`~gpflow_hybrid.inference.common.Solution`, in
plain tensors and compiled as a whole, and a *collapse* that adds what the total gradient of the
method's learning objective needs.
"""
