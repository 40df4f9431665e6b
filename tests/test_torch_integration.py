"""As torch operators: opcheck, torch.compile, fakes, autograd, inference mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mxkv
from mxkv import Format, paging
from tests import reference
from tests.support import (
    BUILTIN,
    CUSTOM,
    DTYPES,
    FORMATS,
    Ops,
    assert_same_pages,
    assert_same_rows,
    cos_sin_table,
    fp32,
    name_of,
    pages_of,
    rows_of,
    width_for,
)

COMPILED = [*BUILTIN, CUSTOM[0], CUSTOM[2]]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The graph as Dynamo and AOTAutograd make it; where a test needs Inductor it says so."""
    torch._dynamo.reset()
    result: Callable[..., Any] = torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})
    return result


# opcheck.


def opcheck(operator: Any, arguments: tuple[Any, ...], backend: str) -> None:
    """torch's checks of an operator. Its comparison of what a call wrote cannot read float8: left out there."""
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if arguments[0].dtype == torch.float8_e4m3fn:
        utils.remove("test_schema")
    torch.library.opcheck(operator, arguments, {"backend": backend}, test_utils=utils)


@pytest.mark.parametrize("format", [*BUILTIN, CUSTOM[1]], ids=name_of)
def test_opcheck_store(ops: Ops, format: Format) -> None:
    d = width_for(format)
    cache = ops.empty(format, 2, 4, d)
    rows, slots = rows_of(3, d).to(ops.device), ops.slots(6, 1, 3)
    opcheck(torch.ops.mxkv.store.default, (cache, rows, slots, format.spec), ops.backend)


def test_opcheck_store_with_everything(ops: Ops) -> None:
    rows, slots = rows_of(3, 128).to(ops.device), ops.slots(6, 1, 3)
    table = cos_sin_table(8).to(ops.device)
    scale = torch.full((), 0.5, device=ops.device)
    positions = ops.slots(1, 2, 3)
    for name, cache_scale in (("mxfp4", None), ("fp8", scale)):
        cache = ops.empty(name, 2, 4, 128)
        arguments = (cache, rows, slots, name, positions, table, 2, cache_scale, "sanitize")
        opcheck(torch.ops.mxkv.store.default, arguments, ops.backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("format", [*BUILTIN, CUSTOM[1]], ids=name_of)
def test_opcheck_load(ops: Ops, format: Format, dtype: torch.dtype) -> None:
    d = width_for(format)
    cache = ops.empty(format, 2, 4, d)
    ops.store(cache, rows_of(3, d).to(ops.device), ops.slots(6, 1, 3), format=format)
    arguments = (cache, ops.slots(1, 6), format.spec, d, dtype)
    opcheck(torch.ops.mxkv.load.default, arguments, ops.backend)


@pytest.mark.parametrize("name", ["mxfp4", "dsv4", "fp8"])
def test_opcheck_load_out(ops: Ops, name: str) -> None:
    cache = ops.empty(name, 2, 4, 512)
    out = torch.empty(2, 512, device=ops.device)
    opcheck(torch.ops.mxkv.load_out.default, (cache, ops.slots(1, 6), out, name), ops.backend)


def test_schemas_declare_what_is_written() -> None:
    written = {
        name: [a.name for a in getattr(torch.ops.mxkv, name).default._schema.arguments if a.alias_info is not None]
        for name in ("store", "load", "load_out")
    }
    assert written == {"store": ["cache"], "load": [], "load_out": ["out"]}


# torch.compile (case 31: in place, with no clone).


@pytest.mark.parametrize("format", COMPILED, ids=name_of)
def test_compiled_store_and_load(ops: Ops, format: Format) -> None:
    d = width_for(format)

    def step(cache: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        mxkv.store(cache, latent * 2, slots, format=format, backend=ops.backend)
        return mxkv.load(cache, slots, format=format, latent_dim=d, backend=ops.backend) + 1

    rows, slots = rows_of(3, d).to(ops.device), ops.slots(6, 1, 3)
    eager, inside = ops.empty(format, 2, 4, d), ops.empty(format, 2, 4, d)
    address = inside.data_ptr()
    want = step(eager, rows, slots)
    got = compiled(step)(inside, rows, slots)
    assert inside.data_ptr() == address
    assert_same_pages(inside, pages_of(eager))
    assert inside.view(torch.uint8).any()
    assert_same_rows(got, want)


def test_case_31_compiled_by_inductor_in_place_without_a_clone(ops: Ops) -> None:
    """The cache is not copied: storing 3 rows allocates far less than the pool's 8 MB."""

    def step(cache: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        mxkv.store(cache, latent, slots, backend=ops.backend)
        return mxkv.load(cache, slots, backend=ops.backend)

    rows, slots = rows_of(3, 512).to(ops.device), ops.slots(6, 1, 3)
    cache, want = ops.empty("mxfp4", 512, 64, 512), ops.empty("mxfp4", 512, 64, 512)
    run = compiled(step, backend="inductor")
    run(cache, rows, slots)
    cache.zero_()
    with torch.profiler.profile(profile_memory=True) as profile:
        got = run(cache, rows, slots)
    mxkv.store(want, rows, slots, backend=ops.backend)
    assert torch.equal(cache, want)
    assert_same_rows(got, mxkv.load(want, slots, backend=ops.backend))
    largest = max(max(e.self_cpu_memory_usage, e.self_device_memory_usage) for e in profile.events())
    assert largest < cache.numel() // 4
    assert not {"aten::clone", "aten::copy_"} & {e.name for e in profile.events() if e.self_cpu_memory_usage > 1 << 20}


def test_compiled_graph_has_no_clone_of_the_cache(ops: Ops) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def step(cache: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        mxkv.store(cache, latent, slots, backend=ops.backend)
        return mxkv.load(cache, slots, backend=ops.backend)

    cache = ops.empty("mxfp4", 2, 4, 512)
    compiled(step, backend=keep)(cache, rows_of(3, 512).to(ops.device), ops.slots(6, 1, 3))
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called == ["mxkv.store.default", "mxkv.load.default"]
    assert cache.any()


def test_compiled_rope_and_load_into_out(ops: Ops) -> None:
    format = mxkv.FORMATS["dsv4"]
    table, positions = cos_sin_table(16), [5, 6, 7]

    def step(
        cache: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, at: torch.Tensor, turn: torch.Tensor,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        mxkv.store(cache, latent, slots, positions=at, cos_sin=turn, compress_ratio=2, backend=ops.backend)
        mxkv.load(cache, slots, out=out, backend=ops.backend)

    cache, rows = ops.empty(format, 2, 4, 512), rows_of(3, 512)
    out = torch.full((3, 512), 9.0, device=ops.device)
    want = pages_of(cache)
    reference.store(want, fp32(rows), [6, 1, 3], format, positions=positions, cos_sin=fp32(table), compress_ratio=2)
    compiled(step)(cache, rows.to(ops.device), ops.slots(6, 1, 3), ops.slots(*positions), table.to(ops.device), out)
    assert_same_pages(cache, want)
    assert_same_rows(out, reference.load(want, [6, 1, 3], format, 512))


def test_compiled_fp8_with_a_number_and_with_a_tensor_for_its_scale(ops: Ops) -> None:
    def step(cache: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor, scale: Any) -> torch.Tensor:
        mxkv.store(cache, latent, slots, cache_scale=scale, backend=ops.backend)
        return mxkv.load(cache, slots, cache_scale=scale, backend=ops.backend)

    rows, slots = rows_of(3, 64).to(ops.device), ops.slots(6, 1, 3)
    want = ops.empty("fp8", 2, 4, 64)
    rows_want = step(want, rows, slots, 0.3)
    for scale in (0.3, torch.tensor(0.3, device=ops.device), torch.tensor([0.3], device=ops.device)):
        cache = ops.empty("fp8", 2, 4, 64)
        got = compiled(step)(cache, rows, slots, scale)
        assert_same_pages(cache, pages_of(want))
        assert_same_rows(got, rows_want)


def test_compiled_with_a_changing_token_count(ops: Ops) -> None:
    def step(cache: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        mxkv.store(cache, latent, slots, backend=ops.backend)
        return mxkv.load(cache, slots, dtype=torch.float32, backend=ops.backend)

    run = compiled(step, dynamic=True)
    cache, want = ops.empty("mxfp4", 4, 4, 64), ops.empty("mxfp4", 4, 4, 64)
    for n in (3, 7, 2, 16, 5):
        rows, slots = rows_of(n, 64, seed=n).to(ops.device), torch.arange(n, device=ops.device)
        assert_same_rows(run(cache, rows, slots), step(want, rows, slots))
        assert torch.equal(cache, want)


def test_bad_input_in_a_compiled_function_is_still_an_error(ops: Ops) -> None:
    def step(cache: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor) -> None:
        mxkv.store(cache, latent, slots, backend=ops.backend)

    cache = ops.empty("mxfp4", 2, 4, 64)
    with pytest.raises(Exception, match=r"latent.*float64"):
        compiled(step)(cache, rows_of(3, 64).double().to(ops.device), ops.slots(0, 1, 2))
    assert not cache.any()


def test_export(ops: Ops) -> None:
    class Insert(torch.nn.Module):
        def forward(self, cache: torch.Tensor, latent: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            mxkv.store(cache, latent, slots, backend=ops.backend)
            return mxkv.load(cache, slots, backend=ops.backend)

    arguments = (ops.empty("mxfp4", 2, 4, 64), rows_of(3, 64).to(ops.device), ops.slots(6, 1, 3))
    program = torch.export.export(Insert(), arguments)
    cache = torch.zeros_like(arguments[0])
    got = program.module()(cache, *arguments[1:])
    want = ops.empty("mxfp4", 2, 4, 64)
    ops.store(want, *arguments[1:])
    assert torch.equal(cache, want)
    assert_same_rows(got, ops.load(want, arguments[2]))


# Fakes.


@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_fakes_have_the_shapes_of_the_real(ops: Ops, format: Format) -> None:
    d = width_for(format)
    cache, slots = ops.empty(format, 2, 4, d), ops.slots(1, 6)
    real = ops.load(cache, slots, format=format, latent_dim=d, dtype=torch.float16)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = ops.load(
            mode.from_tensor(cache), mode.from_tensor(slots), format=format, latent_dim=d, dtype=torch.float16
        )
    assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (real.shape, real.dtype, real.device, real.stride())


def test_fake_load_knows_the_width(ops: Ops) -> None:
    with torch._subclasses.FakeTensorMode():
        for name in ("mxfp4", "nvfp4", "dsv4", "bf16", "fp8"):
            cache = mxkv.empty_cache(name, 2, 4, 512, ops.device)
            rows = ops.load(cache, torch.empty(5, dtype=torch.int64, device=ops.device))
            assert rows.shape == (5, 512)


def test_fake_calls_are_checked_too(ops: Ops) -> None:
    """A call that cannot work fails when it is traced, not when it runs."""
    with torch._subclasses.FakeTensorMode():
        cache = mxkv.empty_cache("mxfp4", 2, 4, 512, ops.device)
        slots = torch.empty(3, dtype=torch.int64, device=ops.device)
        with pytest.raises(ValueError, match="480"):
            ops.store(cache, torch.empty(3, 480, device=ops.device), slots)
        with pytest.raises(ValueError, match="480"):
            ops.load(cache, slots, latent_dim=480)
        with pytest.raises(TypeError, match="float32"):
            ops.load(cache, slots.float())


# Autograd, inference mode, streams of calls.


def test_rows_that_need_gradients_are_stored_without_a_graph(ops: Ops) -> None:
    rows = rows_of(3, 64).to(ops.device).requires_grad_()
    cache, want = ops.empty("mxfp4", 2, 4, 64), ops.empty("mxfp4", 2, 4, 64)
    ops.store(cache, rows * 1, ops.slots(0, 1, 2))
    ops.store(want, rows.detach(), ops.slots(0, 1, 2))
    assert torch.equal(cache, want)
    assert not ops.load(cache, ops.slots(0, 1)).requires_grad


def test_inference_mode(ops: Ops) -> None:
    rows, slots = rows_of(3, 64).to(ops.device), ops.slots(0, 1, 2)
    with torch.inference_mode():
        cache = ops.empty("mxfp4", 2, 4, 64)
        ops.store(cache, rows, slots)
        got = ops.load(cache, slots)
    want = ops.empty("mxfp4", 2, 4, 64)
    ops.store(want, rows, slots)
    assert torch.equal(cache, want)
    assert_same_rows(got, ops.load(want, slots))


def test_operators_by_their_torch_names(ops: Ops) -> None:
    cache, want = ops.empty("mxfp4", 2, 4, 64), ops.empty("mxfp4", 2, 4, 64)
    rows, slots = rows_of(3, 64).to(ops.device), ops.slots(0, 1, 2)
    torch.ops.mxkv.store(cache, rows, slots, backend=ops.backend)
    ops.store(want, rows, slots)
    assert torch.equal(cache, want)
    assert_same_rows(torch.ops.mxkv.load(cache, slots, backend=ops.backend), ops.load(want, slots))
    out = torch.empty(3, 64, device=ops.device)
    torch.ops.mxkv.load_out(cache, slots, out, backend=ops.backend)
    assert_same_rows(out, ops.load(want, slots, dtype=torch.float32))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_format_first_met_inside_a_compiled_function(ops: Ops, fullgraph: bool) -> None:
    """Nothing of it has been asked for before; fp8 rounds twice, and a compiler would round once."""
    format = mxkv.Format(f"cold-{fullgraph}", mxkv.Element.E4M3, mxkv.Scale.TENSOR)
    cache, want = (ops.empty(mxkv.FORMATS["fp8"], 4, 16, 512) for _ in range(2))
    rows, slots = (torch.randn(64, 512) * 3).to(ops.device), torch.arange(64, device=ops.device)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda c, x, s: mxkv.store(c, x, s, format=format, backend=ops.backend), fullgraph=fullgraph
    )
    compiled(cache, rows, slots)
    mxkv.store(want, rows, slots, format="fp8", backend=ops.backend)
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))


def test_a_plan_inside_a_compiled_function_is_not_compiled() -> None:
    cache = mxkv.empty_cache("fp8", 4, 16, 512)
    want = cache.clone()
    rows, slots = torch.randn(64, 512) * 3, torch.arange(64)
    layout = paging.layout_of(cache, mxkv.FORMATS["fp8"], 512)
    plan = mxkv.plan(mxkv.explain("store", format="fp8", dtype=torch.float32, layout=layout).spec, "torch")
    torch.compiler.reset()
    torch.compile(lambda c, x, s: plan(c, x, s, None, None, None))(cache, rows, slots)
    mxkv.store(want, rows, slots, backend="torch")
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))


def test_a_number_as_scale_under_another_default_dtype() -> None:
    cache, want = (mxkv.empty_cache("fp8", 1, 4, 64) for _ in range(2))
    rows, slots = torch.ones(1, 64), torch.zeros(1, dtype=torch.int64)
    mxkv.store(want, rows, slots, cache_scale=0.5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        mxkv.store(cache, rows, slots, cache_scale=0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))
