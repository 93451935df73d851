"""How exact the methods of SpectralNormHandler are, and what they cost beside torch.linalg.svdvals.

First the bias of the two Newton-Schulz methods and of seven plain power iterations on Gaussian matrices. Then, for
weights that move a little between measurements, the worst error (against float64), its published bound, and the time of
a measurement as a part of that of svdvals: the least of several, in which all methods take turns; on the CPU, the time
that it spends, which other processes hardly change. "Gaussian" has no direction that stands out, which is the hardest
there is; "trained" has some that do. Exits with 1 where "power", from the vectors of the last measurement, takes more
than LIMIT of svdvals or a third of ns5-fast, or is less exact than either Newton-Schulz method.

    PYTHONPATH=. python benchmarks/bench_spectral.py [--device cuda] [--rounds 20] [--threads 1]
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

from ignite_monitor.spectral.matrices import Matrices
from ignite_monitor.spectral.norm import SpectralNorms, newton_schulz, power, svd

LIMIT = 0.1
SHAPES = [(1024, 1024), (4096, 1024)]
METHODS = ["power, cold", "power", "ns5-fast", "ns3-accurate", "svd"]


def now() -> float:
    """Seconds, with nothing left to do on a GPU."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def exact(matrix: Tensor) -> float:
    return float(torch.linalg.svdvals(matrix[0].double())[0])


def plain_power(matrix: Tensor, generator: torch.Generator) -> float:
    vector = torch.randn(matrix.shape[2], generator=generator, device=matrix.device)
    for _ in range(7):
        vector = matrix[0].T @ (matrix[0] @ vector)
        vector = vector / vector.norm()
    return float((matrix[0] @ vector).norm())


def bias(device: str) -> None:
    print("| Gaussian | ns5-fast | ns3-accurate | 7 power iterations |\n|---|---|---|---|")
    for size in (256, 512, 1024, 2048):
        generator = torch.Generator(device).manual_seed(size)
        matrix = torch.randn(1, size, size, generator=generator, device=device)
        truth = exact(matrix)
        found = [
            float(newton_schulz(Matrices(matrix), method, generator, torch.float32).norms)
            for method in ("ns5-fast", "ns3-accurate")
        ]
        cells = " | ".join(f"{each / truth - 1:+.1%}" for each in (*found, plain_power(matrix, generator)))
        print(f"| {size}² | {cells} |", flush=True)


def weights(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    gaussian = torch.randn(1, *shape, generator=generator, device=generator.device)
    if kind == "Gaussian":
        return gaussian
    # Twenty directions that training has made larger than the edge of the Gaussian, the largest three times as large.
    left, right = (torch.randn(n, 20, generator=generator, device=generator.device) for n in shape)
    sizes = torch.linspace(3, 1.2, 20, device=generator.device) * (shape[0] ** 0.5 + shape[1] ** 0.5)
    return gaussian + (torch.linalg.qr(left)[0] * sizes) @ torch.linalg.qr(right)[0].T


def measure(kind: str, shape: tuple[int, int], device: str, rounds: int) -> dict[str, tuple[float, float, float]]:
    """For each method the worst error, the worst bound, and the time as a part of svdvals'."""
    generator = torch.Generator(device).manual_seed(0)
    matrix = weights(kind, shape, generator)
    steps = None if device == "cpu" else 14
    vectors = power(Matrices(matrix), None, generator, None if device == "cpu" else 40).vectors
    times: dict[str, list[float]] = {name: [] for name in ["svdvals", *METHODS]}
    errors: dict[str, list[float]] = {name: [] for name in METHODS}
    bounds: dict[str, list[float]] = {name: [] for name in METHODS}

    def run(name: str) -> SpectralNorms:
        matrices = Matrices(matrix)
        if name.startswith("ns"):
            return newton_schulz(matrices, name, generator, torch.float32)
        if name == "svd":
            return svd(matrices)
        if name == "power":
            return power(matrices, vectors, generator, steps)
        return power(matrices, None, generator, None if device == "cpu" else 40)

    for _ in range(rounds):
        matrix = matrix + 0.003 * torch.randn(1, *shape, generator=generator, device=device)
        truth = exact(matrix)
        before = now()
        torch.linalg.svdvals(matrix[0])
        times["svdvals"].append(now() - before)
        for name in METHODS:
            before = now()
            found = run(name)
            times[name].append(now() - before)
            errors[name].append(abs(float(found.norms) / truth - 1))
            bounds[name].append(float(found.errors))
            vectors = found.vectors if name == "power" else vectors
    least = min(times["svdvals"])
    print(f"svdvals, {kind}, {shape[0]} x {shape[1]}: {1e3 * least:.1f} ms", flush=True)
    return {name: (max(errors[name]), max(bounds[name]), min(times[name]) / least) for name in METHODS}


def main() -> int:
    parser = argparse.ArgumentParser(description="Accuracy and cost of spectral norms.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bias(args.device)
    failed = False
    rows = []
    for kind in ("Gaussian", "trained"):
        for shape in SHAPES:
            found = measure(kind, shape, args.device, args.rounds)
            for name, (error, bound, part) in found.items():
                said = "-" if bound != bound else f"{bound:.0e}"
                rows.append(f"| {kind} {shape[0]} x {shape[1]} | {name} | {error:.0e} | {said} | {part:.3f} |")
            error, _, part = found["power"]
            failed |= part > min(LIMIT, found["ns5-fast"][2] / 3)
            failed |= error > min(found[name][0] for name in ("ns5-fast", "ns3-accurate"))
    print("\n| weight | method | worst error | bound | time / svdvals |\n|---|---|---|---|---|", *rows, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
