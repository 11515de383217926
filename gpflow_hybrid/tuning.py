"""Sizes at which one way becomes faster, or smaller, than another: all that was tuned to a machine.

For two cores with 24 GB. ``python -m benchmarks.tuning NAME`` shows what each is worth: time and memory
with a smaller value and with a larger one. None of them changes a result by more than rounding, but where
a loss has several optima.
"""

from __future__ import annotations

FEW_DATA = 300
"""Up to here a Newton system is factorised: iterations cost more than they save. Above, kernel matrices are
evaluated and differentiated without intermediate ones."""

DIRECTIONS = 3000
"""At most so many strong directions of a coupled Newton system are factorised,"""

DIRECTIONS_PER_DATUM = 1.25
"""and so many for every datum: factors of more cost more than the iterations that they save."""

LARGE_MATRIX = 3000
"""Above this size memory is dearer than arithmetic: ``Σ∘Σ`` is not kept, Σ is not kept for a second try,
XLA does not differentiate whole kernel matrices."""

KEPT_DISTANCES = 4000
"""Up to here the squared distances of constant inputs are kept between evaluations."""

KEPT_BYTES = 2**25
"""Matrices up to this size leave their memory to the next evaluation; what is computed of larger ones takes
far longer than the system needs to clear their pages."""

CACHED_ELEMENTS = 160_000
"""Elements of a block of a matrix that stay in a core's cache while a kernel is evaluated."""

QUADRATURE_ELEMENTS = 60_000
"""The same for the nodes of a quadrature on arrays."""

BLOCK_ROWS = 64
"""Rows of a matrix that are worked on at a time, so that they stay in a core's cache."""

COLUMN_CHUNK = 256
"""Columns worked on at a time where many need a triangular product."""

RANK_CHUNK = 512
"""Rows that a symmetric product takes at a time: fewer slow it down, more need fresh memory."""

PARALLEL_BLOCKS = 2
"""Blocks of a kernel matrix that may be under way at the same time."""

PREDICTED_ELEMENTS = 2**22
"""Elements of a matrix between data and new inputs, or of nodes of a quadrature there, that predictions are
made with at a time."""

PROJECTED_ELEMENTS = 2**21
"""Elements of the projections of a block of rows of a sparse model: enough for BLAS, little memory."""

KEPT_PROJECTIONS = 2**30
"""Bytes of projections that a sparse model keeps while the hyperparameters stay; more are found again for
every sum over the rows."""

SCANNED_ROWS = 4096
"""Rows of data that are read at a time where each is read once: few enough to be copied unnoticed."""

SMALLEST_BLOCK = 256
"""Rows that a block of a sparse model has at least: on fewer BLAS is slow."""

ANNEALED_CHAINS = 4096
"""Chains of annealing that run as one batch, over all its settings,"""

ANNEALED_FLOATS = 100_000_000
"""and numbers in the matrices of such a batch."""

PREDICTED_INTEGRALS = 20_000
"""Integrals over f* of annealing that are computed at once: a quadrature has up to 1681 nodes for each."""

COMPILED_SETTINGS = 8
"""Settings of hyperparameters from which a prediction by all of them is compiled."""

THREADED_PROJECTIONS = 2**20
"""Elements of the projections of a sparse model from which a thread is worth it. Blocks of rows are divided
among threads, each with one of BLAS'; on fewer elements they wait for Python's lock longer than they
compute."""

THREADED_ELEMENTS = 2**18
"""Elements of a matrix from which several BLAS threads pay: a triangle of 724×724. For factor, inverse and
product two threads take 0.91 of the time of one at n = 512, 0.85 at 700, 0.69 at 1000; beside other work
they wait for each other, up to a second at a time at n = 300 (``benchmarks.busy``)."""
