"""Matrix products in C++ (native/products.h) with weights prepacked in panels of 32 outputs.

MKL, PyTorch's default in float32, repacks a weight at every call, and is slow on AMD processors. These products are 1.3
to 1.7 times as fast as oneDNN with prepacked weights at 8 to 32 rows, the sizes of trees and batches, and no slower at
other sizes (AVX-512). A row has the same bits at every number of rows.

In a float32 model, weights that are exact in bfloat16 are stored in bfloat16 and widened in registers: a step of few
rows is bound by reading weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lpr import native
from lpr.model.cpu.memory import in_huge_pages
from lpr.model.threads import team_size

PANEL = 32
DEPTH = 32  # inputs that a core's matrix unit multiplies at a time
_ALONE = 1 << 18  # most multiplications of a product that runs on the calling thread alone

DTYPES = torch.float32, torch.bfloat16  # of rows
Address = tuple[int, int, int, int, int, int]
"""For native.DecoderLayer: addresses of a weight and its bias (0: no bias), the numbers of outputs, inputs and bits
(1: codes), and the address of an int8 weight's scales or of the form of codes (0: none)."""


def can_tile(dtype: torch.dtype, num_inputs: int) -> bool:
    """True if the processor has the instructions."""
    if native.can_tile is None or dtype not in DTYPES:
        return False
    return native.can_tile() and not (dtype is torch.bfloat16 and num_inputs % 2)


class Panels:
    """A weight in panels of PANEL outputs."""

    bits: int  # as an Address has them
    dtypes: tuple[torch.dtype, ...] = DTYPES  # of rows
    aside: Tensor | None = None  # what an address has last: scales of outputs, or the form of codes

    def __init__(self, panels: Tensor, num_outputs: int, num_inputs: int) -> None:
        self._panels, self.num_outputs, self.num_inputs = in_huge_pages(panels), num_outputs, num_inputs

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes

    def address(self, bias: Tensor | None) -> Address:
        """The addresses and sizes of the weight and of `bias` [outputs] in float32."""
        places = [0 if each is None else each.data_ptr() for each in (self._panels, bias, self.aside)]
        return places[0], places[1], self.num_outputs, self.num_inputs, self.bits, places[2]

    def multiply(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """The product [..., outputs] of `given` [..., inputs], plus `bias` [outputs] in float32."""
        if given.dtype not in self.dtypes or given.shape[-1] != self.num_inputs:
            weight = f"a weight of {self.num_inputs} inputs, for {', '.join(map(str, self.dtypes))}"
            raise TypeError(f"{given.dtype} {[*given.shape]} is multiplied by {weight}")
        return multiply_at(self.address(bias), given)


class Tiles(Panels):
    """A weight of floats, as it is."""

    def __init__(self, weight: Tensor) -> None:
        """Pack `weight` [outputs, inputs], of a dtype and size that `can_tile` allows."""
        num_outputs, num_inputs = weight.shape
        self.dtypes = (weight.dtype,)
        assert native.can_use_amx is not None
        more = -num_inputs % DEPTH if weight.dtype is torch.bfloat16 and native.can_use_amx() else 0
        weight = _halves(weight)
        self.bits = 8 * weight.itemsize
        whole = F.pad(weight, (0, more, 0, -num_outputs % PANEL)).view(-1, PANEL, num_inputs + more)
        pairs = whole.view(torch.int32).transpose(1, 2)  # copied as words of 4 bytes: 5 times as fast as in twos
        super().__init__(pairs, num_outputs, num_inputs)
        self._panels = self._panels.view(whole.dtype).unflatten(2, (PANEL, 4 // weight.itemsize))

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        whole = self._panels.transpose(1, 2).flatten(2).flatten(0, 1)[: self.num_outputs, : self.num_inputs]
        return whole.to(dtype).contiguous()


def multiply_at(address: Address, given: Tensor) -> Tensor:
    """The product [..., outputs] of `given` [..., inputs] with the weight at `address`."""
    _, _, num_outputs, num_inputs, *_ = address
    given = given.contiguous()
    out = given.new_empty(*given.shape[:-1], num_outputs)
    rows = given.numel() // num_inputs
    assert native.multiply_tiles is not None
    native.multiply_tiles(
        address, given.data_ptr(), out.data_ptr(), rows, given.dtype is torch.bfloat16,
        team_size() if rows * num_outputs * num_inputs > _ALONE else 1,
    )  # fmt: skip
    return out


def _halves(weight: Tensor) -> Tensor:
    """`weight` in bfloat16 if that changes no value and the number of inputs is even; else `weight` itself."""
    half = weight.bfloat16()
    return half if weight.shape[1] % 2 == 0 and torch.equal(half.to(weight.dtype), weight) else weight
