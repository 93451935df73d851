"""Limits of the findings, with the reason for each."""

from __future__ import annotations

SPIKE_FACTOR = 2.0
"""How far above its threshold a norm is more than noise. The rules raise mostly 1 to 5 alarms per 1,000 iterations on
healthy runs, more where batches are small, nearly all within a factor of 2; damaged batches are mostly beyond it."""

SPIKE_RATE = 0.01
"""What share of iterations with norms just above the threshold is still noise: twice the rules' own false alarms."""

SMALL_EXCESS = 1.5
"""How far above its threshold a norm may be to be no spike, however often it happens. While norms rise, and while a
rule that goes by mean and deviation has seen few of them, healthy ones exceed it by up to 1.4."""

SMALL_EXCESS_RATE = 0.1
"""How often at most: twice what a healthy run of 300 iterations has whose norm rises. Of a run whose steps are skipped,
a tenth is too much to lose, be the norms large or not."""

GAPS = 0.05
"""What share of the distances between norms may differ from the usual one for the others to be gaps."""

RECENT = 1000
"""The number of latest norms of which the share of spikes is reported."""

PERIODIC, PERIODIC_SHARE = 4, 0.8
"""From how many spikes on, and from which share of equal distances on, a fault is periodic."""

GROUP_RATE, GROUP_RATIO = 30.0, 4.0
"""How many times the median learning rate one of a parameter group is far from it, and how many times the median update
ratio the largest then has to be. Groups of healthy runs (biases, embeddings, layer-wise decay) differ by up to 20."""

LOST_FACTOR, LOST_NOISE = 3.0, 8.0
"""How many times its best a positive loss has to end, and how many times its step-to-step noise above it, to be far
above its best whatever it had gained."""

AFTERMATHS = 50
"""How many spikes' aftermaths are compared with all that follows."""

SPIKES_IN_A_ROW = 10
"""GradMonitor's default of ``max_consecutive_spikes``: that many in a row are a new level and no outlier."""

AFTERMATH_FACTOR = 3.0
"""How much larger the norms after a spike have to be than those before it, for the spike to have done damage. Medians
of 20 norms of a healthy run differ by less than 2, warm-up apart."""

AFTERMATH_WINDOW = 20
"""How many norms on either side of a spike are compared: as many as the threshold rules take for their warm-up."""

EARLY_FACTOR = 50.0
"""How many times the run's own median a norm of the warm-up is no beginner's norm: of healthy runs the first norms are
at most 15 times it."""

EARLY_WINDOW = 50
"""From how many norms at the start the median is taken too: that of a run that learns its data by heart falls to 0."""

STEPLESS = 100
"""In how many monitored iterations there has to be a step of the optimizer: gradients are accumulated over fewer."""

OVERFLOW_RATE = 0.05
"""What share of overflows a GradScaler makes while it looks for its scale. Afterwards it is about 1 in 2,000; one in 20
means that the scale falls as often as it rises."""

OVERFLOW_ALLOWANCE = 20
"""Overflows that say nothing, whatever their share: halving 65,536 down to 1 takes 16."""

PERSISTENT_SHARE = 0.5
"""Share of the last quarter of a run above its limit from which on a metric persists there."""

PERSISTENT = {
    "vanishing_count": 0.0,
    "exploding_count": 0.0,
    # Rounding takes 0.3 to 0.4 of bfloat16 updates at a learning rate of 1e-3, and 0.9 at 1e-4.
    "lost_update_fraction": 0.5,
    "rms_p95": 2.3,  # a spike of the loss is likely (arXiv:2304.13013)
    "epsilon_dominated_median": 0.5,  # most elements of the step are no longer Adam's
    "data_wait_share": 0.3,  # an iteration could be 1.4 times as fast
}
"""Metric -> the value above which it is reported if it persists there."""

LARGE_UPDATE = 0.1
"""A median update ratio that is too large: usual is 1e-3, and at 0.1 a weight is replaced within ten steps."""

SMALL_UPDATE = 1e-6
"""A median update ratio that is too small: a thousandth of what is usual, 1e5 steps for a change of a tenth."""

UPDATE_SPREAD = 15.0
"""How many times the median ratio the largest is far above it, where it does not fall. Those of healthy runs settle at
2 to 10; a layer trained with 100 times the learning rate of the others stays at 14 to 30."""

NOTED_SPREAD = 12.0
"""From where on it is worth a note."""

LASTING_SHARE = 0.8
"""What share of the second quarter's factor the last quarter's has to be for it not to fall. Parameters that begin at
zero, biases and norms, begin far above the median, and come down by 0.7 or more from the one to the other as they grow;
a learning rate that is too large stays so."""

RATIO_POINTS = 8
"""From how many looks on a quarter of them says anything."""

SLOW_SPREAD = 1e3
"""How many times the median ratio is above the smallest for that to be far: norms' weights of 1 are 30 times slower."""

STALE_SHARE = 0.05
"""In what share of the looks it has to be so, for more than chance: the first hundred steps of a run are such."""

FEW_VANISHING = 2
"""How many gradients that vanish from the beginning on are few in any model."""

VANISHING_SHARE = 1 / 3
"""What share of the parameters known by name are few: of a convolution with BatchNorm and biases a quarter vanishes."""

DEAD_FRACTION = 0.5
"""A layer with half of its units dead over the whole batch has lost half of its width; healthy ReLU layers stay below
0.3, with batches of a few samples."""

MOSTLY_DEAD_FRACTION = 0.9
"""A layer of which a tenth is left passes hardly anything on."""

ACTIVATION_SPREAD = 100.0
"""How many times the median module's standard deviation one is far above it: in healthy networks at most 15, at the
output of a network of whose first block the weights are 30 times too large 200 to 600."""

USUAL_ACTIVATION = 20.0
"""A standard deviation that is not too large, however small the others are."""

LARGE_ACTIVATION = 1000.0
"""A standard deviation of the median module that is too large, with no other one to compare with: about 1 is usual."""

COLLAPSED_ENTROPY = 0.1
"""In nats: a head that gives 98 % of its attention to one place has 0.1."""

ENTROPY_FALL = 5.0
"""By what factor a head's entropy has to have fallen, if others of its module are not as sharp: some heads are sharp
from the beginning of a fine-tuning on."""

LARGE_LOGIT = 100.0
"""From which score on attention is likely to diverge: QK-clip of arXiv:2507.20534 rescales queries and keys there."""

DRIFT_FACTOR = 3.0
"""How much larger input drift has to be than weight update for a layer to be named. In a trained network both are of
one order."""

LAYER_SPREAD = 100.0
"""How many times the median over layers a layer's own weight update is far from it; widths alone explain 10."""

LOST_GAIN = 0.5
"""What share of what a loss had gained it has to lose again, to be worth a word; noise at a plateau is far below."""

LOSS_POINTS = 10
"""From how many points on a loss has a course."""

SPECTRAL_GROWTH = 10.0
"""How many times the largest spectral norm has to have grown; in a healthy run it grows by 2 to 5."""

SMALL_BATCH = LARGE_BATCH = 4.0
"""A batch is small if the noise scale's interval begins at so many batches, and large if it is so many times the
interval's end: twice the batch then needs at least 40 % fewer steps, and half of it at most 20 % more, by equation 2.7
of arXiv:1812.06162, which has steps grow as 1 + noise scale / batch."""

CURVATURE = 1.2
"""How many times what a step stands the curvature is in most of the last looks; full-batch gradient descent hovers
within 5 % of it. Of SGD without momentum the loss rises some 20 iterations after it has got there, where the learning
rate grows by 4 % in each."""

CURVATURE_NEAR = 0.3
"""What part of it is worth a word: with momentum and AdamW, at batches of 64, the loss rises 10 iterations later."""

CURVATURE_LOOKS = 3
"""How many looks these are."""
