"""One small module per contender of ``python -m benchmarks.compare``.

Each has ``fit(X_train, Y_train, X_test, Y_test, ...) -> Fit`` and imports only its own library,
NumPy and the two modules :mod:`.outcome` and :mod:`.stopping`, so that it also runs in an
environment that does not have gpflow_hybrid.
"""
