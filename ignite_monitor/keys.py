"""All that the monitors publish."""

from __future__ import annotations

from ignite_monitor.schema import Key, Schema

# fmt: off

_COUNTS = "spikes, skipped steps, non-finite norms so far"
_NORM = "norm against its threshold"
_SCORE, _RECENT = "share of spikes among the last thousand values that were judged", "share of spikes lately"
_VALUE = "value against its threshold"

GRADIENT = Schema("grad", "grad", (
    Key("norm", "norm of the gradient", nonfinite="any", chart=_NORM),
    Key("threshold", "the largest norm that is no spike; absent during the rule's warm-up", chart=_NORM),
    Key("mean", "mean of the norms that the threshold was derived from"),
    Key("std", "their sample standard deviation; absent before the second"),
    Key("spike", "1 if the norm is a spike, or the loss, else 0"),
    Key("loss_spike", "1 if the loss is a spike, else 0", when="with ``loss``"),
    Key("culprit/{name}",
        "share of what gradients are above their thresholds, at a spike, of the few tensors that hold most of it",
        when="with ``per_parameter=True``"),
    Key("scale", "what the ``scaler`` has multiplied the loss with", when="with ``scaler``"),
    Key("stepped", "1 if the optimizer made a step in this iteration, else 0"),
    Key("spike_count", "spikes so far", chart=_COUNTS),
    Key("spike_score", _SCORE, chart=_RECENT),
    Key("skipped_count", "optimizer steps that ``skip_step`` has left out so far", chart=_COUNTS),
    Key("clipped_count", "optimizer steps whose gradient has been scaled down to its threshold so far",
        when='with ``reaction="clip"``', chart=_COUNTS),
    Key("nonfinite_count", "norms that were inf or NaN so far", chart=_COUNTS),
), signs=frozenset({"norm", "spike"}))

_RATIOS = "update ratio over the parameters"
_NORMS = "gradient norm over the parameters"
_PARAMETERS = "frozen, vanishing, exploding"

WEIGHT_UPDATE = Schema("weights", "monitor", (
    Key("grad_median", "median over the parameters of their gradients' l2 norms", nonfinite="inf", chart=_NORMS),
    Key("grad_p95", "nearest-rank 95th percentile of these", nonfinite="inf", chart=_NORMS),
    Key("grad_min", "the smallest", nonfinite="inf", chart=_NORMS),
    Key("grad_max", "the largest", nonfinite="inf", chart=_NORMS),
    Key("vanishing_count", "parameters whose norm is below ``vanishing_grad_threshold``", chart=_PARAMETERS),
    Key("exploding_count", "parameters whose norm is above ``exploding_grad_threshold``", chart=_PARAMETERS),
    Key("update_ratio_median", "median over the parameters of their update ratios", chart=_RATIOS),
    Key("update_ratio_p95", "nearest-rank 95th percentile of these", chart=_RATIOS),
    Key("update_ratio_min", "the smallest", chart=_RATIOS),
    Key("update_ratio_max", "the largest", chart=_RATIOS),
    Key("frozen_count", "parameters that had a step and are frozen", chart=_PARAMETERS),
    Key("lost_update_fraction", "which part of the elements with a gradient did not move for rounding",
        when="with bfloat16 or float16 weights and no float32 copy of them", chart="updates lost to rounding"),
    Key("topk_grad/{name}", "the norms of the ``top_k`` parameters with the largest", nonfinite="inf",
        chart="largest gradient norms"),
    Key("topk_frozen/{name}", "of the ``top_k`` parameters frozen longest, for how many monitored steps",
        when="if parameters are frozen", chart="monitored steps without a move"),
), signs=frozenset({"frozen_count"}))

_GIVEN = "with ``{}``".format

ACTIVATION = Schema("activation", "", (
    Key("activation/{module}/{metric}", "of a module's output", when=_GIVEN("activations")),
    Key("activation/{module}/{place}/{metric}",
        "of each floating-point tensor in an output that is a tuple, dict or dataclass; the place is a position, "
        "key or field", when=_GIVEN("activations")),
    Key("activation/{module}/dead_fraction", "which part of the units is 0 throughout the iteration",
        when=_GIVEN("activations"), chart="dead units"),
    Key("activation/{module}/max_abs", "the largest absolute value", when=_GIVEN("activations"),
        chart="largest activations"),
    Key("activation/{module}/{name}",
        "what the model records itself, see :func:`record`; ``{name}_2`` where there is such a name already",
        when="where it is called"),
    Key("activation/{module}/head_{i}/query/{metric}", "of what attention is computed from, also ``key`` and ``value``",
        when=_GIVEN("activations") + " and ``attention``"),
    Key("attention_entropy/{module}/head_{i}", "how widely attention spreads", unit="nats", when=_GIVEN("attention"),
        chart="attention entropy per head"),
    Key("attention_logit_max/{module}/head_{i}", "the largest score, of those that its softmax is taken of",
        when=_GIVEN("attention"), chart="largest attention logit per head"),
    Key("gradient/{parameter}/{metric}", "of the gradient, unscaled and not yet clipped", when=_GIVEN("gradients")),
    Key("gradient_after_clip/{parameter}/{metric}", "of what the optimizer's step is made with, where it differs",
        when=_GIVEN("gradients")),
    Key("parameter/{parameter}/{metric}", "of the weights that the iteration starts with", when=_GIVEN("parameters")),
    Key("activation_difference/{module}/{metric}", "of a module's output less that of the reference",
        when=_GIVEN("activation_differences")),
    Key("parameter_difference/{parameter}/{metric}", "of the weights less those of the reference",
        when=_GIVEN("parameter_differences")),
))

_ERROR = "not reported with the two quick methods"
_UPDATES = "with ``updates=True``"

SPECTRAL = Schema("spectral", "spectral", (
    Key("norm_max", "the largest spectral norm", chart="spectral norm over the weights"),
    Key("norm_mean", "the mean over the weights", chart="spectral norm over the weights"),
    Key("norm_std", "their standard deviation, over all of them"),
    Key("stable_rank_min", r"the smallest stable rank :math:`\lVert W\rVert_F^2 / \sigma^2`"),
    Key("stable_rank_median", "the median of the stable ranks"),
    Key("error_max", f"what no norm's relative error exceeds; {_ERROR}"),
    Key("iterations", 'how many steps "power" took for the weight that needed most'),
    Key("norm/{name}", "each norm of a matrix", when="with ``per_parameter=True``"),
    Key("embedding/{name}", "each norm of an embedding", when="with ``per_parameter=True``"),
    Key("topk/{name}", "the ``top_k`` largest norms", chart="largest spectral norms"),
    Key("update_norm_max", "the largest norm of what the train step changed", when=_UPDATES,
        chart="spectral norm over the weights"),
    Key("update_error_max", f"what no such norm's relative error exceeds; {_ERROR}", when=_UPDATES),
    Key("update_condition_max", r"the largest :math:`\lVert\Delta W\rVert_2 / \sqrt{out/in}`", when=_UPDATES),
    Key("update_condition_median", "the median of these", when=_UPDATES),
    Key("weight_condition_max", r"the largest :math:`\lVert W\rVert_2 / \sqrt{out/in}`", when=_UPDATES),
    Key("weight_condition_median", "the median of these", when=_UPDATES),
))

STEP_STATS = Schema("step", "step", (
    Key("time_ms", "how long the train step took, without loading its data", unit="ms"),
    Key("data_wait_ms", "how long the engine has waited for the batch", unit="ms", chart="waiting for data"),
    Key("data_wait_share", "that over itself and ``time_ms``", when="where the latter is there"),
    Key("data_wait_max_ms", "the longest of all ranks", unit="ms", when="with ``slowest_rank=True``",
        chart="waiting for data"),
    Key("data_wait_rank", "the rank that has waited that long", when="with ``slowest_rank=True``"),
    Key("items_per_s", "items of the batch over that time, on this rank", unit="1/s"),
    Key("mfu", "model FLOPs utilisation: operations of a train step over what the device could have made in that time",
        when="where its peak is known"),
    Key("parameter_norm", "the l2 norm of all parameters together, as the train step leaves them", nonfinite="any"),
    Key("lr/group_{i}",
        "the learning rate of each parameter group, as the optimizer's first step used it; where it makes none, "
        "as the train step leaves it", nonfinite="any"),
    Key("peak_memory_mb", "the most memory so far: of tensors on CUDA, of the process on the CPU", unit="MiB"),
    Key("reserved_memory_mb", "what the allocator holds now", unit="MiB", when="on CUDA"),
    Key("resident_memory_mb", "what the process holds now", unit="MiB", when="on the CPU, where the system says it"),
))

_TERMS = "weight update against input drift"

RCC = Schema("rcc", "rcc", (
    Key("weight_update/{layer}", r":math:`\lVert(W_t - W_0)\, x_t\rVert`"),
    Key("input_drift/{layer}", r":math:`\lVert W_0\, (x_t - x_0)\rVert`"),
    Key("input/{layer}", r":math:`\lVert x_t\rVert`"),
    Key("input_change/{layer}", r":math:`\lVert x_t - x_0\rVert`"),
    Key("output_change/{layer}", r":math:`\lVert W_t x_t - W_0 x_0\rVert`"),
    Key("weight_share/{layer}", "``weight_update / (weight_update + input_drift)``", chart="share of the weights"),
    Key("weight_update_max", "the largest of the layers' ``weight_update``", chart=_TERMS),
    Key("weight_update_median", "the median of these", chart=_TERMS),
    Key("input_drift_max", "the largest of the layers' ``input_drift``", chart=_TERMS),
    Key("input_drift_median", "the median of these", chart=_TERMS),
))

ALIGNMENT = Schema("alignment", "alignment", (
    Key("z0_dW/{layer}", r"alpha, of :math:`z_0` and :math:`\Delta W`"),
    Key("dZ_w0/{layer}", r"omega, of :math:`\Delta z` and :math:`W_0`"),
    Key("dZ_dW/{layer}", r"u, of :math:`\Delta z` and :math:`\Delta W`"),
    *(
        Key(f"{term}_{statistic}", f"the {word} of the layers' ``{term}``")
        for term in ("z0_dW", "dZ_w0", "dZ_dW")
        for statistic, word in (("mean", "mean"), ("min", "smallest"), ("max", "largest"))
    ),
))

MAXP = Schema("maxp", "maxp", (
    Key("c/{layer}", "the exponent of the layer's weights"),
    Key("lr/{group}", "the learning rate: of ``{layer}``, ``{layer}.bias``, ``_other``"),
    Key("failed_count", "how often there was no solution"),
))

SPIKE = Schema("spike", "spike", (
    Key("value", "the value", nonfinite="any", chart=_VALUE),
    Key("threshold", "the largest value that is no spike; absent during the rule's warm-up", chart=_VALUE),
    Key("spike", "1 if the value is a spike, else 0"),
    Key("spike_count", "spikes so far"),
    Key("spike_score", _SCORE, chart=_RECENT),
), signs=frozenset({"value", "spike"}))

ROLLBACK = Schema("rollback", "rollback", (
    Key("count", "how often the training has gone back so far", chart="going back"),
    Key("restored_iteration", "the iteration after which the state was that is put back",
        when="in iterations that go back or are undone"),
    Key("discarded_count", "iterations undone so far while it got well", chart="going back"),
), signs=frozenset({"count", "discarded_count"}))

SPIKE_RECORD = Schema("spike_record", "grad_record", (
    Key("recorded_count", "files of spikes written so far"),
), signs=frozenset({"recorded_count"}))

_NOISE = "noise scale and its interval"

NOISE_SCALE = Schema("noise scale", "noise_scale", (
    Key("value", "the simple noise scale", unit="items", chart=_NOISE),
    Key("low", "the lower end of its interval", unit="items", chart=_NOISE),
    Key("high", "the upper end", unit="items", chart=_NOISE),
    Key("batch", "how many items the optimizer's step was made from", unit="items", chart=_NOISE),
), signs=frozenset({"batch"}))

_MOMENTS = "gradient against second moment"

OPTIMIZER_STATE = Schema("optimizer", "optimizer", (
    Key("rms_median", "median over the tensors of their RMS", chart=_MOMENTS),
    Key("rms_p95", "nearest-rank 95th percentile of these", chart=_MOMENTS),
    Key("rms_max", "the largest", chart=_MOMENTS),
    Key("epsilon_dominated_median",
        r"median over the tensors of the fraction of elements with :math:`\sqrt{\hat v} < \epsilon`",
        chart="epsilon-dominated fraction"),
    Key("epsilon_dominated_max", "the largest of these", chart="epsilon-dominated fraction"),
    Key("update_norm", "l2 norm of the change of all tensors together, weight decay included",
        chart="norm of the update"),
    Key("momentum_cosine_median", "median over the tensors of the cosine of gradient and momentum",
        chart="gradient against momentum"),
    Key("momentum_cosine_min", "the smallest of these", chart="gradient against momentum"),
    Key("topk_rms/{name}", "the ``top_k`` largest RMS", chart="largest RMS"),
))

_CURVATURE = "curvature and what a step stands"
_PRECONDITIONED = "with Adam or AdamW"

CURVATURE = Schema("curvature", "curvature", (
    Key("along_gradient", "curvature of the loss along its gradient", chart=_CURVATURE),
    Key("along_gradient_preconditioned", "that of the preconditioned Hessian along its own", when=_PRECONDITIONED,
        chart=_CURVATURE),
    Key("stability_threshold", "curvature above which steps of SGD or Adam grow: 2 / learning rate, with momentum more",
        chart=_CURVATURE),
    Key("hessian_max_eigenvalue", "the largest eigenvalue of the Hessian; not reported where its error exceeds 10 %",
        chart=_CURVATURE),
    Key("hessian_max_eigenvalue_error", "bound of its relative error"),
    Key("hessian_max_eigenvalue_preconditioned",
        "that of the preconditioned Hessian, which is about the stability threshold then", when=_PRECONDITIONED,
        chart=_CURVATURE),
    Key("hessian_max_eigenvalue_preconditioned_error", "its error", when=_PRECONDITIONED),
))

REPLICAS = Schema("replicas", "replicas", (
    Key("in_sync", "1 if all ranks hold the same, else 0", chart="do the ranks agree"),
    Key("differing_count", "how many tensors, and other things, are not the same on all ranks"),
))

HISTOGRAMS = Schema("histograms", "histograms", (
    Key("weights_count", "how many histograms of weights this iteration has"),
    Key("gradients_count", "of gradients"),
    Key("activations_count", "of activations"),
))

SCHEMAS = (
    *(GRADIENT, SPIKE, SPIKE_RECORD, ROLLBACK, NOISE_SCALE, WEIGHT_UPDATE, OPTIMIZER_STATE, REPLICAS, HISTOGRAMS),
    *(RCC, ACTIVATION, SPECTRAL, STEP_STATS, CURVATURE, ALIGNMENT, MAXP),
)
