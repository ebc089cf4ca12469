"""The one copy of a step that comes down from the device, and the wait for it."""

from __future__ import annotations

import torch


class Download:
    """Words of the device on the host, in pinned places made once: nothing is allocated, staged or copied twice."""

    def __init__(self) -> None:
        """Nothing has come down yet."""
        self._places = [torch.empty(0, dtype=torch.int32)] * 2

    def read(self, words: torch.Tensor) -> torch.Tensor:
        """`words` (int32, any shape, on any device) on the host, once the device has made them.

        What is returned holds until the call after the next one; words that are on the host already are returned as
        they are.
        """
        if words.device.type != "cuda":
            return words.cpu()
        self._places.reverse()
        if self._places[0].numel() < words.numel():
            self._places[0] = torch.empty(words.numel(), dtype=words.dtype).pin_memory()
        place = self._places[0][: words.numel()].view(words.shape)
        place.copy_(words, non_blocking=True)
        torch.cuda.current_stream(words.device).synchronize()
        return place
