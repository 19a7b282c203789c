"""The tests. This file is run before all of them, and before numpy and torch are imported."""

import os

# One thread a process: workers fill the processors, and a library of linear algebra that has more threads
# than there are processors left waits for them by spinning. A product of [1024, 8] and [8, 512] took 8 ms of
# CPU instead of 0.3, a build with --quality best 12 s instead of 2.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
