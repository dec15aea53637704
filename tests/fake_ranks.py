"""Makes this process the first of two ranks, without the second rank. torch's fake process group
transfers nothing."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

#: Holds the mesh of both ranks while the fixture is in use.
MESH: list[object] = []


@pytest.fixture(scope="module")
def two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    MESH[:] = [init_device_mesh("cpu", (2,))]
    yield
    dist.destroy_process_group()
