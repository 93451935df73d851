"""Schemas of all monitors."""

from __future__ import annotations

from ignite_monitor.schema import Key, Schema

# fmt: off

GRADIENT = Schema("grad", "grad", (
    Key("norm", "gradient norm", nonfinite="any"),
    Key("threshold", "threshold; a larger norm is a spike; not reported during the warm-up of the rule"),
    Key("mean", "running mean of the norms, from which the threshold is derived"),
    Key("std", "running sample standard deviation of the norms; not reported before the second norm"),
    Key("spike", "1 if the gradient is a spike, else 0"),
    Key("culprit/{name}", "at a spike, the parameter's share of the excess of gradients over their thresholds",
        when="with ``per_parameter=True``"),
    Key("scale", "loss scale of the ``scaler``", when="with ``scaler``"),
    Key("stepped", "1 if the optimizer made a step in this iteration, else 0"),
    Key("spike_count", "number of spikes so far"),
    Key("skipped_count", 'number of optimizer steps skipped by ``on_spike="skip"`` so far'),
    Key("clipped_count", "number of optimizer steps with gradients clipped to their threshold so far",
        when='with ``on_spike="clip"``'),
    Key("nonfinite_count", "number of non-finite norms so far"),
))

LOSS = Schema("loss", "loss", (
    Key("{name}", "number in the train step's output; ``value`` if it is the output", nonfinite="any"),
))

WEIGHT_UPDATE = Schema("weights", "monitor", (
    Key("grad_median", "median of the parameters' gradient l2 norms", nonfinite="inf"),
    Key("grad_p95", "95th percentile (nearest rank) of the gradient norms", nonfinite="inf"),
    Key("grad_min", "smallest gradient norm", nonfinite="inf"),
    Key("grad_max", "largest gradient norm", nonfinite="inf"),
    Key("vanishing_count", "number of parameters with a gradient norm below ``vanishing_grad_threshold``"),
    Key("exploding_count", "number of parameters with a gradient norm above ``exploding_grad_threshold``"),
    Key("update_ratio_median", "median of the parameters' update ratios"),
    Key("update_ratio_p95", "95th percentile (nearest rank) of the update ratios"),
    Key("update_ratio_min", "smallest update ratio"),
    Key("update_ratio_max", "largest update ratio"),
    Key("frozen_count", "number of parameters that had a step and are frozen"),
    Key("lost_update_fraction", "fraction of elements whose update was lost to rounding",
        when="with bfloat16 or float16 weights and optimizers of ``torch.optim``"),
    Key("topk_grad/{name}", "the ``top_k`` largest gradient norms", nonfinite="inf"),
    Key("smallest_grad/{name}", "the ``top_k`` smallest gradient norms"),
    Key("largest_weight/{name}", "the ``top_k`` largest parameters, by their l2 norm before the step"),
    Key("largest_update_ratio/group_{i}/{name}", "largest update ratio in a parameter group",
        when="with ``optimizer``"),
))

_GIVEN = "with ``{}``".format

ACTIVATION = Schema("activation", "", (
    Key("activation/{module}/{metric}", "metric of a module's output", when=_GIVEN("activations")),
    Key("activation/{module}/{place}/{metric}",
        "metric of a tensor in a tuple, dict or dataclass; the place is a position, key or field",
        when=_GIVEN("activations")),
    Key("activation/{module}/dead_fraction", "fraction of units that are 0 throughout the iteration",
        when=_GIVEN("activations")),
    Key("activation/{module}/max_abs", "largest absolute value", when=_GIVEN("activations")),
    Key("activation/{module}/max_over_rms", "largest absolute value over the root mean square",
        when=_GIVEN("activations")),
    Key("recorded/{module}/{name}", "value given to :func:`record`", when="if the model calls it"),
    Key("attention_entropy/{module}/head_{i}", "entropy of the attention weights", unit="nats",
        when=_GIVEN("attention")),
    Key("attention_logit_max/{module}/head_{i}", "largest attention logit", when=_GIVEN("attention")),
    Key("gradient/{parameter}/{metric}", "metric of the gradient with which the first step starts, unscaled",
        when=_GIVEN("gradients")),
    Key("parameter/{parameter}/{metric}", "metric of the parameter at the start of the iteration",
        when=_GIVEN("parameters")),
))

_ERROR = "not reported by the two fast methods"
_UPDATES = "with ``updates=True``"

SPECTRAL = Schema("spectral", "spectral", (
    Key("norm_max", "largest spectral norm"),
    Key("norm_mean", "mean spectral norm"),
    Key("stable_rank_min", r"smallest stable rank :math:`\lVert W\rVert_F^2 / \sigma^2`"),
    Key("stable_rank_median", "median stable rank"),
    Key("error_max", f"bound of the relative errors of all norms; {_ERROR}"),
    Key("norm/{name}", "spectral norm of a matrix", when="with ``per_parameter=True``"),
    Key("topk/{name}", "the ``top_k`` largest spectral norms"),
    Key("update_norm_max", "largest spectral norm of a weight's update", when=_UPDATES),
    Key("update_error_max", f"bound of the relative errors of the update norms; {_ERROR}", when=_UPDATES),
    Key("update_spectral_scale_max", r"largest :math:`\lVert\Delta W\rVert_2 / \sqrt{out/in}`", when=_UPDATES),
    Key("update_spectral_scale_median", r"median of :math:`\lVert\Delta W\rVert_2 / \sqrt{out/in}`", when=_UPDATES),
    Key("weight_spectral_scale_max", r"largest :math:`\lVert W\rVert_2 / \sqrt{out/in}`"),
    Key("weight_spectral_scale_median", r"median of :math:`\lVert W\rVert_2 / \sqrt{out/in}`"),
))

STEP_STATS = Schema("step", "step", (
    Key("time_ms", "duration of the train step, without data loading", unit="ms"),
    Key("data_wait_ms", "time spent waiting for the batch", unit="ms"),
    Key("data_wait_share", "``data_wait_ms / (data_wait_ms + time_ms)``", when="if both are known"),
    Key("items_per_s", "items of the batch per second of ``time_ms``, on this rank", unit="1/s"),
    Key("parameter_norm", "l2 norm of all parameters after the train step", nonfinite="any"),
    Key("gradient_norm", "l2 norm of the gradient that the optimizer's first step was given; not of DTensors",
        when="unless it is NaN", nonfinite="inf"),
    Key("batch_rms/{place}", "root mean square of a floating-point tensor of the batch, of its first 2**20 elements",
        nonfinite="any"),
    Key("lr/group_{i}", "learning rate of a parameter group in the optimizer's first step, or after the train step",
        nonfinite="any"),
    Key("peak_memory_mb", "peak memory of tensors so far", unit="MiB", when="on CUDA"),
    Key("reserved_memory_mb", "memory reserved by the allocator", unit="MiB", when="on CUDA"),
    Key("resident_memory_mb", "resident memory of the process", unit="MiB", when="on the CPU of Linux"),
))

RCC = Schema("rcc", "rcc", (
    Key("weight_update/{layer}", r":math:`\lVert(W_t - W_0) x_t\rVert`"),
    Key("input_drift/{layer}", r":math:`\lVert W_0 (x_t - x_0)\rVert`"),
    Key("input/{layer}", r":math:`\lVert x_t\rVert`"),
    Key("input_change/{layer}", r":math:`\lVert x_t - x_0\rVert`"),
    Key("output_change/{layer}", r":math:`\lVert W_t x_t - W_0 x_0\rVert`"),
    Key("weight_share/{layer}", "``weight_update / (weight_update + input_drift)``"),
    Key("weight_update_max", "largest ``weight_update`` of a layer"),
    Key("weight_update_median", "median ``weight_update`` over layers"),
    Key("input_drift_max", "largest ``input_drift`` of a layer"),
    Key("input_drift_median", "median ``input_drift`` over layers"),
))

ALIGNMENT = Schema("alignment", "alignment", (
    Key("z0_dW/{layer}", r"alpha, of :math:`z_0` and :math:`\Delta W`"),
    Key("dZ_w0/{layer}", r"omega, of :math:`\Delta z` and :math:`W_0`"),
    Key("dZ_dW/{layer}", r"u, of :math:`\Delta z` and :math:`\Delta W`"),
    *(
        Key(f"{term}_{statistic}", f"{word} ``{term}`` over layers")
        for term in ("z0_dW", "dZ_w0", "dZ_dW")
        for statistic, word in (("mean", "mean"), ("min", "smallest"), ("max", "largest"))
    ),
))

MAXP = Schema("maxp", "maxp", (
    Key("c/{layer}", "learning-rate exponent of the layer's weights"),
    Key("lr/{group}", "learning rate of ``{layer}``, ``{layer}.bias`` or ``_other``"),
))

SPIKE = Schema("spike", "spike", (
    Key("value", "the value", nonfinite="any"),
    Key("threshold", "threshold; a larger value (with ``direction='down'`` a smaller one) is a spike; not reported "
        "during the warm-up of the rule"),
    Key("lower_threshold", "lower threshold; a smaller value is a spike", when="with ``direction='both'``"),
    Key("spike", "1 if the value is a spike, else 0"),
    Key("spike_count", "number of spikes so far"),
))

DRIFT = Schema("drift", "drift", (
    Key("drift", "1 if the value drifts from its trend, else 0"),
    Key("sum_up", "upward CUSUM, in standard deviations; 0 during the warm-up"),
    Key("sum_down", "downward CUSUM, in standard deviations; 0 during the warm-up"),
))

ROLLBACK = Schema("rollback", "rollback", (
    Key("count", "number of rollbacks so far"),
    Key("restored_iteration", "iteration after which the restored state was copied",
        when="in iterations after which a state is restored"),
    Key("discarded_count", "number of iterations discarded during recovery so far"),
))

SPIKE_RECORD = Schema("spike_record", "grad_record", (
    Key("recorded_count", "number of spike files written so far"),
))

NOISE_SCALE = Schema("noise scale", "noise_scale", (
    Key("value", "simple noise scale", unit="items"),
    Key("low", "lower end of its 95 % interval", unit="items"),
    Key("high", "upper end of its 95 % interval", unit="items"),
    Key("batch", "number of items in the optimizer's step", unit="items"),
))

OPTIMIZER_STATE = Schema("optimizer", "optimizer", (
    Key("rms_median", "median of the tensors' RMS"),
    Key("rms_p95", "95th percentile (nearest rank) of the RMS"),
    Key("rms_max", "largest RMS"),
    Key("epsilon_dominated_median", r"tensors' median fraction of elements with :math:`\sqrt{\hat v} < \epsilon`"),
    Key("epsilon_dominated_max", "largest epsilon-dominated fraction of a tensor"),
    Key("update_norm", "l2 norm of the change of all tensors from the train step's start to the end of the step"),
    Key("momentum_cosine_median", "median over tensors of the cosine of gradient and momentum"),
    Key("momentum_cosine_min", "smallest cosine of gradient and momentum"),
    Key("topk_rms/{name}", "the ``top_k`` largest RMS"),
))

CURVATURE = Schema("curvature", "curvature", (
    Key("along_gradient", "curvature of the loss along its gradient"),
    Key("stability_threshold", "stability threshold: 2 / learning rate, larger with momentum, less the weight decay",
        when="with SGD"),
    Key("hessian_max_eigenvalue", "largest eigenvalue found of the Hessian; not reported with a residual above 10 %"),
    Key("hessian_max_eigenvalue_residual", "largest relative distance from an eigenvalue, not always the largest one"),
))

REPLICAS = Schema("replicas", "replicas", (
    Key("in_sync", "1 if everything compared is the same on all ranks, else 0"),
))

REPLAY = Schema("replay", "replay", (
    Key("reproducible", "1 if two passes of the same batch gave the same gradients, bit by bit, else 0"),
))

HISTOGRAMS = Schema("histograms", "histograms", (
    Key("weights_count", "number of weight histograms in this iteration"),
    Key("gradients_count", "number of gradient histograms in this iteration"),
    Key("activations_count", "number of activation histograms in this iteration"),
))

ROUTING = Schema("routing", "routing", (
    Key("load_entropy/{layer}", "effective number of experts over their number: exp(entropy of their load) / N"),
    Key("max_share/{layer}", "largest share of an expert in all assignments of tokens"),
    Key("dead_share/{layer}", "share of experts without a token"),
    Key("logit_max/{layer}", "largest logit of the router"),
    Key("margin/{layer}", "mean over tokens: smallest logit of a chosen expert minus largest of another"),
))

SCHEMAS = (
    *(GRADIENT, LOSS, SPIKE, DRIFT, SPIKE_RECORD, ROLLBACK, NOISE_SCALE, WEIGHT_UPDATE, OPTIMIZER_STATE, REPLICAS),
    *(HISTOGRAMS, RCC, ROUTING, ACTIVATION, SPECTRAL, STEP_STATS, CURVATURE, ALIGNMENT, MAXP, REPLAY),
)
