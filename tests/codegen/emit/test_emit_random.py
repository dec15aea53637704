"""Tests random templates: the emitted kernel and the template agree in every element that they
store."""

import importlib
import random

import pytest
import torch

from tilewright.codegen.build import load_interpreted
from tilewright.codegen.build.interpreter import interpret
from tilewright.codegen.spec import KernelSpec

WIDTH = 8
GRID = 3
HEADER = """
import triton
import triton.language as tl

@triton.jit
def pick(a, b, WAY: tl.constexpr):
    if WAY == 0:
        return a
    result = a + b
    if WAY == 1:
        result = result * 2
    return result

@triton.jit
def halves(value):
    other = value // 2
    value = value % 2
    return other, value
"""


class TemplateWriter:
    """Writes integer kernels with blocks and scalars, constants and run-time numbers, loops, and
    branches."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.stores = 0
        self.fresh = 0

    def scalar(self, names, depth=2):
        choice = self.rng.random()
        if depth == 0 or choice < 0.25:
            return self.rng.choice([*names, "A", "B", "pid", "n", str(self.rng.randint(0, 9))])
        left, right = self.scalar(names, depth - 1), self.scalar(names, depth - 1)
        divisor = self.rng.choice(["A", "B", "4", "WIDTH", "1", "7"])
        return self.rng.choice(
            [
                f"({left} + {right})",
                f"({left} - {right})",
                f"({left} * {self.rng.choice(['A', '3', '1', '0', 'B'])})",
                f"({left} // {divisor})",
                f"({left} % {divisor})",
                f"min({left}, {right})",
                f"tl.maximum({left}, {right})",
                f"pick({left}, {right}, {self.rng.choice(['A', '1', '0'])})",
                f"({left} if A > {self.rng.randint(0, 4)} else {right})",
            ]
        )

    def block(self, scalars, blocks):
        block = self.rng.choice([*blocks, "lane"])
        scalar = self.scalar(scalars, 1)
        return self.rng.choice(
            [
                f"({block} + {scalar})",
                f"({block} * {self.rng.choice(['A', '1', '3'])} + lane)",
                f"(({block} * A) // A)",
                f"({block} % {self.rng.choice(['WIDTH', 'A', '1'])})",
                f"(({scalar} * WIDTH + lane) // {self.rng.choice(['WIDTH', '4'])})",
                f"(({scalar} * WIDTH + lane) % {self.rng.choice(['WIDTH', '4'])})",
                f"tl.where({self.condition(scalars, blocks)}, {block}, lane)",
            ]
        )

    def condition(self, scalars, blocks):
        left = self.rng.choice(["lane", *blocks])
        right = self.rng.choice(["WIDTH", "A", "n", "16", "0", *scalars])
        one = f"({left} {self.rng.choice(['<', '>=', '!=', '=='])} {right})"
        if self.rng.random() < 0.4:
            return f"({one} & (pid {self.rng.choice(['<', '>='])} {self.rng.randint(0, 3)}))"
        return one

    def store(self, scalars, blocks, indent):
        slot, self.stores = self.stores, self.stores + 1
        mask = self.condition(scalars, blocks)
        value = self.block(scalars, blocks)
        pointer = f"out_ptr + (pid * SLOTS + {slot}) * WIDTH + lane"
        return [f"{indent}tl.store({pointer}, {value}, mask={mask})"]

    def statements(self, scalars, blocks, depth, indent):
        lines = []
        for _ in range(self.rng.randint(2, 4)):
            lines += self.statement(scalars, blocks, depth, indent)
        return lines + self.store(scalars, blocks, indent)

    def statement(self, scalars, blocks, depth, indent):
        choice = self.rng.random()
        self.fresh += 1
        name = f"v{self.fresh}"
        if choice < 0.3:
            line = f"{indent}{name} = {self.scalar(scalars)}"
            scalars.append(name)
            return [line]
        if choice < 0.45:
            line = f"{indent}{name} = {self.block(scalars, blocks)}"
            blocks.append(name)
            return [line]
        variables = [scalar for scalar in scalars if not scalar.startswith("step")]
        if choice < 0.55 and variables:
            return [f"{indent}{self.rng.choice(variables)} += {self.scalar(scalars, 1)}"]
        if choice < 0.65:
            line = f"{indent}{name}, w{self.fresh} = halves({self.scalar(scalars, 1)})"
            scalars += [name, f"w{self.fresh}"]
            return [line]
        if depth == 0:
            return self.store(scalars, blocks, indent)
        inner = indent + "    "
        if choice < 0.85:
            test = self.rng.choice(["A == 2", "B > 3", f"{self.scalar(scalars, 1)} > n", "n > 4"])
            yes = self.statements(list(scalars), list(blocks), depth - 1, inner)
            no = self.statements(list(scalars), list(blocks), depth - 1, inner)
            return [f"{indent}if {test}:", *yes, f"{indent}else:", *no]
        count = self.rng.choice(["2", "n % 3", "0, A", "tl.static_range(B)"])
        loop = count if count.startswith("tl.") else f"range({count})"
        step = f"step{self.fresh}"
        body = self.statements([*scalars, step], list(blocks), depth - 1, inner)
        return [f"{indent}for {step} in {loop}:", *body]

    def template(self):
        body = self.statements([], [], 2, "    ")
        parameters = "out_ptr, n, A: tl.constexpr, B: tl.constexpr, "
        parameters += "WIDTH: tl.constexpr, SLOTS: tl.constexpr"
        start = ["    pid = tl.program_id(0)", "    lane = tl.arange(0, WIDTH)"]
        return "\n".join([HEADER, "@triton.jit", f"def kernel({parameters}):", *start, *body, ""])


def stored(kernel, constants, slots, n):
    out = torch.full((GRID * slots * WIDTH,), -77, dtype=torch.int32)
    kernel[(GRID,)](out_ptr=out, n=n, **constants)
    return out


@pytest.mark.parametrize("seed", range(40))
def test_emitted_and_template_agree(seed, tmp_path, monkeypatch):
    writer = TemplateWriter(seed)
    text = writer.template()
    folder = tmp_path / f"random_templates_{seed}"
    folder.mkdir()
    (folder / "template.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    template = importlib.import_module(f"{folder.name}.template").kernel
    rng = random.Random(seed)
    constants = {"A": rng.choice([1, 2, 4]), "B": rng.choice([1, 3, 4]), "WIDTH": WIDTH}
    constants["SLOTS"] = writer.stores
    spec = KernelSpec.make(
        f"{folder.name}.template",
        "kernel",
        constants,
        {"out_ptr": "*i32", "n": "i32"},
        ranges={"n": (0, 9)},
        grid=(GRID,),
    )
    emitted = load_interpreted(spec)
    for n in (0, 5, 9):
        mine = stored(emitted, {}, writer.stores, n)
        assert torch.equal(mine, stored(interpret(template), constants, writer.stores, n)), text
