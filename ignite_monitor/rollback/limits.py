"""Constants of triggers and policy. ``docs/recovery.md`` gives the reason and the figure behind each one."""

from __future__ import annotations

# Triggers
WARMUP, DECAY = 20, 0.95  # of the statistics of the loss, in iterations
PROGRESS = 0.9  # a loss measures progress once its mean has fallen below this times its first values
FIRST = 5  # losses whose mean is that first value
FAR = 10.0  # times the threshold
FAR_PATIENCE, FAR_WINDOW = 3, 10  # iterations far above the threshold, of the last ones, that trigger a rollback
MARGIN = 2  # times the delay of a slow detection: iterations before its first sign that are not trusted

# Snapshots
RECENT = 3  # newest snapshots, which are always kept
SPACING = 5  # distance of older ones, in units of ``every``
CONFIRMED = 20  # iterations, or ten times the delay, after which a restored snapshot is confirmed as healthy

# Policy
TESTS = (0, 0, 1, 2)  # snapshots that are tested one after the other before the data are held to have changed
NOISY = 5  # failed tests, and at least one in as many, that show noisier data
RETRIES = 3  # trainings from a snapshot that fail before an older one is restored
PROBATION = 8  # consecutive healthy iterations that end a recovery
LONG_PROBATION = 100  # the same after ``max_rollbacks`` rollbacks; healthy iterations that end a lower learning rate
HOLD = 48  # iterations after which non-finite values end the run; failed tests in a row after a failed trial
WINDOW = 1000  # iterations within which rollbacks are counted, and an accepted loss is remembered
NOT_WORSE = 1.1  # times the snapshot's loss on the changed data
TRIAL = 10  # iterations of training on changed data
WORSE = 1.5  # times the loss of the failed tests, after which the trial has failed
PROBE_EVERY = 8  # iterations between probes of the snapshot, later a third of those since the data changed
RETURNS = 50  # iterations since the first sign before which a usual loss settles nothing: forty bad batches may end
SETTLED = 120  # iterations since the first sign after which changed data are final
