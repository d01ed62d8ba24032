"""The command line: parse, call, print. The one place that prints or exits."""

import os

# Nothing here multiplies matrices with numpy, but its BLAS starts a thread per core on import, and each spins for tens
# of milliseconds on a core that is loading the model. It reads this when numpy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
