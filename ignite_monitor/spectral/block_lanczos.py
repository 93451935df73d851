"""Block Lanczos from known and from random vectors: the largest eigenvalue, and what it can't exceed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.spectral.dominant import Dominant, dominant

# Of 16 vectors, which is what products are quick with, this division needs the fewest steps.
WARM, PROBES = 6, 10
WIDTH = WARM + PROBES

# The squared length of 10 independent standard normal numbers is smaller once in 100,000 times.
_LEAST = math.sqrt(0.5451)
# So many blocks are eliminated at once: more of them would take more arithmetic, fewer of them more calls.
_AT_ONCE = 2
# By how much less the later steps shorten what the first ones do, as a part of the logarithm.
_LATER = 0.8
# How far above the largest Ritz value an eigenvalue is looked for, relatively, as far as square roots go: nearer ones
# drown in float32's rounding.
_ABOVE = [2.5e-4, 5e-4, 1e-3, 2e-3, 8e-3, 0.032, 0.128, 0.512]


class Leading(NamedTuple):
    """What a Krylov space says of the largest eigenvalue of each operator."""

    lower: Tensor  # a bound of it, of shape (B,)
    upper: Tensor  # the same
    # Of vectors in the space's basis, of shape (B, WARM, any): the first has the lower bound for its Rayleigh quotient,
    # all together span the leading eigenspace approximately.
    coordinates: Tensor


class BlockLanczos:
    r"""A Krylov space of symmetric positive semidefinite operators A of order n, grown step by step.

    After k steps its orthonormal basis Q, in blocks of which the first is :math:`Q E_1`, satisfies

    .. math:: A Q = Q T + Q_+ B E_k^\top, \qquad T = Q^\top A Q.

    The residual of a Ritz vector says that there is an eigenvalue nearby, not that it is the largest. What says this
    are the random vectors :math:`\Omega = Q E_1 R` among those that the space starts with: let u be a unit eigenvector
    whose eigenvalue λ exceeds those of T. Then :math:`y = Q^\top u` solves :math:`(\lambda - T) y = E_k B^\top z`
    with :math:`z = Q_+^\top u`, so that

    .. math:: \Omega^\top u = R^\top E_1^\top y = R^\top E_1^\top (\lambda - T)^{-1} E_k B^\top z, \qquad
        \lVert y\rVert^2 + \lVert z\rVert^2 \le 1.

    On the left are 10 independent standard normal numbers, since Ω knows nothing of A; once in 100,000 times their sum
    of squares is smaller than 0.5451. So no λ at which the right-hand side is always shorter than :math:`\sqrt{0.5451}`
    is an eigenvalue, and its greatest length falls exponentially with k. It is looked at for some λ; between them it
    is taken to fall as λ grows, which it mostly does, or to grow by a few per cent only.

    No other sign that the norm has converged can take the place of this. Where a direction that the known vectors have
    no part of outgrows the largest, Ritz values stand still until it has come up, and as often as random vectors may be
    shorter than is asked for here, it is missed.

    Args:
        gram: V -> VA for V of shape (B, WIDTH, n), with eigenvalues of 1 at most.
        start: of shape (B, WIDTH, n): WARM rows of any kind, then PROBES standard normal ones that are independent of A
            and of these.
        steps: how many steps there may be at most; ``(steps + 1) * WIDTH`` is at most n.
    """

    def __init__(self, gram: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> None:
        batch, _, n = start.shape
        self._gram = gram
        self._basis = start.new_empty(batch, (steps + 1) * WIDTH, n)
        self._projected = start.new_empty(batch, steps * WIDTH, steps * WIDTH)
        self._couplings: list[Tensor] = []
        random = start[:, WARM:]
        # Of the size of rounding, and twice, so that every step has another part of them.
        tiny = 4 * torch.finfo(start.dtype).eps / math.sqrt(n)
        self._dither = (tiny * torch.cat([random, random.roll(1, 2)], 1)[:, :WIDTH]).repeat(1, 1, 2)
        self._basis[:, :WIDTH], coordinates = _orthonormal(start)
        self._probes = coordinates[..., WARM:].to(wide_dtype(start.device))
        self._dominant: Dominant | None = None
        self._examined: tuple[Tensor, Tensor] | None = None
        self.steps = 0  # so far

    def extend(self) -> None:
        """Add a block to the space."""
        size = self.steps * WIDTH
        basis = self._basis[:, : size + WIDTH]
        block = self._gram(basis[:, size:])
        coefficients = basis @ block.mT
        block = torch.baddbmm(block, coefficients.mT, basis, alpha=-1)
        self._projected[:, : size + WIDTH, size : size + WIDTH] = coefficients
        # Where the space is exhausted nothing but rounding remains of some rows, with any direction inside or outside
        # of it. So they get one, as small as rounding. Once is not enough for orthogonality in floating point.
        first = (2 * self.steps + 2) % block.shape[2]  # not the start itself, which the space has
        dither = self._dither[..., first : first + block.shape[2]]
        scale = torch.linalg.matrix_norm(coefficients, keepdim=True)
        following = _orthonormal(torch.addcmul(block, scale, dither))[0]
        for _ in range(2):
            following = torch.baddbmm(following, (basis @ following.mT).mT, basis, alpha=-1)
        following = _orthonormal(following)[0]
        self._couplings.append((following @ block.mT).to(self._probes.dtype))
        self._basis[:, size + WIDTH : size + 2 * WIDTH] = following
        self._dominant = self._examined = None
        self.steps += 1

    def missing(self, relative: float) -> Tensor:
        """How many more steps until the bounds differ by this at most, as far as square roots go: (B,), about."""
        # They mostly fall from candidate to candidate, but not always.
        length = self._examine()[0][:, sum(each < relative for each in _ABOVE) :].amax(1)
        # The first steps shorten them most.
        rate = _LATER * (math.sqrt(self._basis.shape[2]) / length).log() / self.steps
        steps = ((length / _LEAST).log() / rate).ceil()
        steps = torch.where(rate > 0, steps, torch.inf).clamp(1, self.steps + 2)
        return torch.where(length < _LEAST, 0, steps)

    def leading(self) -> Leading:
        """The largest eigenvalue, as far as this space knows."""
        found = self._largest()
        # Warm and random vectors mixed, so that a direction that the warm ones have no part of is found as well.
        mixed = found.power[:, :WARM] + found.power[:, WARM : 2 * WARM]
        chosen = torch.cat([found.vector.unsqueeze(1), mixed[:, : WARM - 1]], 1)
        lengths, candidates = self._examine()
        possible = ~(lengths < _LEAST)
        # The smallest of the candidates above which there is no eigenvalue; 1 if there is none.
        following = torch.cat([candidates[:, 1:], torch.ones_like(candidates[:, :1])], 1)
        upper = torch.where(possible, following, candidates[:, :1]).amax(1).clamp(max=1.0)
        return Leading(found.lower, upper, chosen)

    def vectors(self, leading: Leading) -> Tensor:
        """Orthonormal rows in the order of the coordinates that :meth:`leading` gave last, of shape (B, WARM, n)."""
        basis: Tensor = self._basis[:, : leading.coordinates.shape[2]]
        return _orthonormal(leading.coordinates @ basis)[0]

    def _largest(self) -> Dominant:
        if self._dominant is None:
            self._dominant = dominant(self._symmetric())
        return self._dominant

    def _symmetric(self) -> Tensor:
        size = self.steps * WIDTH
        upper_half = self._projected[:, :size, :size].triu()  # below it there may be anything
        return upper_half + upper_half.triu(1).mT

    def _examine(self) -> tuple[Tensor, Tensor]:
        if self._examined is None:
            self._examined = self._lengths(_ABOVE)
        return self._examined

    def _lengths(self, above: list[float]) -> tuple[Tensor, Tensor]:
        """How long Ωᵀu is at most if a candidate is an eigenvalue, for each of them; and the candidates."""
        found = self._largest()
        lower = found.lower.to(self._probes.dtype).clamp(min=1e-30)
        candidates = torch.stack([lower * (1 + each) ** 2 for each in above], 1)
        tridiagonal = self._symmetric().to(lower.dtype)
        identity = torch.eye(self.steps * WIDTH, dtype=lower.dtype, device=lower.device)
        # (λ − T)⁻¹ by elimination of some blocks at once, with Schur complements, all positive definite: if y_j is the
        # first block of these, and y_l what follows them, they are X y_l, and the last y_l is z.
        product = self._probes.mT.repeat_interleave(len(above), 0)
        schur = squares = identity.new_zeros(1, WIDTH, WIDTH)
        for first in range(0, self.steps, _AT_ONCE):
            last = min(first + _AT_ONCE, self.steps)
            part = slice(first * WIDTH, last * WIDTH)
            pivots = candidates[..., None, None] * identity[part, part] - tridiagonal[:, None, part, part]
            pivots = pivots.flatten(0, 1)
            pivots[:, :WIDTH, :WIDTH] -= schur
            coupling = self._couplings[last - 1].repeat_interleave(len(above), 0)
            right = pivots.new_zeros(len(pivots), (last - first) * WIDTH, WIDTH)
            right[:, -WIDTH:] = coupling.mT
            solved = torch.linalg.solve_ex(pivots, right)[0]
            top = solved[:, :WIDTH]
            product = product.bmm(top)
            schur = coupling.bmm(solved[:, -WIDTH:])
            squares = solved.mT.bmm(solved) + top.mT @ squares @ top
        identity = identity[:WIDTH, :WIDTH]
        square = product.bmm(torch.linalg.solve_ex(identity + squares, product.mT)[0])
        # Its largest eigenvalue from above: the 32nd root of the trace of the 32nd power.
        trace = square.diagonal(dim1=1, dim2=2).sum(1).clamp(min=torch.finfo(square.dtype).tiny)
        square = square / trace[:, None, None]
        for _ in range(4):
            square = square.bmm(square)
        norms = (trace.sqrt() * square.square().sum((1, 2)) ** (1 / 64)).view_as(candidates)
        # How far λ − T is from being singular; where it may be, anything is possible.
        gaps = (candidates / found.upper.to(lower.dtype)[:, None] - 1).clamp(min=0)
        # The eighth root of the trace of (ΩᵀΩ)⁴ is no less than the norm of Ω.
        probes = self._probes.mT @ self._probes
        largest = torch.linalg.matrix_norm(probes @ probes) ** (1 / 4)
        rounding = 8 * torch.finfo(self._basis.dtype).eps * largest
        return (norms + rounding[:, None] / gaps).nan_to_num(torch.inf, torch.inf), candidates


def _orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows that span the same, and R with ``rows.mT == orthonormal.mT @ R``."""
    q: Tensor
    r: Tensor
    q, r = torch.linalg.qr(rows.mT)
    return q.mT, r
