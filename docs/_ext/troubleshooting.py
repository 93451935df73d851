"""Tables of docs/troubleshooting.md: symptoms, likely causes, monitors, healthy ranges and fixes.

Advice and limits are those of ``ignite_monitor.report``; this file adds symptoms, pages and papers.
"""

from metrics import PAGES

from ignite_monitor.report import finding, limits

PAPER = "[arXiv:{0}](https://arxiv.org/abs/{0})".format
MEASURED = "[measured](detection.md)"
NO_REPORT = "no such report"
SPIKES = "at most {SPIKE_RATE:.0%} of the norms, all below {SPIKE_FACTOR:g} × the threshold"
USUAL_SIZE = "[CS231n](https://cs231n.github.io/neural-networks-3/#ratio)"

SYMPTOMS = {  # symptom -> kind of finding, cause, page of the monitor, healthy range, source
    "The loss or a gradient is NaN or infinite": (
        ("nonfinite_input", "The batch holds inf or NaN", "grad_monitor", NO_REPORT, ""),
        ("nonfinite_loss", "The loss makes inf or NaN", "grad_monitor", NO_REPORT, ""),
        ("nonfinite_forward", "A module makes inf or NaN of finite inputs", "grad_monitor", NO_REPORT, ""),
        ("nonfinite_backward", "The backward of a module makes inf or NaN", "grad_monitor", NO_REPORT, ""),
        ("nonfinite_not_located", "Inf or NaN of unknown source", "grad_monitor", NO_REPORT, ""),
        ("nonfinite_activations", "A module outputs inf or NaN", "activation", "`nonfinite_count` is 0", ""),
        ("nonfinite_gradients", "A gradient is inf or NaN", "grad_monitor", "`grad/nonfinite_count` is 0", ""),
        ("nonfinite_metric", "A metric of your own is inf or NaN", "grad_monitor", "finite", ""),
        (
            *("overflows", "The loss scale overflows too often", "grad_monitor"),
            *("at most {OVERFLOW_RATE:.0%} of the norms", PAPER("1710.03740")),
        ),
        (
            *("large_logits", "Attention logits grow", "activation"),
            *("largest logit below {row[large_logits]:g}", f"{PAPER('2507.20534')}, {PAPER('2309.14322')}"),
        ),
    ),
    "The loss or the gradient norm has spikes": (
        ("bad_batches", "Single batches with far larger gradients than usual", "grad_monitor", SPIKES, MEASURED),
        ("periodic_spikes", "A batch or event that recurs", "grad_monitor", "no period", ""),
        (
            *("weight_changed", "A weight changed by other means than a step", "step_stats"),
            *("change of the parameters' norm at most {OTHER_MEANS:g} × that of the steps", ""),
        ),
        ("spikes", "Gradients are far larger than before", "grad_monitor", SPIKES, MEASURED),
        ("no_step_at_spikes", "A train step that returns at spikes keeps gradients", "grad_monitor", NO_REPORT, ""),
        (
            *("loss_spikes", "A batch with a far larger loss than usual", "spike_monitor"),
            *("at most {SPIKE_RATE:.0%} of the losses", MEASURED),
        ),
        (
            *("stale_moments", "Gradients have outgrown the second moments", "optimizer_state"),
            *(
                "95th percentile of the RMS at most {row[stale_moments]:g}",
                f"{PAPER('2304.13013')}, section 3.4",
            ),
        ),
    ),
    "The loss rises and does not recover": (
        ("wrong_sign", "The loss is maximized", "loss", "falls, if it is named `loss`, and above 0 at first", ""),
        ("gradients_not_zeroed", "Gradients are not zeroed", "setup_check", NO_REPORT, ""),
        (
            *("loss_scale", "Targets or rewards are large, or the loss is a sum", "step_stats"),
            *(
                "loss at the first step at most {LARGE_LOSS:g} × the square of the outputs; a note if the loss falls",
                "",
            ),
        ),
        ("large_momentum", "The momentum multiplies the steps", "setup_check", "at most 0.99", ""),
        ("overfitting", "The model overfits", "loss", "held-out loss at most {OVERFIT:g} × its best", ""),
        ("loss_rose", "The loss ended above its start", "loss", "below its start", ""),
        ("loss_rose_again", "The loss fell and rose again", "loss", "at most {LOST_GAIN:.0%} of the gain is lost", ""),
        (
            *("rolled_back", "Training diverged and was rolled back", "rollback"),
            *("no rollback", f"{PAPER('2204.02311')}, section 5.1"),
        ),
        (
            *("rate_rose", "The learning rate rises too far, or too fast", "step_stats"),
            *("at most {RATE_RISE:g} × the highest rate in the first half of the run so far", ""),
        ),
        (
            *("group_rate", "One parameter group has a far larger learning rate", "step_stats"),
            *("at most {GROUP_RATE:g} × the other groups' median, or {GROUP_UPDATE:.0%} of the weights per step", ""),
        ),
        (
            *("large_updates", "A step changes the weights too much: the learning rate", "weight_update"),
            *("median update ratio at most {LARGE_UPDATE:g}; 1e-3 is usual", USUAL_SIZE),
        ),
        (
            *("exploding_gradients", "Gradients of some parameters explode", "weight_update"),
            *("`monitor/exploding_count` is 0; a note if the loss falls and is larger", PAPER("1211.5063")),
        ),
    ),
    "The loss does not fall": (
        ("not_in_optimizer", "Parameters are in no optimizer", "setup_check", NO_REPORT, ""),
        (
            *("stale_optimizer", "The optimizer was made before parameters were replaced", "setup_check"),
            *(NO_REPORT, ""),
        ),
        ("no_gradients", "No gradient reaches the model", "setup_check", "the gradient's norm is not 0", ""),
        (
            *("wrapper_bypassed", "The module inside of DistributedDataParallel is called", "setup_check"),
            *(NO_REPORT, ""),
        ),
        (
            *("no_gradient", "No backward of the monitored model runs", "grad_monitor"),
            *("a gradient in some of 20 iterations", ""),
        ),
        ("zero_learning_rate", "The learning rate is 0", "setup_check", NO_REPORT, ""),
        ("evaluation_mode", "The model trains in evaluation mode", "setup_check", NO_REPORT, ""),
        ("batch_repeats", "The same batch comes again and again", "setup_check", NO_REPORT, ""),
        (
            *("scaler_not_given", "A GradScaler scales the gradients that are measured", "grad_monitor"),
            *(NO_REPORT, ""),
        ),
        (
            *("lost_updates", "Rounding of 16-bit weights removes the updates", "weight_update"),
            *("lost fraction at most {row[lost_updates]:g}", PAPER("2010.06192")),
        ),
        (
            "clipped_away",
            "The gradient is clipped to nearly nothing",
            "step_stats",
            "at least {CLIPPED_SHARE:g} of it",
            "",
        ),
        (
            *("rate_vanished", "The learning rate fell to nearly nothing too early", "step_stats"),
            *("above {VANISHED_RATE:g} × the largest for {VANISHED_SHARE:.0%} of the run before the end", ""),
        ),
        (
            *("input_scale", "Inputs are not normalized, or 0", "step_stats"),
            *(
                "root mean square at most {LARGE_INPUT:g}; a note if the loss falls or modules have usual outputs",
                "",
            ),
        ),
        (
            *("bounded_outputs", "The outputs are probabilities, and the loss expects logits", "activation"),
            *("outputs above 1, or a loss that falls to {UNFITTED:g} × its start", ""),
        ),
        (
            *("not_learning", "Targets do not depend on the inputs, or the model can't fit them", "loss"),
            *("falls by more than {FLAT:.0%}, or variance of the outputs at least {UNEXPLAINED:g} × the loss", ""),
        ),
        (
            *("no_step", "The optimizer makes no step", "grad_monitor"),
            *("a step within {STEPLESS} monitored iterations", ""),
        ),
        (
            *("weights_shrank", "Weight decay is too strong", "step_stats"),
            *(
                "the parameters' norm keeps at least two thirds in {SHRINK_ITERATIONS} iterations",
                "",
            ),
        ),
        ("frozen_parameters", "Parameters are no longer updated", "weight_update", "`monitor/frozen_count` is 0", ""),
        (
            *("small_updates", "A step hardly changes the weights", "weight_update"),
            *("median update ratio at least {row[small_updates]:g} at some time; 1e-3 is usual", USUAL_SIZE),
        ),
        (
            *("vanishing_gradients", "Gradients vanish towards the input", "weight_update"),
            *("weights' gradients at least {row[vanishing_gradients]:g} × the largest", PAPER("1211.5063")),
        ),
        (
            *("epsilon_dominated", "Second moments are smaller than the optimizer's epsilon", "optimizer_state"),
            *("median fraction at most {row[epsilon_dominated]:g}", PAPER("2309.14322")),
        ),
    ),
    "Some layers learn differently from the others": (
        ("unused_parameters", "No gradient reaches some parameters", "setup_check", NO_REPORT, ""),
        ("requires_grad_false", "Parameters are frozen", "setup_check", NO_REPORT, ""),
        (
            *("dead_units", "Units output 0 for the whole batch", "activation"),
            *("dead fraction below {row[dead_units]:g} in batches of 8 items or more", PAPER("1903.06733")),
        ),
        (
            *("activation_outlier", "One module's outputs are far larger than the others'", "activation"),
            *("standard deviation at most {ACTIVATION_SPREAD:g} × the median module's", ""),
        ),
    ),
    "Ranks disagree": (
        (
            *("ranks_differ", "A rank holds other weights or optimizer state", "replica_check"),
            *("`replicas/in_sync` is 1", PAPER("2102.11245")),
        ),
    ),
    "Training is slow": (
        (
            *("data_wait", "The data loader is slow", "step_stats"),
            *("at most {row[data_wait]:.0%} of the time", ""),
        ),
    ),
    "The summary is not healthy although nothing was found": (
        (
            *("not_monitored", "Gradients had no threshold, or the loss has no name or too few values", "grad_monitor"),
            *('a `GradMonitor`, past its warm-up; a train step that returns `{{"loss": loss}}`, 100 times', ""),
        ),
    ),
}


def tables():
    """Return the sections of the page in Markdown."""
    titles = {page: monitor for monitor, page in PAGES.values()} | {"setup_check": "SetupCheck"}
    row = {limit.kind: limit.limit for limit in (*limits.PERSISTENT, limits.VANISHING)}
    lines = []
    for symptom, causes in SYMPTOMS.items():
        lines += [f"## {symptom}", "", "| likely cause | monitor | healthy range | fix |", "|---|---|---|---|"]
        for kind, cause, page, healthy, source in causes:
            healthy = healthy.format(**vars(limits), row=row).replace("%", " %") + (f" ({source})" if source else "")
            advice = finding.KINDS[kind].advice or "The report says it."
            lines.append(f"| {cause} (`{kind}`) | [{titles[page]}](monitors/{page}.md) | {healthy} | {advice} |")
        lines.append("")
    return lines[:-1]
