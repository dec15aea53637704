"""Tests the removal of copies and dead statements: random programs compute the same results before
and after."""

import ast
import random

import pytest

from tilewright.codegen.emit.layout import unparse
from tilewright.codegen.emit.tidy import tidied

PARAMETERS = ["p", "q"]


class Writer:
    """Writes random programs that never read a name that may be undefined."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.fresh = 0

    def expression(self, names):
        kind = self.rng.random()
        name = self.rng.choice(names)
        if kind < 0.45:
            return name
        if kind < 0.6:
            return str(self.rng.randint(0, 3))
        return f"{name} {self.rng.choice(['+', '*', '-'])} {self.rng.choice([*names, '2'])}"

    def target(self, names):
        if self.rng.random() < 0.5:
            self.fresh += 1
            return f"t_{self.fresh}"
        own = [name for name in names if name not in PARAMETERS]
        return self.rng.choice(own) if own else "t"

    def round_trip(self, names):
        """Writes a copy, a statement that may change the copy or read its source, and a copy
        back."""
        own = [name for name in names if name not in PARAMETERS]
        if not own:
            return []
        self.fresh += 1
        copy, name = f"t_{self.fresh}", self.rng.choice(own)
        between = [f"{copy} += {self.expression([copy, *PARAMETERS])}"]
        if self.rng.random() < 0.5:
            between.append(f"out.store({self.expression([copy, *names])})")
        names += [copy] if self.rng.random() < 0.3 else []
        return [f"{copy} = {name}", *between, f"{name} = {copy}"]

    def block(self, names, depth):
        """Returns (lines, the names that are defined after them)."""
        names, lines = list(names), []
        for _ in range(self.rng.randint(2, 5)):
            kind = self.rng.random()
            if kind < 0.5 or depth == 0:
                value, target = self.expression(names), self.target(names)
                lines.append(f"{target} = {value}")
                names += [target] if target not in names else []
            elif kind < 0.6:
                own = [name for name in names if name not in PARAMETERS]
                lines += [f"{self.rng.choice(own)} += {self.expression(names)}"] if own else []
            elif kind < 0.65:
                lines += self.round_trip(names)
            elif kind < 0.7:
                lines.append(f"out.store({self.expression(names)})")
            elif kind < 0.85:
                yes, after_yes = self.block(names, depth - 1)
                no, after_no = self.block(names, depth - 1)
                lines.append(f"if {self.expression(names)} > {self.rng.randint(0, 4)}:")
                lines += [f"    {line}" for line in yes]
                lines.append("else:")
                lines += [f"    {line}" for line in no]
                names = [name for name in after_yes if name in after_no]
            else:
                self.fresh += 1
                counter = f"i_{self.fresh}"
                body, _ = self.block([*names, counter], depth - 1)
                lines.append(f"for {counter} in range({self.rng.randint(0, 3)}):")
                lines += [f"    {line}" for line in body]
        lines.append(f"out.store({self.expression(names)})")
        return lines, names


class Record(list):
    def store(self, value):
        self.append(value % 1009)


def run(text, p, q):
    out = Record()
    exec(text, {}, {"out": out, "p": p, "q": q})
    return out


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_programs_store_the_same(first):
    shorter = 0
    for seed in range(first, first + 50):
        text = "\n".join(Writer(seed).block(PARAMETERS, 3)[0])
        body = tidied(ast.parse(text).body, PARAMETERS)
        cleaned = unparse(ast.Module(body, []))
        for p, q in ((0, 1), (3, 2), (5, -1)):
            assert run(cleaned, p, q) == run(text, p, q), f"{text}\n---\n{cleaned}"
        shorter += len(cleaned.split("\n")) < len(text.split("\n"))
    assert shorter > 25  # the pass does remove statements


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x_1 = p + 1\nx = x_1\nout.store(x)", "x = p + 1\nout.store(x)"),
        ("x = 0\nx = p\nout.store(x)", "out.store(p)"),
        ("x = p + 1\ny = x * 2\nout.store(p)", "out.store(p)"),
        # y holds the value that x had in the previous iteration, so the copy stays.
        (
            "x = p\nfor i in range(3):\n    y = x\n    x = x + y\n    out.store(y)",
            "x = p\nfor i in range(3):\n    y = x\n    x = x + y\n    out.store(y)",
        ),
        # A copy is changed and copied back, so all changes can be made to x itself.
        ("x = p + 1\ny = x\ny *= q\nx = y\nout.store(x)", "x = p + 1\nx *= q\nout.store(x)"),
        (
            "x = p + 1\nfor i in range(3):\n    y = x\n    y *= i\n    x = y\nout.store(x)",
            "x = p + 1\nfor i in range(3):\n    x *= i\nout.store(x)",
        ),
        # The two variables must stay apart if x is read in between, or if y is read afterwards.
        (
            "x = p + 1\ny = x\ny *= q\nout.store(x)\nx = y\nout.store(x)",
            "x = p + 1\ny = x\ny *= q\nout.store(x)\nx = y\nout.store(x)",
        ),
        (
            "x = p + 1\ny = x\ny *= q\nx = y\nx += 1\nout.store(x * y)",
            "x = p + 1\ny = x\ny *= q\nx = y\nx += 1\nout.store(x * y)",
        ),
        # The statement is kept for its effect, although nothing reads its result.
        ("x = tl.atomic_add(p, 1)", "x = tl.atomic_add(p, 1)"),
        ("x = tl.load(p)", ""),
        ("if p > 1:\n    x = 2\nelse:\n    out.store(q)", "if not p > 1:\n    out.store(q)"),
    ],
)
def test_known_answers(before, after):
    body = tidied(ast.parse(before).body, PARAMETERS)
    assert unparse(ast.Module(body, [])) == after


@pytest.mark.parametrize(
    "text",
    [
        "value = function_name(" + ", ".join(f"argument_{i}" for i in range(20)) + ")",
        "value = outer(inner_one(" + ", ".join(f"a{i}[:, None]" for i in range(15)) + "), key='x')",
        "for index in tl.range(" + ", ".join(f"long_name_{i}" for i in range(9)) + "):\n    pass",
        "def f(" + ", ".join(f"parameter_{i}: tl.int32" for i in range(12)) + "):\n    pass",
        "x = '" + "no brackets at all " * 8 + "'",
    ],
)
def test_long_lines_are_broken_without_changing_them(text):
    tree = ast.parse(text)
    printed = unparse(tree)
    assert ast.dump(ast.parse(printed)) == ast.dump(tree)
    assert max(map(len, printed.split("\n"))) <= 100 or "no brackets" in text
