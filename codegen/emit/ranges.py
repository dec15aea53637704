"""Facts that the emitter knows about integers: the bounds of an integer, a number that divides it,
and the scalars that it does not exceed.

All conclusions are about mathematical integers, which have no largest number. If a result might not
fit its integer type, it may be any number of that type. Therefore no conclusion depends on a value
that wrapped around.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

INT_RANGES = {
    f"{sign}int{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for bits in (8, 16, 32, 64)
    for sign in ("", "u")
} | {"int1": (0, 1)}

Comparison = Callable[[int, int], bool]
_NEGATED: dict[Comparison, Comparison] = {
    operator.lt: operator.ge,
    operator.le: operator.gt,
    operator.gt: operator.le,
    operator.ge: operator.lt,
    operator.eq: operator.ne,
    operator.ne: operator.eq,
}
#: Maps a comparison to the equivalent comparison with swapped operands.
MIRRORED: dict[Comparison, Comparison] = {
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
    operator.eq: operator.eq,
    operator.ne: operator.ne,
}
# The bound of an unknown range. No integer type has numbers of this size.
_ANY = 2**64


@dataclass(frozen=True, eq=False)
class Range:
    """The values that one integer, or each element of a block, may have. Expressions that share a
    Range object have the same value.

    Attributes:
        low, high: The least and the greatest possible value.
        multiple: A number that divides every possible value; 0 if the value is always 0.
        limits: Maps the range of a scalar to a number. The value is at most the sum of the scalar
            and this number.
    """

    low: int
    high: int
    multiple: int = 1
    limits: Mapping[Range, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, dtype: str) -> Range:
        """Returns the range of all numbers of an integer type."""
        return cls(*INT_RANGES[dtype])

    @classmethod
    def constant(cls, number: int) -> Range:
        return cls(number, number, abs(number))

    @property
    def is_constant(self) -> bool:
        return self.low == self.high

    def fit(self, dtype: str) -> Range:
        """Returns the range of the value as a `dtype`. If the value might wrap around, it may be
        any number of the type, but each power of two that divides the value is still a divisor."""
        low, high = INT_RANGES[dtype]
        if low <= self.low and self.high <= high:
            return self
        # Wrapping around adds a multiple of 2 ** bits. Powers of two that divide the value still
        # divide the sum.
        return Range(low, high, self.multiple & -self.multiple or 1)

    def limited(self, other: Range, offset: int = 0) -> Range:
        """Returns the range of a value that is also at most the scalar `other` plus `offset`."""
        limits = _least(self.limits, {other: offset}, other._below(offset))
        return replace(self, limits=limits)

    def _below(self, offset: int) -> dict[Range, int]:
        """Returns the limits of a number that is at most the sum of this value and `offset`."""
        return {scalar: least + offset for scalar, least in self.limits.items()}

    def __add__(self, other: Range) -> Range:
        multiple = math.gcd(self.multiple, other.multiple)
        limits = _least(self._below(other.high), other._below(self.high))
        return Range(self.low + other.low, self.high + other.high, multiple, limits)

    def __sub__(self, other: Range) -> Range:
        multiple = math.gcd(self.multiple, other.multiple)
        low, high = self.low - other.high, self.high - other.low
        return Range(low, high, multiple, self._below(-other.low))

    def __mul__(self, other: Range) -> Range:
        corners = [x * y for x in (self.low, self.high) for y in (other.low, other.high)]
        return Range(min(corners), max(corners), self.multiple * other.multiple)

    def __floordiv__(self, divisor: Range) -> Range:
        # Python and the GPU round negative quotients differently.
        if self.low < 0 or divisor.low <= 0:
            return _UNKNOWN
        exact = divisor.is_constant and self.multiple % divisor.low == 0
        multiple = self.multiple // divisor.low if exact else 1
        return Range(self.low // divisor.high, self.high // divisor.low, multiple)

    def __mod__(self, divisor: Range) -> Range:
        """Returns the range of the remainder. If the dividend is always smaller than the divisor,
        returns the dividend's own Range object."""
        if self.low < 0 or divisor.low <= 0:
            return _UNKNOWN
        if self.high < divisor.low:
            return self
        if divisor.is_constant and self.multiple % divisor.low == 0:
            return Range.constant(0)
        multiple = math.gcd(self.multiple, divisor.multiple)
        return Range(0, min(self.high, divisor.high - 1), multiple, self.limits)

    def minimum(self, other: Range) -> Range:
        """Returns the range of the smaller number. If one of the two numbers is always smaller,
        returns the Range object of that number."""
        for one, another in ((self, other), (other, self)):
            if one.compares(operator.le, another):
                return one
        low, high = min(self.low, other.low), min(self.high, other.high)
        return Range(low, high, math.gcd(self.multiple, other.multiple))

    def maximum(self, other: Range) -> Range:
        """Returns the range of the larger number. If one of the two numbers is always larger,
        returns the Range object of that number."""
        for one, another in ((self, other), (other, self)):
            if one.compares(operator.ge, another):
                return one
        low, high = max(self.low, other.low), max(self.high, other.high)
        return Range(low, high, math.gcd(self.multiple, other.multiple))

    def joined(self, other: Range) -> Range:
        """Returns the range of a value that equals either this value or `other`."""
        multiple = math.gcd(self.multiple, other.multiple)
        return Range(min(self.low, other.low), max(self.high, other.high), multiple)

    def compares(self, comparison: Comparison, other: Range) -> bool | None:
        """Returns True if `comparison` with `other` always holds, False if it never does, and None
        if it depends on the values."""
        low, high = self.low - other.high, self.high - other.low
        if other is self:
            low = high = 0
        high = min(high, self.limits.get(other, high))
        low = max(low, -other.limits.get(self, -low))
        outcomes = {comparison(end, 0) for end in (low, high)}
        return outcomes.pop() if len(outcomes) == 1 and not low < 0 < high else None

    def given(self, comparison: Comparison, other: Range, truth: bool) -> Range:
        """Returns the range of this scalar in code where a comparison with `other` is known to
        hold. If `truth` is False, the comparison is known not to hold."""
        wanted = comparison if truth else _NEGATED[comparison]
        low, high, known = self.low, self.high, self
        if wanted in (operator.lt, operator.le, operator.eq):
            slack = int(wanted is operator.lt)
            high, known = min(high, other.high - slack), self.limited(other, -slack)
        if wanted in (operator.gt, operator.ge, operator.eq):
            low = max(low, other.low + int(wanted is operator.gt))
        # If no number is left, this code never runs.
        return replace(known, low=low, high=high) if low <= high else self


_UNKNOWN = Range(-_ANY, _ANY)


def _least(*limits: Mapping[Range, int]) -> dict[Range, int]:
    """Joins several limits: keeps the least number for each scalar."""
    found: dict[Range, int] = {}
    for some in limits:
        for scalar, least in some.items():
            found[scalar] = min(least, found.get(scalar, least))
    return found


def loop_range(start: Range, stop: Range, step: int) -> Range | None:
    """Returns the range of the variable of `range(start, stop, step)`, for a positive step; None if
    the loop never runs.

    If `stop - start` and `step` share a divisor g, the variable is at most `stop - g`.
    """
    gap = math.gcd(step, (stop - start).multiple) or step
    if start.low > stop.high - gap:
        return None
    multiple = math.gcd(step, start.multiple) or step
    return Range(start.low, stop.high - gap, multiple).limited(stop, -gap)
