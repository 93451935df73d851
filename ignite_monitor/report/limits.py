"""Limits of the findings, with the reason for each."""

from __future__ import annotations

import math
from typing import NamedTuple

# Spikes. The rules raise 1 to 5 false alarms per 1,000 iterations of healthy runs, nearly all below 2 thresholds.
SPIKE_FACTOR = 2.0  # times the threshold; damaged batches are mostly beyond it
SPIKE_RATE = 0.01  # spikes per norm that are still noise: twice the rules' own false alarms
SMALL_EXCESS = 1.5  # times the threshold; while norms rise, healthy ones exceed it by up to 1.4
SMALL_EXCESS_RATE = 0.1  # spikes per norm of this size: twice those of a healthy run of 300 iterations whose norm rises
PERIODIC, PERIODIC_SHARE = 4, 0.8  # spikes, and share of the periods with the largest value there, of a periodic fault
LONGEST_PERIOD, PERIODIC_VALUES = 100, 5000  # steps, and values that are examined
HUGE = 1e100  # in place of infinite values
STEPLESS = 100  # monitored iterations without an optimizer step; gradients are accumulated over fewer
OVERFLOW_RATE = 0.05  # of a GradScaler: 1 in 2,000 after the first ones
OVERFLOW_ALLOWANCE = 20  # halving a scale of 65,536 down to 1 takes 16

# Losses.
LOSS_POINTS = 10  # fewer values have no course
LOST_GAIN = 0.5  # share of the gain that is lost again; noise at a plateau is far below
LOST_FACTOR, LOST_NOISE = 3.0, 8.0  # times the best value, and times the step-to-step noise above it
RISE_NOISE, RISE_SHARE = 4.0, 0.2  # times noise above the best value, and share of the start, of a loss that never fell
LEARNING_POINTS = 100  # values of the loss from which on it should have fallen
FLAT = 0.05  # relative difference of the loss at the beginning and the end
UNEXPLAINED = 0.2  # squared standard deviation of the outputs to the loss; of trained models 1 and more
SATURATED, BINARY, UNFITTED = 0.9, 0.5, 0.5  # outputs of a softmax: largest, standard deviation; loss: end to beginning
RISE = 0.5  # of a loss of the wrong sign, in each tenth of the run, as a share of its beginning
NEGATIVE = 3.0  # times its size at the beginning, of a loss that is negative and falls
OUTLIER, OUTLIER_WINDOW = 60.0, 51  # times the distance from median to 80th percentile, among so many: healthy ones 53
SMALL_GRADIENT = 1e-6  # learning rate times the gradient's norm, in shares of the parameters' norm
OVERFIT = 1.2  # held-out loss at the end to the best

# Data.
LARGE_INPUT = 50.0  # root mean square of a tensor of the batch; normalized ones have 1
SMALL_INPUT = 1e-6  # the same of inputs
LARGE_LOSS = 50.0  # times the square of the outputs: a mean squared error with targets of 7 times their size

# Learning rate.
RATE_RISE = 10.0  # times the highest rate in the first half of the run so far; warm-ups, linear or cosine, reach 3
RATE_RISE_START = 1.5  # the same where the rise begins
RATE_EFFECT = 50  # iterations after a rise in which damage is its consequence
GROUP_RATE = 30.0  # times the other groups' median learning rate; those of healthy runs differ by up to 20
GROUP_UPDATE = 0.02  # of its size that it moves by in a step; 0.007 where only the head of a model is trained fast
VANISHED_RATE, VANISHED_SHARE = 1e-3, 0.4  # of the largest rate, and of the run: three step decays end at 1e-3
LARGE_UPDATE = 0.1  # norm of a step over that of the parameters: they would be replaced within ten steps
CLIPPED_SHARE = 1e-3  # of the norm that is left; clipping to 1 leaves 0.05 and more

# Weights.
SHRINK_FACTOR, SHRINK_ITERATIONS = 1.5, 200  # weight decay of 1e-3 per step, a large one, takes 400 iterations for that
SUDDEN = 0.6  # share of a fall that is not weight decay's if it is between two measurements
JUMP = 1.0  # change of the parameters' norm between two measurements, in shares of it
OTHER_MEANS = 10.0  # times what the steps between can move: Adam's grow by 3 at most where gradients do
OTHER_MEANS_SGD = 4.5  # the same of steps that are proportional to gradients: equal ones add up to 4.4 times as much
JUMPS, REACH = 50, 10  # jumps that are examined; iterations whose gradients are in a step with momentum, or the first

# Layers.
ACTIVATION_SPREAD = 100.0  # standard deviation to the median module's: 15 at most in healthy networks
USUAL_ACTIVATION = 20.0  # a standard deviation that is not too large, whatever the others are
LARGE_ACTIVATION = 1000.0  # a standard deviation that is too large, whatever the others are


class Persistent(NamedTuple):
    """A finding if the median of a metric in the last quarter of a run is beyond its limit."""

    kind: str
    monitor: str
    key: str  # or a pattern, whose items are named
    limit: float
    text: str  # of the median value in the last quarter, the farthest one's
    below: bool = False  # whether values below the limit are reported
    always: bool = False  # whether all measurements have to be beyond it
    least_items: int = 1  # in a batch
    severity: str = "warning"
    problem: float = math.inf  # from which value on it is a problem
    largest: str = ""  # pattern of the items that are named


_SIZE = "A step moves the median parameter by {:.2g} of its size; 1e-3 is usual"
_EXPLODING = "Parameters with exploding gradients: {:.0f}"
_MOMENTS = "{:.0%} of the median tensor's second moments have roots below eps"
_EXPECTED = "Gradients are {:.3g} times what second moments expect"
_WAITING = "Waiting for data takes {:.0%} of the time"
_DEAD = "Fractions of units that are 0 over the whole batch"
PERSISTENT = (
    # Rounding takes 0.3 to 0.4 of bfloat16 updates at a learning rate of 1e-3, and 0.9 at 1e-4.
    Persistent("lost_updates", "weights", "lost_update_fraction", 0.5, "Rounding takes {:.0%} of the updates"),
    Persistent("no_gradients", "grad", "norm", 1e-30, "The gradient's norm is {:.2g}", below=True, severity="problem"),
    # A change of a tenth would take 1e5 steps. A training that converges has larger ones first.
    Persistent("small_updates", "weights", "update_ratio_median", 1e-6, _SIZE, below=True, always=True),
    # A loss spike is likely from 2.3 on (arXiv:2304.13013), but value functions of healthy runs reach 3.
    Persistent("stale_moments", "optimizer", "rms_p95", 5.0, _EXPECTED, largest="topk_rms/{}"),
    Persistent("epsilon_dominated", "optimizer", "epsilon_dominated_median", 0.5, _MOMENTS),
    # An iteration could be 1.4 times as fast.
    Persistent("data_wait", "step", "data_wait_share", 0.3, _WAITING, severity="note"),
    # Healthy ReLU layers stay below 0.3, those of small Q-networks below 0.55; of few items, dropout leaves none.
    Persistent("dead_units", "activation", "activation/{}/dead_fraction", 0.6, _DEAD, problem=0.9, least_items=8),
    Persistent("nonfinite_activations", "activation", "activation/{}/nonfinite_count", 0, "Outputs with inf or NaN"),
    # QK-clip (arXiv:2507.20534) rescales queries and keys there: rounding, and one key, decide.
    Persistent("large_logits", "activation", "attention_logit_max/{}", 100.0, "Attention logits above 100"),
)
EXPLODING = Persistent("exploding_gradients", "weights", "exploding_count", 0, _EXPLODING, largest="topk_grad/{}")
VANISHING = Persistent(  # biases that a normalization or softmax cancels have less
    *("vanishing_gradients", "weights", "smallest_grad/{}", 1e-7),
    "Gradients vanish: the smallest of weights, as shares of the largest gradient, are",
    below=True,
)
OUTLIERS = Persistent("activation_outlier", "activation", "activation/{}/std", USUAL_ACTIVATION, "")
