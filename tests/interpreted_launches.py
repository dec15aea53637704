"""Launches that go to Triton's interpreter in place of a GPU."""

from __future__ import annotations

from tilewright.codegen.build import load_interpreted


def interpret_launches(monkeypatch, *modules):
    """What `launch` of these modules is asked for runs on the interpreter; the list that the
    kernels' names go to, as they come."""
    names = []

    def launch(spec, grid, values, device):
        names.append(spec.kernel)
        load_interpreted(spec)[grid](**{name: values[name] for name, _ in spec.signature})

    for module in modules:
        monkeypatch.setattr(module, "launch", launch)
    return names
