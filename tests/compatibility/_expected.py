"""What every monitor should publish in each iteration of a recorded training."""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor

from tests.compatibility._curvature import Curvature
from tests.compatibility._training import CURVED, MICRO_BATCHES, RATE, Recorded, count_items
from tests.compatibility._truth import Iteration, Truth
from tests.stress._steps import order_statistics
from tests.stress._truth import Values, norm, wide

BETAS, EPS = (0.9, 0.999), 1e-8
WARMUP, DEVIATIONS = 2, 3.0
DECAY = 0.99


def expected(recorded: Recorded) -> list[Values]:
    still: dict[str, int] = {}
    moments, noise = Moments(), Noise()
    norms: list[float] = []
    losses = Level()
    every = []
    for number, iteration in enumerate(recorded.iterations, start=1):
        truth = Truth(recorded.initial, iteration, recorded.held)
        values = {"grad/norm": norm(list(iteration.gradients.values())), "grad/stepped": 1.0}
        values |= {f"grad/{name}": value for name, value in level(norms).items()}
        values |= {f"grad/{name}": 0.0 for name in ("spike", "spike_count", "spike_score", "skipped_count")}
        values |= {"grad/nonfinite_count": 0.0}
        norms.append(values["grad/norm"])
        values |= losses.values(iteration.loss)
        values |= {"loss_record/recorded_count": values["loss/spike_count"]}
        values |= {"rollback/count": 0.0, "rollback/discarded_count": 0.0}
        values |= {"replicas/in_sync": 1.0, "replicas/differing_count": 0.0}
        values |= {"histograms/weights_count": min(16.0, len(list(recorded.model.parameters())))}
        values |= noise.values(iteration)
        if number == CURVED:
            values |= curvature(recorded, iteration, moments)
        values |= moments.values(iteration)
        values |= truth.update(still)
        for part in (truth.activations, truth.attention_inputs, truth.rcc, truth.spectral, truth.alignment):
            values |= part()
        every.append(values | truth.stats(RATE))
    return every


def level(past: list[float]) -> dict[str, float]:
    """Weighted mean and sample deviation of values, newer ones weighing more."""
    weights = [DECAY**i for i in range(len(past))][::-1]
    total = sum(weights)
    if not past:
        return {}
    mean = sum(w * x for w, x in zip(weights, past, strict=True)) / total
    if len(past) < 2:
        return {"mean": mean}
    spread = sum(w * (x - mean) ** 2 for w, x in zip(weights, past, strict=True))
    return {"mean": mean, "std": math.sqrt(spread / (total - sum(w * w for w in weights) / total))}


class Level:
    """The loss against the level of those before it."""

    def __init__(self) -> None:
        self.past: list[float] = []
        self.spikes: list[bool] = []

    def values(self, loss: float) -> Values:
        known = level(self.past)
        threshold = known["mean"] + DEVIATIONS * known["std"] if len(self.past) >= WARMUP else math.inf
        self.spikes.append(loss > threshold)
        self.past.append(min(loss, threshold))
        values = {"value": loss, "spike": float(self.spikes[-1]), "spike_count": float(sum(self.spikes))}
        values |= {"spike_score": sum(self.spikes) / len(self.spikes)}
        values |= {"threshold": threshold} if math.isfinite(threshold) else {}
        return {f"loss/{name}": value for name, value in values.items()}


class Moments:
    """Adam's, by its recurrences."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.steps = 0

    def values(self, iteration: Iteration) -> Values:
        self.steps += 1
        rms, shares, cosines, moved = [], [], [], []
        for name, gradient in iteration.gradients.items():
            g = wide(gradient)
            self.first[name] = BETAS[0] * self.first.get(name, 0) + (1 - BETAS[0]) * g
            self.second[name] = BETAS[1] * self.second.get(name, 0) + (1 - BETAS[1]) * g**2
            root = (self.second[name] / (1 - BETAS[1] ** self.steps)).sqrt()
            rms.append(norm([g / root.clamp(min=EPS)]) / math.sqrt(g.numel()))
            shares.append(float((root < EPS).double().mean()))
            length = norm([g]) * norm([self.first[name]])
            cosines += [float((g * self.first[name]).sum()) / length] if length else []
            moved.append(wide(iteration.after[name]) - wide(iteration.weights[name]))
        values = order_statistics("rms", rms) | order_statistics("epsilon_dominated", shares)
        values |= order_statistics("momentum_cosine", cosines) | {"update_norm": norm(moved)}
        names = ("rms_median", "rms_p95", "rms_max", "epsilon_dominated_median", "epsilon_dominated_max", "update_norm")
        names += ("momentum_cosine_median", "momentum_cosine_min")
        return {f"optimizer/{name}": values[name] for name in names}

    def preconditioner(self, weights: dict[str, Tensor], gradient: Tensor) -> Tensor:
        """What the next step divides by, flat."""
        past = torch.cat([(self.second.get(name, 0) + 0 * wide(each)).flatten() for name, each in weights.items()])
        second = BETAS[1] * past + (1 - BETAS[1]) * gradient**2
        return (second / (1 - BETAS[1] ** (self.steps + 1))).sqrt() + EPS


class Noise:
    """The noise scale, from the products of the micro-batches' gradients."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def values(self, iteration: Iteration) -> Values:
        parts, before = [], None
        for after in iteration.accumulated:
            flat = torch.cat([wide(each).flatten() for each in after.values()])
            parts.append(flat if before is None else flat - before)
            before = flat
        items = count_items(iteration.x)
        signal = float(parts[0] @ parts[1])
        trace = sum(items / MICRO_BATCHES * (float(each @ each) - signal) for each in parts) / MICRO_BATCHES
        self.pairs.append((trace, signal))
        return {"noise_scale/batch": float(items), **self._ratio()}

    def _ratio(self) -> Values:
        """The ratio of the weighted means, and Fieller's interval."""
        weights = torch.tensor([DECAY**i for i in range(len(self.pairs))][::-1], dtype=torch.float64)
        pairs = torch.tensor(self.pairs, dtype=torch.float64)
        share = float((weights**2).sum() / weights.sum() ** 2)
        if share == 1:
            return {}
        weights /= weights.sum()
        x, y = (weights @ pairs).tolist()
        deviations = pairs - weights @ pairs
        # of the means
        (xx, xy), (_, yy) = ((deviations.T * weights) @ deviations * share / (1 - share)).tolist()
        t = student.ppf(0.975, 1 / share - 1)
        # All r with (x - r y)^2 <= t^2 (xx - 2 r xy + r^2 yy).
        a, b, c = y * y - t * t * yy, x * y - t * t * xy, x * x - t * t * xx
        if a <= 0 or y <= 0 or b * b < a * c:
            return {}
        low, high = ((b + sign * math.sqrt(b * b - a * c)) / a for sign in (-1, 1))
        return {"noise_scale/value": x / y, "noise_scale/low": low, "noise_scale/high": high}


def curvature(recorded: Recorded, iteration: Iteration, moments: Moments) -> Values:
    try:
        found = Curvature(recorded.initial, iteration, recorded.case.loss)
        found.along(found.gradient)
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        return {}  # with an operation that can't be differentiated twice
    g = found.gradient
    scales = moments.preconditioner(iteration.weights, g)
    step = g / scales
    return {
        "curvature/along_gradient": float(g @ found.along(g) / (g @ g)),
        "curvature/along_gradient_preconditioned": float(step @ found.along(step) / (g @ step)),
        "curvature/stability_threshold": (2 + 2 * BETAS[0]) / ((1 - BETAS[0]) * RATE),
        "curvature/hessian_max_eigenvalue": found.largest(),
        "curvature/hessian_max_eigenvalue_preconditioned": found.largest(scales),
    }


def summaries(said: Values, truth: Values) -> Values:
    """Largest, mean, … over those layers that are published."""
    kinds_of: dict[str, Any] = {
        "rcc": (("weight_update", "input_drift"), ("max", "median")),
        "alignment": (("z0_dW", "dZ_w0", "dZ_dW"), ("mean", "min", "max")),
    }
    found = {}
    for family, (metrics, kinds) in kinds_of.items():
        for metric in metrics:
            start = f"{family}/{metric}/"
            names = [name for name in said if name.startswith(start)]
            names = [name for name in names if name.removesuffix(".weight") not in {*names} - {name}]
            values = [truth[name] for name in names if name in truth]
            if values:
                each = order_statistics(metric, values) | {f"{metric}_mean": sum(values) / len(values)}
                found |= {f"{family}/{metric}_{kind}": each[f"{metric}_{kind}"] for kind in kinds}
    return found
