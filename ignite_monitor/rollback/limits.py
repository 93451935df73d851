"""Constants of triggers and policy. ``docs/recovery.md`` gives the reason and the figure behind each one."""

from __future__ import annotations

# Triggers
MEMORY = 20  # losses that the statistics of the loss remember; a restored snapshot is confirmed after as many
NOISE = 0.1  # relative difference of two means of few losses that is no difference
JUMP = 0.5  # relative rise of the loss that is a sign of instability
FAR = 10.0  # times the threshold
FAR_PATIENCE = 3  # iterations far above the threshold, of the last PROBATION ones, that trigger a rollback

# Snapshots
RECENT = 3  # newest snapshots, which are always kept
OLDER = 2  # number of older ones
SPACING = 5  # their distance, in units of ``every``
CONFIRMED = 10  # times the delay of a detection: iterations after which a restored snapshot is confirmed, if not MEMORY

# Policy
TESTS = 4  # failed tests after which the data have changed; failed trainings before another snapshot is tried
PROBATION = 8  # consecutive healthy iterations after which an instability is over; shortest distance of probes
WINDOW = 1000  # iterations within which rollbacks are counted, and an accepted loss is remembered
TRIAL = 10  # iterations of training on changed data
LEARNT = 50  # iterations since the first sign after which changed data are final if the loss on them is usual
LASTING = 120  # iterations since the first sign after which changed data are final, and non-finite values end the run
