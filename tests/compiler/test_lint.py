"""Tests that each check of a rewritten site refuses a graph with the fault that it is for."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from tilewright.compiler.safety.lint import LintError, check_site


class Site:
    """A site after its rewrite: `fused` writes `cache`, and `result` replaces `old`."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.cache = self.graph.placeholder("x"), self.graph.placeholder("cache")
        self.old = self.graph.call_function(torch.neg, (self.x,))
        self.write = self.graph.call_function(torch.neg, (self.old,))
        self.fused = self.graph.call_function(torch.add, (self.x, self.cache))
        self.result = self.graph.call_function(operator.getitem, (self.fused, 0))
        self.user = self.graph.call_function(torch.abs, (self.result,))
        self.graph.output(self.user)
        for node in (self.old, self.result):
            node.meta["example_value"] = torch.empty(2, 3)
        self.graph.erase_node(self.write)

    def check(self) -> None:
        memory = SimpleNamespace(root=self.cache)
        write = SimpleNamespace(node=self.write, store=SimpleNamespace(memory=memory))
        check_site(SimpleNamespace(stores=[write]), self.fused, [(self.old, self.result)])


def operand_later(site: Site) -> None:
    site.user.append(late := site.graph.call_function(torch.neg, (site.cache,)))
    site.fused.args = (late, site.cache)


def user_earlier(site: Site) -> None:
    site.fused.prepend(site.user)


def cache_not_written(site: Site) -> None:
    site.fused.args = (site.x, site.x)


def write_left(site: Site) -> None:
    site.write._erased = False


FAULTS = {
    operand_later: "add uses neg_. before it is computed",
    user_earlier: "abs_1 uses getitem before it is computed",
    cache_not_written: "add writes set.., but the match writes {cache}",
    write_left: "neg_1 still writes what add writes",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_site_is_refused(fault) -> None:
    site = Site()
    site.check()
    fault(site)
    with pytest.raises(LintError, match=FAULTS[fault]):
        site.check()


@pytest.mark.parametrize(
    "other",
    [
        torch.empty(3, 2),
        torch.empty(2, 3, dtype=torch.bfloat16),
        torch.empty(2, 3, device="meta"),
        (torch.empty(2, 3),),
    ],
    ids=["shape", "dtype", "device", "kind"],
)
def test_a_result_is_a_tensor_like_the_one_that_it_replaces(other) -> None:
    site = Site()
    site.result.meta["example_value"] = other
    with pytest.raises(LintError, match=r"(?s)getitem is .*, expected .* for neg"):
        site.check()
