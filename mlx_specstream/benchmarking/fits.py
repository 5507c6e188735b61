"""What fits a Mac, and how fast it would decode: arithmetic on published figures.

A pass reads every weight and the keys and values of the context once, so a pass takes at least
those bytes divided by the bandwidth. Published decoding comes to some share of that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .chips import Chip, chips, data, published, usable
from .model_size import ModelSize
from .recording import Recording
from .simulation import simulate

# Buffers of a pass and of a prompt computed 512 tokens at a time, and what the allocator keeps:
# a round figure that nobody measured on a Mac.
SCRATCH = 0.5e9


@dataclass(frozen=True)
class Need:
    """Bytes that a model needs.

    Args:
        weights: Of the weights.
        kv: Of the keys and values of the whole context.
        streams: Of streams and their table; 0 if there are none.
        scratch: For everything else.
    """

    weights: float
    kv: float
    streams: float
    scratch: float = SCRATCH

    @property
    def total(self) -> float:
        """All together."""
        return self.weights + self.kv + self.streams + self.scratch

    @property
    def read(self) -> float:
        """What a plain pass reads at a full context."""
        return self.weights + self.kv


@dataclass(frozen=True)
class Fit:
    """A model on a chip.

    Args:
        chip: Name of the chip.
        memory: GiB of the machine.
        usable: Bytes that the GPU may use of it.
        fits: Whether the model does.
        ceiling: Tokens per second of plain decoding if the bandwidth were all that counts.
        plain: From and to how many to expect.
        speedup: Predicted by streams and lookups; None where no cost curve was published or there
            is no recording.
        streams: The same with them.
    """

    chip: str
    memory: int
    usable: float
    fits: bool
    ceiling: float
    plain: tuple[float, float]
    speedup: float | None
    streams: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def need_of(model: ModelSize, context: int, recording: Recording | None) -> Need:
    """What a model needs for a context, with streams as large as the recorded ones."""
    share = 0.0 if recording is None else recording.held_share
    return Need(model.weights, float(model.kv_per_token * context), share * model.weights)


def fits_of(need: Need, speedups: dict[str, float]) -> list[Fit]:
    """A model on every chip and memory size."""
    return [
        _fit(need, chip, memory, speedups.get(chip.curve or ""))
        for chip in chips()
        for memory in chip.memory
    ]


def _fit(need: Need, chip: Chip, memory: int, speedup: float | None) -> Fit:
    share = data()["efficiency"]
    ceiling = chip.bandwidth / need.read
    plain = (share["low"] * ceiling, share["high"] * ceiling)
    return Fit(
        chip=chip.name,
        memory=memory,
        usable=usable(memory),
        fits=need.total <= usable(memory),
        ceiling=ceiling,
        plain=plain,
        speedup=speedup,
        streams=None if speedup is None else (plain[0] * speedup, plain[1] * speedup),
    )


def predicted_speedups(recording: Recording) -> dict[str, float]:
    """For each published curve that a chip has, the speed-up that replaying predicts."""
    wanted = {chip.curve for chip in chips()}
    return {
        name: simulate(recording, each.curve(recording)).overall.speedup
        for name, each in published().items()
        if name in wanted
    }
