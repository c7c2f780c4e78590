"""Storage and summation in float64, in other dtypes, and on hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mha_spec import InputError

UNFUSED = ("unfused", "unfused-scores")
"""IEEE 754 with each operation of norms, RoPE and gates rounded to the dtype of the inputs, as in
modules of transformers; and also with each operation on scores rounded, as in its eager attention.
"""

TENSIX = ("tensix", "tensix-hifi2", "tensix-bfloat8_b", "tensix-hifi2-bfloat8_b")
"""Tenstorrent's arithmetic: HiFi4 or HiFi3; HiFi2; weights and cache in bfloat8_b; and both."""

MANTISSA = {
    "ieee": 23,
    **dict.fromkeys(UNFUSED, 23),
    **dict.fromkeys(TENSIX, 10),
    "tensix-lofi": 10,
    "tf32": 10,
    "bfloat16": 7,
    "lofi": 4,
}
"""Explicit bits of a float32 mantissa that enter a matrix product, by hardware and settings."""

OPERANDS = {"hifi2": (6, 9), "lofi": (6, 4)}
"""Explicit bits of the first and second operand of a product, at a low math fidelity of
Tenstorrent.

Measured on the real kernels in a simulator (ttsim, Blackhole, float32 sums), relative L2 of
products of 64 and 512 normal terms: bfloat16 HiFi2 4.1e-3 and 4.0e-3, LoFi 2.7e-2 and 2.7e-2;
float32 7.2e-3 and 7.2e-3, 3.1e-2 and 3.1e-2. Computed here: 4.2e-3 and 4.3e-3, 2.7e-2 and 2.6e-2;
7.4e-3 and 7.5e-3, 3.2e-2 and 3.1e-2.
"""

SHARED = 16
"""Values of bfloat8_b that share an exponent: neighbors in a row on the device. Each has 7 bits
relative to the largest. Products with such weights are off by 7.7e-3 and 7.6e-3 in ttsim, 64 and
512 terms, at HiFi2 by 8.6e-3 and 8.7e-3; here by 7.9e-3 and 7.7e-3, 8.4e-3 and 8.6e-3.
"""

PRODUCT_MANTISSA: dict[str, int] = dict.fromkeys((*TENSIX, "tensix-lofi"), 10)
"""Explicit bits of each product that enter the sum, if not all do: Tenstorrent's matrix engine also
truncates products to align them.

Measured on the real kernels in a simulator (ttsim, Blackhole, HiFi4, float32 sums), relative L2 of
products of 64 and 512 normal terms: float32 1.19e-3 and 1.15e-3, bfloat16 3.1e-4 and 3.1e-4.
Computed here: 1.12e-3 and 3.8e-4; with whole products 7.9e-4 and 1e-7. HiFi3, which is used on
Wormhole, results in 1.30e-3 and 1.26e-3, 3.2e-4 and 3.1e-4.
"""

ARITHMETICS = ("ieee", *TENSIX)
"""Arithmetic of a backend's hardware: IEEE 754, or the arithmetic of Tenstorrent's matrix engine,
where float32 enters as TF32, also in the softmax. LoFi and the others of `MANTISSA` are never used
as references; they model products of insufficient precision.
"""


@dataclass(frozen=True)
class Arithmetic:
    """Storage and summation.

    `dtype` is the dtype in memory, `wide` the dtype inside a stage; `kind` is the kind of the
    hardware.
    """

    dtype: np.dtype
    kind: str = "ieee"

    def __post_init__(self) -> None:
        if self.kind not in MANTISSA:
            raise InputError("arithmetic", f"be one of {list(MANTISSA)}", arithmetic=self.kind)

    @cached_property
    def wide(self) -> np.dtype:
        """float64 for float64, otherwise float32."""
        if self.dtype == np.float64:
            return self.dtype
        return np.dtype(np.float32)

    def widen(self, x: np.ndarray) -> np.ndarray:
        """Return x, stored in memory, in the dtype of sums."""
        return x.astype(self.dtype, copy=False).astype(self.wide, copy=False)

    def keep(self, x: np.ndarray) -> np.ndarray:
        """Return x, rounded for storage in memory."""
        return x.astype(self.dtype, copy=False)

    def between(self, x: np.ndarray) -> np.ndarray:
        """Return x between two operations on heads: wide, or rounded for storage."""
        if self.kind in UNFUSED:
            return self.keep(x).astype(self.wide)
        return x

    def between_scores(self, x: np.ndarray) -> np.ndarray:
        """Return scores between two operations: wide, or rounded for storage."""
        if self.kind == "unfused-scores":
            return self.between(x)
        return x

    def enter(self, x: np.ndarray) -> np.ndarray:
        """Return wide x as it enters a matrix product: whole, or with a truncated mantissa."""
        return _with_mantissa(x, MANTISSA[self.kind])

    def weight(self, weight: np.ndarray) -> np.ndarray:
        """Return a weight (out, in) as stored."""
        if not self._has_shared_exponents:
            return weight
        return _with_shared_exponents(weight, 0)

    def cached(self, x: np.ndarray) -> np.ndarray:
        """Return keys or values (…, H) as stored in a cache."""
        if not self._has_shared_exponents:
            return x
        return self.keep(_with_shared_exponents(self.widen(x), -1))

    @property
    def _has_shared_exponents(self) -> bool:
        return self.kind.endswith("bfloat8_b") and self.wide != np.float64

    # ---- Products --------------------------------------------------------------------------------

    def matmul(self, a: np.ndarray, b: np.ndarray, start: np.ndarray | float = 0.0) -> np.ndarray:
        """Return the product of wide matrices, (…, m, k) and (…, k, n).

        Its terms are added to `start` one by one. An implementation may sum in any order. This is
        the simplest, with the largest error of the common ones (matrix libraries also start with
        the bias). A better order here would require the same of every implementation. float64 may
        use any order. Large products use BLAS's order plus the noise that it saves.
        """
        if self.wide == np.float64:
            product = self.blas_product(a, b)
            product += start
            return product
        first_bits, second_bits = self._operand_bits
        a, b = _with_mantissa(a, first_bits), _with_mantissa(b, second_bits)
        if not self.is_only_sampled(a, b):
            return self.simplest_product(a, b, start)
        product = self.blas_product(a, b)
        product += self.excess_noise(a, b, product)
        product += start
        return product

    def is_only_sampled(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Return whether a float32 product takes too long in the simplest order."""
        # BLAS cannot truncate the products before it sums them, as a matrix engine does.
        is_truncated = self._product_bits < FLOAT32_BITS
        if self.wide == np.float64 or is_truncated:
            return False
        return multiplications(a, b) > LARGE

    @property
    def takes_whole_operands(self) -> bool:
        """True if all bits of float32 enter matrix products."""
        return MANTISSA[self.kind] == FLOAT32_BITS

    @property
    def _operand_bits(self) -> tuple[int, int]:
        """Explicit bits of the first and second operand that enter a product."""
        for fidelity, bits in OPERANDS.items():
            if f"tensix-{fidelity}" in self.kind:
                return bits
        return MANTISSA[self.kind], MANTISSA[self.kind]

    @property
    def _product_bits(self) -> int:
        """Explicit bits of each product that enter the sum."""
        return PRODUCT_MANTISSA.get(self.kind, FLOAT32_BITS)

    def blas_product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the product in BLAS's order."""
        return a @ b

    def simplest_product(
        self, a: np.ndarray, b: np.ndarray, start: np.ndarray | float
    ) -> np.ndarray:
        """Return the float32 product, summed term by term."""
        b = np.ascontiguousarray(b)  # rows are read one by one
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        total = np.zeros((*batch, a.shape[-2], b.shape[-1]), a.dtype)
        total += start
        term, bits = np.empty_like(total), self._product_bits
        for k in range(a.shape[-1]):
            np.multiply(a[..., :, k, None], b[..., None, k, :], out=term)
            if bits < FLOAT32_BITS:
                total += _with_mantissa(term, bits)
            else:
                total += term
        return total

    def excess_noise(self, a: np.ndarray, b: np.ndarray, product: np.ndarray) -> np.ndarray:
        """Return random rounding errors of the simplest order in excess of the errors of a product.

        They are too many to compute. The error of an element grows with the root of the sum of
        squares of its terms, and with the root of their number. A sample of elements, summed in
        both orders, determines the factor.
        """
        rows, columns = _evenly_spaced(a.shape[-2]), _evenly_spaced(b.shape[-1])
        some_a, some_b = a[..., rows, :], b[..., columns]
        exact = some_a.astype(np.float64) @ some_b.astype(np.float64)
        error_size = _size_of_errors(some_a, some_b)
        is_measured = np.isfinite(exact) & (error_size > 0.0)

        def mean_square(product: np.ndarray) -> float:
            """Return the mean square of the errors of the sample, relative to their size."""
            if not is_measured.any():
                return 0.0
            errors = (product - exact)[is_measured]
            return float(np.mean((errors / error_size[is_measured]) ** 2))

        excess = mean_square(self.simplest_product(some_a, some_b, 0.0))
        excess -= mean_square(product[..., rows[:, None], columns])
        noise = np.random.default_rng(0).standard_normal(product.shape, np.float32)
        noise *= _size_of_errors(a, b)
        noise *= np.float32(math.sqrt(max(excess, 0.0)))
        return noise


FLOAT32_BITS = 23
"""Explicit bits of a float32 mantissa."""

LARGE = 2**25
"""Multiplications in a float32 product above which the simplest order is too slow and only
sampled: NumPy needs about ten milliseconds for that many.
"""

SAMPLED = 32
"""Rows and columns of a large product that are summed in the simplest order, to measure its error:
1,024 elements, whose mean square is known to a few percent.
"""


def multiplications(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of multiplications in the product of matrices (…, m, k) and (…, k, n)."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return math.prod(batch) * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _evenly_spaced(size: int) -> np.ndarray:
    """Return at most `SAMPLED` indices of an axis, from its first to its last."""
    return np.unique(np.linspace(0, size - 1, SAMPLED, dtype=int))


def _size_of_errors(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the error of each element of a float32 product, up to a factor."""
    num_terms = np.sqrt(np.count_nonzero(a, axis=-1, keepdims=True), dtype=np.float32)
    if b.ndim == 2:  # a weight, whose terms have similar sizes
        row_norms = np.linalg.norm(a, axis=-1, keepdims=True)
        return num_terms * row_norms * np.linalg.norm(b, axis=-2, keepdims=True)
    return num_terms * np.sqrt(np.square(a) @ np.square(b))


def _with_shared_exponents(x: np.ndarray, axis: int) -> np.ndarray:
    """Return x in bfloat8_b: with the exponent of the largest of each 16 along an axis."""
    x = np.moveaxis(x, axis, -1)
    size = x.shape[-1]
    num_blocks = -(-size // SHARED)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_blocks * SHARED - size)]
    blocks = np.pad(x, padding).reshape(*x.shape[:-1], num_blocks, SHARED)
    _, exponent = np.frexp(np.abs(blocks).max(axis=-1, keepdims=True))
    # Next to the sign a value has 7 bits, of which the largest value of a block uses the highest.
    step = np.ldexp(np.ones_like(blocks, shape=exponent.shape), exponent - 7)
    rounded = (np.rint(blocks / step) * step).reshape(*x.shape[:-1], num_blocks * SHARED)
    return np.moveaxis(rounded[..., :size], -1, axis)


def _with_mantissa(x: np.ndarray, bits: int) -> np.ndarray:
    """Return float32 values truncated to some explicit bits of their mantissa."""
    lost = FLOAT32_BITS - bits
    if not lost:
        return x
    return (x.astype(np.float32).view(np.uint32) >> lost << lost).view(np.float32)
