"""Symptoms, their likely causes, monitors, healthy ranges and fixes, made from the findings of the report.

Advice, consequences and limits come from ``ignite_monitor.report``. This file adds symptoms, pages and papers.
"""

from metrics import PAGES

from ignite_monitor.report import finding, limits

PAPER = "[arXiv:{0}](https://arxiv.org/abs/{0})".format
MEASURED = "measured on [recorded runs](detection.md)"

NO_REPORT = "no such report"

CAUSES = {  # kind of finding -> cause, page of the monitor, healthy range, source
    "not_monitored": (
        "The gradients were not compared with a threshold",
        "grad_monitor",
        "a `GradMonitor`, past its warm-up",
        "",
    ),
    "group_rate": (
        "One parameter group has a far larger learning rate",
        "step_stats",
        "at most {GROUP_RATE:g} × the other groups' median",
        "",
    ),
    "rate_rose": (
        "The learning rate rises too far, or too fast",
        "step_stats",
        "at most {RATE_RISE:g} × the largest of the first half until then, or no damage in {RATE_EFFECT} iterations",
        "",
    ),
    "weights_shrank": (
        "Weight decay is too strong",
        "step_stats",
        "the norm of all parameters falls by at most {SHRINK_FACTOR:g} × in the first {SHRINK_ITERATIONS} iterations",
        "",
    ),
    "no_step": ("The optimizer makes no step", "grad_monitor", "a step within {STEPLESS} monitored iterations", ""),
    "dead_units": (
        "Units output 0 for the whole batch",
        "activation",
        "dead fraction below {DEAD_FRACTION:g}",
        PAPER("1903.06733"),
    ),
    "activation_outlier": (
        "One module's outputs are far larger than the others'",
        "activation",
        "standard deviation at most {ACTIVATION_SPREAD:g} × the median module's",
        "",
    ),
    "large_updates": (
        "A step changes the weights too much: the learning rate",
        "step_stats",
        "norm of a step at most {LARGE_UPDATE:g} × that of the parameters; 1e-3 is usual",
        "[CS231n](https://cs231n.github.io/neural-networks-3/#ratio)",
    ),
    "not_in_optimizer": ("Parameters are in no optimizer", "setup_check", NO_REPORT, ""),
    "stale_optimizer": ("The optimizer was made before parameters were replaced", "setup_check", NO_REPORT, ""),
    "no_gradients": ("No gradient reaches the model", "setup_check", NO_REPORT, ""),
    "unused_parameters": ("No gradient reaches some parameters", "setup_check", NO_REPORT, ""),
    "gradients_not_zeroed": ("Gradients are not zeroed", "setup_check", NO_REPORT, ""),
    "zero_learning_rate": ("The learning rate is 0", "setup_check", NO_REPORT, ""),
    "evaluation_mode": ("The model trains in evaluation mode", "setup_check", NO_REPORT, ""),
    "batch_repeats": ("The same batch comes again and again", "setup_check", NO_REPORT, ""),
    "wrapper_bypassed": ("The module inside of DistributedDataParallel is called", "setup_check", NO_REPORT, ""),
    "low_precision_updates": ("Rounding of 16-bit weights removes the updates", "setup_check", NO_REPORT, ""),
    "requires_grad_false": ("Parameters are frozen", "setup_check", NO_REPORT, ""),
    "scaler_not_given": ("A GradScaler scales the gradients that are measured", "grad_monitor", NO_REPORT, ""),
    "nonfinite_loss": ("The loss makes inf or NaN", "grad_monitor", NO_REPORT, ""),
    "nonfinite_input": ("The batch holds inf or NaN", "grad_monitor", NO_REPORT, ""),
    "nonfinite_forward": ("A module makes inf or NaN of finite inputs", "grad_monitor", NO_REPORT, ""),
    "nonfinite_backward": ("The backward of a module makes inf or NaN", "grad_monitor", NO_REPORT, ""),
    "nonfinite_not_located": ("The source of inf or NaN could not be located", "grad_monitor", NO_REPORT, ""),
    "input_scale": ("Inputs are not normalized", "step_stats", "root mean square at most {LARGE_INPUT:g}", ""),
    "loss_scale": (
        "Targets or rewards are large, or the loss is a sum",
        "step_stats",
        "loss at the first step at most {LARGE_LOSS:g} × the square of the outputs",
        "",
    ),
    "weight_changed": (
        "A weight changed by other means than a step",
        "step_stats",
        "change of the norm of the parameters at most {OTHER_MEANS:g} × that of the steps",
        "",
    ),
    "clipped_away": ("The gradient is clipped to nearly nothing", "step_stats", "at least {CLIPPED_SHARE:g} of it", ""),
    "rate_vanished": (
        "The learning rate fell to nearly nothing too early",
        "step_stats",
        "above {VANISHED_RATE:g} × the largest for {VANISHED_SHARE:.0%} of the run before the end",
        "",
    ),
    "bad_batches": (
        "Single batches produce far larger gradients than usual",
        "grad_monitor",
        "at most {SPIKE_RATE:.0%} of the norms, all below {SPIKE_FACTOR:g} × the threshold",
        MEASURED,
    ),
    "periodic_spikes": ("A batch or event that recurs", "grad_monitor", "no period", MEASURED),
    "bounded_outputs": (
        "The outputs are probabilities, and the loss expects logits",
        "activation",
        "outputs above 1, or a loss that falls to {UNFITTED:g} × its start",
        "",
    ),
    "wrong_sign": ("The loss is maximized", "attach_monitors", "falls", ""),
    "not_learning": (
        "Targets do not depend on the inputs, or the model can't fit them",
        "attach_monitors",
        "falls by more than {FLAT:.0%} in {LEARNING_POINTS} values",
        "",
    ),
    "overfitting": ("The model overfits", "attach_monitors", "held-out loss at most {OVERFIT:g} × its best", ""),
    "large_curvature": (
        "Sharpness exceeds the stability threshold of the learning rate",
        "curvature",
        "sharpness at most {CURVATURE:g} × the stability threshold",
        PAPER("2103.00065") + ", " + PAPER("2207.14484"),
    ),
    "early_norms": (
        "The first gradients are far larger than later ones",
        "grad_monitor",
        "at most {EARLY_FACTOR:g} × the median norm",
        PAPER("1706.02677") + " (warm-up)",
    ),
    "stale_moments": (
        "Gradients have outgrown the second moments",
        "optimizer_state",
        "95th percentile of the RMS about 1, at most {persistent[stale_moments]:g}",
        PAPER("2304.13013") + ", section 3.4",
    ),
    "large_logits": (
        "Attention logits grow",
        "activation",
        "largest attention logit below {LARGE_LOGIT:g}",
        PAPER("2507.20534") + " (QK-clip), " + PAPER("2309.14322"),
    ),
    "ranks_differ": (
        "A rank holds other weights or optimizer state",
        "replica_check",
        "`replicas/in_sync` is 1",
        PAPER("2102.11245"),
    ),
    "spikes": (
        "A batch produces a far larger gradient than usual",
        "grad_monitor",
        "at most {SPIKE_RATE:.0%} of the norms, all below {SPIKE_FACTOR:g} × the threshold",
        MEASURED,
    ),
    "loss_spikes": (
        "A batch produces a far larger loss than usual",
        "spike_monitor",
        "at most {SPIKE_RATE:.0%} of the losses",
        MEASURED,
    ),
    "nonfinite_activations": ("A module outputs inf or NaN", "activation", "`nonfinite_count` is 0", ""),
    "nonfinite_gradients": (
        "A gradient is inf or NaN",
        "grad_monitor",
        "`grad/nonfinite_count` is 0, without a GradScaler",
        "",
    ),
    "nonfinite_metric": ("A metric of your own is inf or NaN", "grad_monitor", "finite", ""),
    "rolled_back": (
        "Training diverged and was rolled back",
        "rollback",
        "no rollback",
        PAPER("2204.02311") + ", section 5.1",
    ),
    "overflows": (
        "The loss scale overflows too often",
        "grad_monitor",
        "at most {OVERFLOW_RATE:.0%} of the norms",
        PAPER("1710.03740"),
    ),
    "attention_collapse": (
        "Attention heads attend to a single position",
        "activation",
        "entropy above {COLLAPSED_ENTROPY:g} nats",
        PAPER("2303.06296"),
    ),
    "exploding_gradients": (
        "Gradients of some parameters explode",
        "weight_update",
        "`monitor/exploding_count` is 0",
        PAPER("1211.5063"),
    ),
    "vanishing_gradients": (
        "Gradients of some parameters vanish",
        "weight_update",
        "weights' gradients at least {VANISHING:g} × the largest",
        PAPER("1211.5063"),
    ),
    "frozen_parameters": ("Parameters are no longer updated", "weight_update", "`monitor/frozen_count` is 0", ""),
    "small_updates": (
        "A step hardly changes the weights",
        "weight_update",
        "median update ratio about 1e-3, at least {persistent[small_updates]:g}",
        "[CS231n](https://cs231n.github.io/neural-networks-3/#ratio)",
    ),
    "epsilon_dominated": (
        "Second moments are smaller than the optimizer's epsilon",
        "optimizer_state",
        "median fraction at most {persistent[epsilon_dominated]:g}",
        PAPER("2309.14322"),
    ),
    "lost_updates": (
        "Rounding of 16-bit weights removes the updates",
        "weight_update",
        "lost fraction at most {persistent[lost_updates]:g}",
        PAPER("2010.06192"),
    ),
    "spectral_growth": (
        "Weights grow",
        "spectral_norm",
        "largest spectral norm at most {SPECTRAL_GROWTH:g} × the first one",
        PAPER("2310.17813"),
    ),
    "loss_rose": ("The loss ended above its start", "spike_monitor", "below its start", ""),
    "loss_rose_again": (
        "The loss fell and rose again",
        "spike_monitor",
        "at most {LOST_GAIN:.0%} of the gain is lost",
        "",
    ),
    "batch_size": (
        "The batch is far below or above the noise scale",
        "noise_scale",
        "within {BATCH_FACTOR:g} × of the noise scale",
        PAPER("1812.06162"),
    ),
    "loss_peak": (
        "A batch or step damaged the model, which recovered",
        "spike_monitor",
        "after the start, at most {PEAK_FACTOR:g} × its value there",
        "",
    ),
    "near_curvature": (
        "Sharpness is near the stability threshold",
        "curvature",
        "sharpness at most {CURVATURE_NEAR:g} × the stability threshold",
        "[measured](monitors/curvature.md#notes)",
    ),
    "data_wait": ("The data loader is slow", "step_stats", "at most {persistent[data_wait]:.0%} of the time", ""),
}

DEFAULT_FIXES = {
    "not_monitored": "Attach a GradMonitor, `log_to` the logger, and train for longer than its warm-up.",
    **dict.fromkeys(finding.SETUP | {"requires_grad_false", "nonfinite_not_located"}, "The report says it."),
    "batch_size": "Use larger batches if devices allow it, or smaller ones if device time matters.",
}
"""Fixes of the findings whose advice depends on the run."""

SYMPTOMS = {
    "The loss or a gradient is NaN or infinite": (
        "nonfinite_input",
        "nonfinite_loss",
        "nonfinite_forward",
        "nonfinite_backward",
        "nonfinite_not_located",
        "nonfinite_activations",
        "nonfinite_gradients",
        "nonfinite_metric",
        "overflows",
        "large_logits",
    ),
    "The loss or the gradient norm has spikes": (
        "bad_batches",
        "periodic_spikes",
        "weight_changed",
        "spikes",
        "loss_spikes",
        "loss_peak",
        "stale_moments",
        "large_curvature",
        "near_curvature",
        "early_norms",
    ),
    "The loss rises and does not recover": (
        "wrong_sign",
        "gradients_not_zeroed",
        "loss_scale",
        "overfitting",
        "loss_rose",
        "loss_rose_again",
        "rolled_back",
        "rate_rose",
        "group_rate",
        "large_updates",
        "exploding_gradients",
        "spectral_growth",
    ),
    "The loss does not fall": (
        "not_in_optimizer",
        "stale_optimizer",
        "no_gradients",
        "zero_learning_rate",
        "evaluation_mode",
        "batch_repeats",
        "scaler_not_given",
        "low_precision_updates",
        "clipped_away",
        "rate_vanished",
        "input_scale",
        "bounded_outputs",
        "not_learning",
        "no_step",
        "weights_shrank",
        "frozen_parameters",
        "small_updates",
        "vanishing_gradients",
        "lost_updates",
        "epsilon_dominated",
    ),
    "Some layers learn differently from the others": (
        "unused_parameters",
        "requires_grad_false",
        "dead_units",
        "activation_outlier",
        "attention_collapse",
    ),
    "Ranks disagree": ("ranks_differ", "wrapper_bypassed"),
    "Training is slow, or the batch size may be wrong": ("data_wait", "batch_size"),
    "The summary is not healthy although nothing was found": ("not_monitored",),
}
"""Symptom -> kinds of findings."""


def healthy_range(kind):
    """Return the healthy range of a finding with the limits of the report."""
    persistent = {limit.kind: limit.limit for limit in limits.PERSISTENT}
    return CAUSES[kind][2].format(**vars(limits), persistent=persistent).replace("%", " %")


def page():
    """Return the sections of the page in Markdown."""
    titles = {page: monitor for monitor, page in PAGES.values()}
    lines = []
    for symptom, kinds in SYMPTOMS.items():
        lines += [f"## {symptom}", "", "| likely cause | monitor | healthy range | fix |", "|---|---|---|---|"]
        for kind in kinds:
            cause, monitor, _, source = CAUSES[kind]
            advice = finding.KINDS[kind].advice or DEFAULT_FIXES[kind]
            if causes := [other for other in CAUSES if other in finding.KINDS[kind].explained_by]:
                advice += " Often a consequence of: " + ", ".join(f"`{other}`" for other in causes) + "."
            healthy = healthy_range(kind) + (f" ({source})" if source else "")
            page = f"[{titles[monitor]}](monitors/{monitor}.md)" if monitor in titles else f"`{monitor}`"
            lines.append(f"| {cause} (`{kind}`) | {page} | {healthy} | {advice} |")
        lines.append("")
    return lines
