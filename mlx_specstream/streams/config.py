"""What streams are made of: the numbers that a streams folder's ``config.json`` holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import SpecStreamError

METHODS = ("linear", "attention")
MODES = ("fused", "deferred")


@dataclass(frozen=True)
class StreamsConfig:
    """Shape of a set of stream heads.

    Args:
        method: ``"linear"`` (Medusa layout) or ``"attention"`` (multi-stream attention, the
            paper's method).
        gamma: Number of streams: tokens predicted beyond the target's own next one.
        mode: For attention: ``"fused"`` runs the streams of every row in the pass itself,
            ``"deferred"`` those of the last accepted row after it.
        layers: For attention: how many top layers the streams run through (N_s).
        rank: For attention: rank of the low-rank adapters on those layers.
        start_rank: For attention: rank of the map that a stream's start is made with.
        correction_rank: Rank of the token-conditioned correction; 0 leaves it out.
        draft_vocab: Token ids that streams may propose, or None for all.
        rates: How often each stream's k-th candidate is right where those before it are, measured
            on held-out text; None if nobody has measured. Trees are made from them.

    Raises:
        SpecStreamError: If a value makes no sense.
    """

    method: str = "attention"
    gamma: int = 3
    mode: str = "fused"
    layers: int = 4
    rank: int = 32
    start_rank: int = 128
    correction_rank: int = 64
    draft_vocab: tuple[int, ...] | None = None
    rates: tuple[tuple[float, ...], ...] | None = None

    @property
    def trunk_layers(self) -> int:
        """Top layers whose inputs, keys and values streams ask the trunk for."""
        return self.layers if self.method == "attention" else 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SpecStreamError(f"streams method '{self.method}' is not one of {METHODS}")
        if self.mode not in MODES:
            raise SpecStreamError(f"streams mode '{self.mode}' is not one of {MODES}")
        if self.rates is not None:
            self._check_rates(self.rates)
        least_of = {"gamma": 1, "layers": 1, "rank": 1, "start_rank": 1, "correction_rank": 0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SpecStreamError(f"streams {name} must be at least {least}, not {value!r}")

    def _check_rates(self, rates: Any) -> None:
        """Make them hashable, as the rest is.

        Raises:
            SpecStreamError: If they are not numbers from 0 to 1, a row for each stream.
        """
        try:
            rows = tuple(tuple(float(rate) for rate in row) for row in rates)
            right = len(rows) == self.gamma and all(0 <= r <= 1 for row in rows for r in row)
        except (TypeError, ValueError):
            right = False
        if not right:
            raise SpecStreamError(f"streams rates must be numbers for {self.gamma} streams")
        object.__setattr__(self, "rates", rows)

    def to_dict(self) -> dict[str, Any]:
        """The fields that apply to the method, ready for JSON; the draft vocabulary is not one."""
        fields: dict[str, Any] = {"method": self.method, "gamma": self.gamma}
        if self.method == "attention":
            fields |= {"mode": self.mode, "layers": self.layers, "rank": self.rank}
            fields["start_rank"] = self.start_rank
        if self.rates is not None:
            fields["rates"] = [list(depth) for depth in self.rates]
        return fields | {"correction_rank": self.correction_rank}
