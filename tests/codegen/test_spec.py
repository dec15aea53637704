"""Tests that targets and kernel specs are canonical, hashable, and checked when they are made."""

import dataclasses
from types import SimpleNamespace

import pytest

from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import (
    INTERPRET,
    PRODUCTS,
    SM90,
    SM100,
    TARGETS,
    detect_target,
    get_target,
    gpu_targets,
    key_of,
)

ARGUMENTS = {
    "template": "fp4",
    "kernel": "project",
    "constants": {"B": 1, "A": 2.5, "S": None, "T": "half"},
    "signature": {"x": "*bf16", "n": "i32", "d": "tensordesc<bf16[128, 64]>"},
    "divisible16": ["x"],
    "ranges": {"n": (1, 16)},
    "grid": (3, 2),
}


def test_json_round_trip_and_names():
    spec = KernelSpec.make(**ARGUMENTS)
    assert KernelSpec.from_json(spec.to_json()) == spec
    assert spec.name == f"project_{spec.hash[:12]}"
    assert spec.name.isidentifier()
    assert spec.module == "tilewright.codegen.templates.fp4"
    assert spec.constant("A") == 2.5
    with pytest.raises(KeyError, match="no constant 'Z'"):
        spec.constant("Z")


def test_a_template_is_a_familys_or_any_other_module():
    modules = {"qkv.epilogue": "tilewright.codegen.qkv.templates.epilogue", "mine": "mine"}
    for template, module in (modules | {"my.own.module": "my.own.module"}).items():
        assert KernelSpec.make(**ARGUMENTS | {"template": template}).module == module


def test_order_of_constants_does_not_matter_but_types_do():
    spec = KernelSpec.make(**ARGUMENTS)
    reordered = dict(reversed(ARGUMENTS["constants"].items()))
    assert KernelSpec.make(**{**ARGUMENTS, "constants": reordered}) == spec
    assert len({spec, KernelSpec.make(**{**ARGUMENTS, "constants": reordered})}) == 1
    flag = {**ARGUMENTS["constants"], "B": True}
    assert KernelSpec.make(**{**ARGUMENTS, "constants": flag}) != spec
    swapped = dict(reversed(ARGUMENTS["signature"].items()))
    assert KernelSpec.make(**{**ARGUMENTS, "signature": swapped}) != spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "no good"}, "kernel: expected a Python identifier"),
        ({"template": "a b"}, "template: expected a Python identifier"),
        (
            {"constants": {"A": [1]}},
            r"constants\['A'\]: expected int, float, bool, str, None or a tuple",
        ),
        ({"constants": {"A": float("nan")}}, r"constants\['A'\]: expected a finite float"),
        ({"constants": {"n": 1}}, r"distinct names, got \['n'\] twice"),
        ({"signature": {"x": "*bf17", "n": "i32"}}, r"signature\['x'\]: expected a Triton type"),
        ({"divisible16": ["y"]}, "divisible16: 'y' is not a pointer or integer"),
        ({"divisible16": ["d"]}, "divisible16: 'd' is not a pointer or integer"),
        ({"ranges": {"x": (0, 1)}}, "ranges: 'x' is not an integer"),
        ({"ranges": {"n": (2, 1)}}, r"ranges\['n'\]: expected low <= high, got 2 > 1"),
        ({"num_warps": 3}, "num_warps: expected a power of two, got 3"),
        ({"num_stages": 0}, "num_stages: expected at least 1, got 0"),
        ({"target": "sm70"}, "target: expected one of"),
        ({"grid": (0,)}, "grid: expected one to three positive extents"),
        ({"grid": (2, 0)}, "grid: expected one to three positive extents"),
        ({"grid": ()}, "grid: expected one to three positive extents"),
        ({"grid": (1, 1, 1, 1)}, "grid: expected one to three positive extents"),
    ],
)
def test_bad_input_is_named(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        KernelSpec.make(**{**ARGUMENTS, **changes})


@pytest.mark.parametrize("grid", [None, (1,), (2, 3), (4, 1, 5)])
def test_a_grid_has_one_to_three_extents(grid):
    assert KernelSpec.make(**{**ARGUMENTS, "grid": grid}).grid == grid


def test_json_of_another_version_is_refused():
    with pytest.raises(ValueError, match="expected the fields"):
        KernelSpec.from_json('{"kernel": "k"}')


def test_targets():
    assert (TARGETS["sm100"], TARGETS["sm90"], TARGETS["interpret"]) == (SM100, SM90, INTERPRET)
    assert [target.name for target in gpu_targets()] == [
        *("sm100", "sm103", "sm120", "sm90", "sm89", "sm86", "sm80")
    ]
    assert all(target.name == name for name, target in TARGETS.items())
    assert (SM100.arch, SM90.arch) == (100, 90)
    assert SM100.has("tcgen05")
    assert not SM90.has("tcgen05")
    assert (SM100.mma_opcode("bf16"), SM90.mma_opcode("bf16")) == ("UTCHMMA", "HGMMA")
    assert SM100.flops_per_s("nvfp4") > 3 * SM100.flops_per_s("bf16")
    with pytest.raises(ValueError, match="has rates for"):
        SM90.flops_per_s("nvfp4")
    with pytest.raises(ValueError, match="feature: expected one of"):
        SM90.has("warp_drive")
    with pytest.raises(ValueError, match="target: expected one of"):
        get_target("sm70")
    with pytest.raises(ValueError, match="features: expected names"):
        dataclasses.replace(SM90, features=frozenset({"warp_drive"}))
    with pytest.raises(ValueError, match="families: expected names"):
        dataclasses.replace(SM90, families=frozenset({"moes"}))


def test_records_of_chips_agree_with_each_other():
    for target in gpu_targets():
        major, minor = target.capability
        assert target.name == f"sm{major}{minor}"
        assert target.sm_name.removesuffix("a") == f"sm_{major}{minor}"
        assert target.has("tma") is target.has("dependent_launch") is (major >= 9)
        assert target.has("tcgen05") is (target.tmem_columns > 0)
        assert target.has("fp8") is ("fp8e4nv" in dict(target.flops))
        assert set(dict(target.mma_opcodes)) == set(dict(target.flops)) - {"fp32"}
        assert (target.measured, target.complete) == (target is SM90, major in (9, 10))
        assert not target.multiplies_registers or not target.has("wgmma")
        # Each multiprocessor has 700 ns of the memory's rate in flight.
        needed = 700e-9 * target.hbm_bytes_per_s / target.num_sms
        assert 0.8 < target.bytes_in_flight_per_sm / needed < 1.3, target.name


@pytest.mark.parametrize(("capability", "hip", "name"), [
    ((9, 0), None, "sm90"), ((10, 0), None, "sm100"), ((10, 3), None, "sm103"),
    ((12, 0), None, "sm120"), ((12, 1), None, None), ((8, 6), None, "sm86"), ((7, 5), None, None),
    ((9, 0), "6.4", None),  # torch reports this for some GPUs of AMD
])  # fmt: skip
def test_a_gpu_has_the_record_of_its_very_capability(capability, hip, name, monkeypatch):
    torch = pytest.importorskip("torch")
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=7)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = detect_target(0)
    assert found == (name and dataclasses.replace(get_target(name), num_sms=7))


@pytest.mark.parametrize(("clock", "width", "rate"), [
    (2_619_000, 5120, 2.95e12),  # H100 SXM
    (3_201_000, 6144, 4.3e12),  # H200
    (0, 0, 4.3e12),  # an older torch does not say
])  # fmt: skip
def test_a_gpu_has_the_memory_rate_of_its_product(clock, width, rate, monkeypatch):
    """H100 and H200 have one compute capability and one record, but other memory."""
    torch = pytest.importorskip("torch")
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        memory_clock_rate=clock,
        memory_bus_width=width,
    )
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = detect_target(0)
    assert found is not None
    assert found.hbm_bytes_per_s == pytest.approx(rate, rel=1e-3)
    needed = 700e-9 * found.hbm_bytes_per_s / found.num_sms
    assert 0.8 < found.bytes_in_flight_per_sm / needed < 1.3


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_its_own_rates(name):
    """A product has the kernels of its target, and its own rates. Its key names the same rates."""
    record = get_target(name.upper())
    assert get_target(key_of(record)) is record
    needed = 700e-9 * record.hbm_bytes_per_s / record.num_sms
    assert 0.8 < record.bytes_in_flight_per_sm / needed < 1.3
    own = {"product", "num_sms", "hbm_bytes_per_s", "bytes_in_flight_per_sm", "flops", "l2_bytes"}
    changed = dataclasses.asdict(record).items() - dataclasses.asdict(TARGETS[record.name]).items()
    assert {field for field, _ in changed} <= own


def test_no_two_products_have_one_name():
    """The name of a product says whose rates a report shows."""
    names = {record.product for record in (*PRODUCTS.values(), *gpu_targets())}
    assert len(names) == len({id(record) for record in (*PRODUCTS.values(), *gpu_targets())})


@pytest.mark.parametrize(("name", "num_sms", "rate", "key"), [
    ("sm90", 132, 2.95e12, "h100"), ("sm90", 132, 4.3e12, "sm90"),
    ("sm90", 114, 1.8e12, "sm90"),  # an H100 on PCIe, which has no record
    ("sm89", 58, 265e9, "l4"), ("sm89", 142, 760e9, "sm89"),
])  # fmt: skip
def test_a_gpu_is_named_by_the_product_with_its_rates(name, num_sms, rate, key):
    present = dataclasses.replace(get_target(name), num_sms=num_sms, hbm_bytes_per_s=rate)
    assert key_of(present) == key


def test_detect_target_agrees_with_torch():
    torch = pytest.importorskip("torch")
    found = detect_target()
    if not torch.cuda.is_available():
        assert found is None
        return
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = {t.capability: t.name for t in gpu_targets()}.get((properties.major, properties.minor))
    assert (found and found.name) == known
    assert found is None or found.num_sms == properties.multi_processor_count
