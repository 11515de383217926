"""The paper's figures and tables, from one command: ``python -m examples.paper --help``.

``plans`` says what is to be computed, as ``jobs``; ``execution`` runs them here, in processes or on a
Dask cluster; ``store`` keeps their results; ``grids`` and ``tables`` put them together, ``figures`` and
``report`` show them. A job is computed by ``surfaces`` or ``fits``.
"""
