"""How many operations each monitor adds to an iteration on an accelerator, beside ``clip_grad_norm_``.

Counted on a GPU where there is one, else on the simulated device of tests/accelerator, which is built with a C++
compiler: there the last column has all that runs, also in hooks on modules, where no dispatch mode is on and the others
see nothing. On a GPU each takes about 5 microseconds of the host's time. Counts are the same in every run.

    PYTHONPATH=. python benchmarks/device_operations.py [--blocks 6 24] [--width 32]
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("tests.accelerator._operations", run_name="__main__")
