"""Number of examples of the property tests in this folder.

Each of them tries a few, the same ones in every run. ``HARD_USE_EXAMPLES=50 pytest tests/stress`` tries 50 times as
many, others in every run; hypothesis then prints how to repeat one that has failed.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_TIMES = int(os.environ.get("HARD_USE_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """Settings for a test.

    Args:
        count: how many examples it tries by default.
    """
    return settings(
        max_examples=_TIMES * count,
        derandomize=_TIMES == 1,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
