"""Integer facts about index expressions: bounds, divisibility, exact division, comparisons.

An index is a sympy polynomial over integer symbols. Each symbol has a closed range, a number it is
a multiple of, and expressions it never exceeds. All conclusions hold over the integers; an
operation whose result might not fit its integer type becomes a fresh symbol that is only known to
lie within that type, so nothing is ever concluded from a value that wrapped around.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import sympy

INT_RANGES = {
    "int1": (0, 1),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}

Bounds = tuple[int, int]

# How often a symbol is replaced by an expression that it never exceeds.
_SUBSTITUTION_DEPTH = 2

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


@dataclass(frozen=True)
class Fact:
    """What is known of one symbol: low <= s <= high, s % multiple == 0, s <= each of uppers."""

    low: int
    high: int
    multiple: int = 1
    uppers: tuple[sympy.Expr, ...] = ()


class IndexMath:
    """The symbols of one kernel and what is known of them."""

    def __init__(self) -> None:
        self._facts: dict[sympy.Symbol, Fact] = {}
        self._opaque: dict[tuple, sympy.Symbol] = {}
        self._count = 0

    def symbol(
        self,
        key: tuple | None,
        low: int,
        high: int,
        multiple: int = 1,
        uppers: tuple[sympy.Expr, ...] = (),
    ) -> sympy.Expr:
        """A symbol with these facts; the same `key` gives the same symbol, None a fresh one."""
        if low > high:  # no value at all: assumptions contradict each other, this code never runs
            low, high = high, low
        if low == high:
            return sympy.Integer(low)
        if key is not None and key in self._opaque:
            return self._opaque[key]
        self._count += 1
        created = sympy.Symbol(f"s{self._count}", integer=True)
        self._facts[created] = Fact(low, high, multiple, uppers)
        if key is not None:
            self._opaque[key] = created
        return created

    def unknown(self, dtype: str, multiple: int = 1) -> sympy.Expr:
        """A fresh symbol of which only its integer type and divisibility are known."""
        low, high = INT_RANGES[dtype]
        return self.symbol(None, low, high, multiple)

    def bounds(self, expr: sympy.Expr) -> Bounds:
        """Closed range that contains every value of `expr`."""
        if expr.is_Integer:
            return int(expr), int(expr)
        return self._lowest(expr, _SUBSTITUTION_DEPTH), self._highest(expr, _SUBSTITUTION_DEPTH)

    def _highest(self, expr: sympy.Expr, depth: int) -> int:
        best = sum(high for _, high in map(self._term_bounds, _terms(expr)))
        if depth == 0:
            return best
        for symbol, upper in self._replacements(expr, sign=1):
            best = min(best, self._highest(sympy.expand(expr.xreplace({symbol: upper})), depth - 1))
        return best

    def _lowest(self, expr: sympy.Expr, depth: int) -> int:
        best = sum(low for low, _ in map(self._term_bounds, _terms(expr)))
        if depth == 0:
            return best
        for symbol, upper in self._replacements(expr, sign=-1):
            best = max(best, self._lowest(sympy.expand(expr.xreplace({symbol: upper})), depth - 1))
        return best

    def _replacements(
        self, expr: sympy.Expr, sign: int
    ) -> Iterator[tuple[sympy.Symbol, sympy.Expr]]:
        bounded = [symbol for symbol in expr.free_symbols if self._facts[symbol].uppers]
        linear = _linear_symbols(expr) if bounded else ()
        for symbol in sorted(bounded, key=_name):
            uppers = self._facts[symbol].uppers
            if symbol not in linear:
                continue
            if sign * int(expr.coeff(symbol, 1)) > 0:
                for upper in uppers:
                    yield symbol, upper

    def _term_bounds(self, term: sympy.Expr) -> Bounds:
        coefficient, rest = term.as_coeff_Mul()
        low = high = int(coefficient)
        for base, exponent in rest.as_powers_dict().items():
            if base == 1:
                continue
            fact = self._facts[base]
            for _ in range(int(exponent)):
                corners = [x * y for x in (low, high) for y in (fact.low, fact.high)]
                low, high = min(corners), max(corners)
        return low, high

    def multiple(self, expr: sympy.Expr) -> int:
        """A number that divides every value of `expr`; 0 where the value is always 0."""
        result = 0
        for term in _terms(expr):
            coefficient, rest = term.as_coeff_Mul()
            factor = abs(int(coefficient))
            for base, exponent in rest.as_powers_dict().items():
                if base != 1:
                    factor *= self._facts[base].multiple ** int(exponent)
            result = math.gcd(result, factor)
        return result

    def fit(self, expr: sympy.Expr, dtype: str) -> sympy.Expr:
        """`expr`, or a symbol that stands for it where it might wrap around in `dtype`."""
        low, high = INT_RANGES[dtype]
        expr = sympy.expand(expr)
        least, greatest = self.bounds(expr)
        if low <= least and greatest <= high:
            return expr
        # Wrapping subtracts a power of two, so a power of two keeps dividing.
        multiple = self.multiple(expr)
        return self.symbol(("wrap", dtype, expr), low, high, multiple & -multiple or 1)

    def floordiv(self, expr: sympy.Expr, divisor: sympy.Expr, dtype: str) -> sympy.Expr:
        """`expr // divisor`; exact where the divisible part can be told from a small rest."""
        low, high = self.bounds(expr)
        least, greatest = self.bounds(divisor)
        if low < 0 or least <= 0:  # rounding differs there between Python and the GPU
            return self.unknown(dtype)
        if least == greatest:
            quotient, rest = self._split(expr, least)
            smallest, largest = self.bounds(rest)
            if smallest >= 0 and largest < least:
                return quotient
        return self.symbol(("//", expr, divisor), low // greatest, high // least)

    def mod(self, expr: sympy.Expr, divisor: sympy.Expr, dtype: str) -> sympy.Expr:
        """`expr % divisor`."""
        low, high = self.bounds(expr)
        least, greatest = self.bounds(divisor)
        if low < 0 or least <= 0:
            return self.unknown(dtype)
        if high < least:
            return expr
        if least == greatest:
            _, rest = self._split(expr, least)
            smallest, largest = self.bounds(rest)
            if smallest >= 0 and largest < least:
                return rest
            if self.multiple(expr) % least == 0:
                return sympy.Integer(0)
        multiple = math.gcd(self.multiple(expr), self.multiple(divisor))
        top = min(high, greatest - 1)
        return self.symbol(("%", expr, divisor), 0, top, multiple or 1, (divisor - 1, expr))

    def _split(self, expr: sympy.Expr, divisor: int) -> tuple[sympy.Expr, sympy.Expr]:
        """expr = quotient * divisor + rest, by each term's coefficient."""
        quotient: sympy.Expr = sympy.Integer(0)
        rest: sympy.Expr = sympy.Integer(0)
        for term in _terms(expr):
            coefficient, factor = term.as_coeff_Mul()
            if factor == 1:
                quotient += int(coefficient) // divisor
                rest += int(coefficient) % divisor
            elif int(coefficient) % divisor == 0:
                quotient += int(coefficient) // divisor * factor
            else:
                rest += term
        return quotient, rest

    def _common_multiple(self, left: sympy.Expr, right: sympy.Expr) -> int:
        return math.gcd(self.multiple(left), self.multiple(right)) or 1

    def minimum(self, left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
        if self.decide("<=", left, right):
            return left
        if self.decide("<=", right, left):
            return right
        (low, high), (least, greatest) = self.bounds(left), self.bounds(right)
        key, multiple = ("min", left, right), self._common_multiple(left, right)
        return self.symbol(key, min(low, least), min(high, greatest), multiple, (left, right))

    def maximum(self, left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
        if self.decide(">=", left, right):
            return left
        if self.decide(">=", right, left):
            return right
        (low, high), (least, greatest) = self.bounds(left), self.bounds(right)
        key, multiple = ("max", left, right), self._common_multiple(left, right)
        return self.symbol(key, max(low, least), max(high, greatest), multiple)

    def decide(self, comparison: str, left: sympy.Expr, right: sympy.Expr) -> bool | None:
        """Whether `left comparison right` holds always (True), never (False), or it depends."""
        low, high = self.bounds(sympy.expand(left - right))
        compare = _COMPARE[comparison]
        if comparison in ("==", "!="):
            if low == high == 0:
                return comparison == "=="
            return comparison == "!=" if low > 0 or high < 0 else None
        outcomes = {compare(low, 0), compare(high, 0)}
        return outcomes.pop() if len(outcomes) == 1 else None

    def loop_variable(
        self, start: sympy.Expr, stop: sympy.Expr, step: int, dtype: str
    ) -> sympy.Expr | None:
        """A symbol for the variable of `range(start, stop, step)`; None where it never runs.

        Where `stop - start` and `step` share a divisor g, the variable is at most `stop - g`.
        """
        if step <= 0:
            return self.unknown(dtype)
        gap = math.gcd(step, self.multiple(sympy.expand(stop - start))) or step
        low, high = self.bounds(start)[0], self.bounds(sympy.expand(stop - gap))[1]
        if low > high:
            return None
        multiple = math.gcd(step, self.multiple(start)) or step
        return self.symbol(None, low, high, multiple, (sympy.expand(stop - gap),))

    def relabel(self, expr: sympy.Expr, tag: str) -> sympy.Expr:
        """The same values along other axes (`x[:, None]`): equal facts, different symbols."""
        renamed = {}
        for symbol in sorted(expr.free_symbols, key=_name):
            fact = self._facts[symbol]
            key = ("axes", symbol, tag)
            renamed[symbol] = self.symbol(key, fact.low, fact.high, fact.multiple)
        return expr.xreplace(renamed)

    def assume(self, comparison: str, left: sympy.Expr, right: sympy.Expr, truth: bool) -> None:
        """Tighten one symbol's range by a comparison that is linear in it; others are left."""
        wanted = comparison if truth else _NEGATED[comparison]
        difference = sympy.expand(left - right)
        symbols = _linear_symbols(difference)
        for symbol in sorted(symbols, key=str):
            coefficient = int(difference.coeff(symbol, 1))
            if coefficient not in (1, -1):
                continue
            rest = sympy.expand(difference - coefficient * symbol)
            self._tighten(symbol, coefficient, rest, wanted)

    def _tighten(self, symbol: sympy.Symbol, sign: int, rest: sympy.Expr, comparison: str) -> None:
        """Use `sign * symbol + rest  comparison  0`."""
        slack = {"<": 1, "<=": 0, ">": 1, ">=": 0, "==": 0}.get(comparison)
        if slack is None:
            return
        at_most = comparison in ("<", "<=", "==")
        at_least = comparison in (">", ">=", "==")
        if sign < 0:
            at_most, at_least = at_least, at_most
        limit = -sign * rest
        low, high = self.bounds(limit)
        fact = self._facts[symbol]
        if at_most:
            upper = sympy.expand(limit - slack)
            top = min(fact.high, high - slack)
            fact = replace(fact, high=max(top, fact.low), uppers=(*fact.uppers, upper))
        if at_least:
            fact = replace(fact, low=min(max(fact.low, low + slack), fact.high))
        self._facts[symbol] = fact

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is assumed inside is forgotten outside; symbols made inside stay known."""
        facts, opaque = dict(self._facts), dict(self._opaque)
        try:
            yield
        finally:
            self._facts.update(facts)
            self._opaque = opaque

    def freeze(self, expr: sympy.Expr) -> sympy.Expr:
        """A fresh symbol with the bounds `expr` has here: it may leave a scope."""
        low, high = self.bounds(expr)
        return self.symbol(None, low, high, self.multiple(expr) or 1)

    def hull(self, left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
        """A fresh symbol for a value that is either of the two."""
        if left == right:
            return left
        (low, high), (least, greatest) = self.bounds(left), self.bounds(right)
        multiple = self._common_multiple(left, right)
        return self.symbol(None, min(low, least), max(high, greatest), multiple)


def _name(symbol: sympy.Symbol) -> str:
    return str(symbol.name)


def _terms(expr: sympy.Expr) -> tuple[sympy.Expr, ...]:
    return sympy.Add.make_args(expr)


def _linear_symbols(expr: sympy.Expr) -> set[sympy.Symbol]:
    """Symbols that occur in exactly one term of `expr`, alone with a number."""
    counts: dict[sympy.Symbol, int] = {}
    linear = set()
    for term in _terms(expr):
        for symbol in term.free_symbols:
            counts[symbol] = counts.get(symbol, 0) + 1
        factor = term.as_coeff_Mul()[1]
        if factor.is_Symbol:
            linear.add(factor)
    return {symbol for symbol in linear if counts[symbol] == 1}
