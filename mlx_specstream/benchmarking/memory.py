"""How long a generation takes and the most memory it holds, prefill and decoding apart."""

from __future__ import annotations

import time

import mlx.core as mx


class Meter:
    """Times and peaks of one generation; it is told of tokens as they come.

    Peaks are counted from what is held when the meter is made, so that what other methods keep
    loaded (a draft model, streams) does not count:

        meter = Meter()
        meter.start()
        for token in generation:
            meter.token()
        meter.stop()

    ``first_seconds`` is the time to the first token and ``decode_seconds`` the time from there to
    the last; ``prefill_peak`` and ``decode_peak`` are bytes beyond what was held, up to the first
    token and after it; ``cache_bytes`` is what MLX's allocator keeps for reuse at the end.
    """

    def __init__(self) -> None:
        mx.synchronize()
        mx.clear_cache()
        self._held = mx.get_active_memory()
        self._began = self._first = self._last = 0.0
        self.prefill_peak = self.decode_peak = self.cache_bytes = 0

    def start(self) -> None:
        """The generation begins."""
        mx.reset_peak_memory()
        self._began = time.perf_counter()

    def token(self) -> None:
        """A token has come."""
        self._last = time.perf_counter()
        if not self._first:
            self._first = self._last
            self.prefill_peak = mx.get_peak_memory() - self._held
            mx.reset_peak_memory()

    def stop(self) -> None:
        """The last token has come; what is still in flight belongs to this generation."""
        # Read before waiting: a pass in flight is part of decoding, whatever becomes of it.
        mx.synchronize()
        self.decode_peak = max(mx.get_peak_memory(), mx.get_active_memory()) - self._held
        self.cache_bytes = mx.get_cache_memory()

    @property
    def first_seconds(self) -> float:
        """Time to the first token."""
        return self._first - self._began

    @property
    def decode_seconds(self) -> float:
        """Time from the first token to the last."""
        return self._last - self._first
