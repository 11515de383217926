"""One small module per contender of ``python -m benchmarks.compare`` and ``benchmarks.sparse``.

Each has ``fit(X_train, Y_train, X_test, Y_test, ...) -> Fit`` (``SparseFit``) and imports only its own
library, NumPy and the modules :mod:`.outcome`, :mod:`.sparse_outcome`, :mod:`.stopping` and
:mod:`.minibatches`, so that it also runs in an environment that does not have gpflow_hybrid.
"""
