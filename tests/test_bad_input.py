"""Arguments that do not fit: an error that says what was expected and what came, and a cache that has not changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mxkv
from tests.support import Ops, rows_of

TABLE = (16, 64)


def good(ops: Ops, name: str = "mxfp4", d: int = 512) -> dict[str, Any]:
    """A store that works."""
    return {
        "cache": ops.empty(name, 2, 4, d),
        "latent": rows_of(3, d).to(ops.device),
        "slots": ops.slots(0, 1, 2),
        "positions": ops.slots(0, 1, 2),
        "cos_sin": torch.ones(TABLE, device=ops.device),
    }


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor, tensor), -1)[..., ::2]


Change = Callable[[dict[str, Any]], dict[str, Any]]

STORE: dict[str, tuple[Change, type[Exception], str]] = {
    "latent of rank 1": (lambda a: {"latent": a["latent"][0]}, ValueError, r"latent.*2-D.*\[512\]"),
    "latent of rank 3": (lambda a: {"latent": a["latent"][None]}, ValueError, r"latent.*2-D.*\[1, 3, 512\]"),
    "latent of rank 0": (lambda a: {"latent": a["latent"][0, 0]}, ValueError, r"latent.*2-D.*\[\]"),
    "slots of rank 2": (lambda a: {"slots": a["slots"][None]}, ValueError, r"slots.*1-D.*\[1, 3\]"),
    "slots of rank 0": (lambda a: {"slots": a["slots"][0]}, ValueError, r"slots.*1-D.*\[\]"),
    "positions of rank 2": (lambda a: {"positions": a["positions"][None].expand(3, 3)}, ValueError, r"positions.*1-D"),
    "cos_sin of rank 1": (lambda a: {"cos_sin": a["cos_sin"][0]}, ValueError, r"cos_sin.*64.*\[64\]"),
    "cache of rank 1": (lambda a: {"cache": a["cache"].flatten()}, ValueError, r"cache.*num_blocks.*\[2176\]"),
    "cache of rank 4": (lambda a: {"cache": a["cache"][None]}, ValueError, r"cache.*num_blocks.*\[1, 2, 4, 272\]"),
    "float64 latent": (lambda a: {"latent": a["latent"].double()}, TypeError, r"latent.*bfloat16.*float64"),
    "integer latent": (lambda a: {"latent": a["latent"].int()}, TypeError, r"latent.*bfloat16.*int32"),
    "complex latent": (
        lambda a: {"latent": a["latent"].to(torch.complex64)}, TypeError, r"latent.*bfloat16.*complex64",
    ),
    "int16 slots": (lambda a: {"slots": a["slots"].short()}, TypeError, r"slots.*int32.*int64.*int16"),
    "bool slots": (lambda a: {"slots": a["slots"].bool()}, TypeError, r"slots.*int32.*int64.*bool"),
    "float slots": (lambda a: {"slots": a["slots"].float()}, TypeError, r"slots.*int32.*int64.*float32"),
    "float positions": (lambda a: {"positions": a["positions"].float()}, TypeError, r"positions.*int32.*float32"),
    "integer cos_sin": (lambda a: {"cos_sin": a["cos_sin"].int()}, TypeError, r"cos_sin.*floating.*int32"),
    "int8 cache": (lambda a: {"cache": a["cache"].view(torch.int8)}, TypeError, r"uint8.*int8|int8.*uint8"),
    "float32 cache": (lambda a: {"cache": a["cache"].view(torch.float32)}, TypeError, r"uint8.*float32|float32.*uint8"),
    "int8 cache, named format": (
        lambda a: {"cache": a["cache"].view(torch.int8), "format": "mxfp4"}, TypeError, r"mxfp4.*uint8.*int8",
    ),
    "bf16 format in bytes": (lambda a: {"format": "bf16"}, TypeError, r"bf16.*bfloat16.*uint8"),
    "width of another d": (lambda a: {"latent": a["latent"][:, :480]}, ValueError, r"272.*480.*255"),
    "width of another d, named format": (
        lambda a: {"latent": a["latent"][:, :480], "format": "mxfp4"}, ValueError, r"480.*255.*272",
    ),
    "width one byte short": (lambda a: {"cache": a["cache"][..., :271]}, ValueError, r"271.*272"),
    "named format of another width": (lambda a: {"format": "nvfp4"}, ValueError, r"nvfp4.*288.*272"),
    "d that no group divides": (
        lambda a: {"latent": a["latent"][:, :500], "format": "mxfp4"}, ValueError, r"mxfp4.*32.*500",
    ),
    "d of 0": (lambda a: {"latent": a["latent"][:, :0], "format": "mxfp4"}, ValueError, r"mxfp4.*32.*0"),
    "dsv4 of another d": (lambda a: {"latent": a["latent"][:, :448], "format": "dsv4"}, ValueError, r"dsv4.*512.*448"),
    "page format in a 2-D cache": (
        lambda a: {"cache": a["cache"].new_zeros(8, 288), "format": "nvfp4"}, ValueError, r"nvfp4.*3-D.*\[8, 288\]",
    ),
    "unknown format": (lambda a: {"format": "mxfp5"}, ValueError, r"mxfp5.*mxfp4.*nvfp4.*dsv4"),
    "unknown format with fields": (lambda a: {"format": "mxfp4=1"}, ValueError, r"mxfp4=1.*mxfp4"),
    "half a format's fields": (lambda a: {"format": "name=x;element=e2m1"}, ValueError, r"name=x;element=e2m1.*mxfp4"),
    "format of another type": (lambda a: {"format": 4}, TypeError, r"format.*int"),
    "unknown backend": (lambda a: {"backend": "cuda"}, ValueError, r"cuda.*torch"),
    "unknown policy": (lambda a: {"nonfinite": "ignore"}, ValueError, r"propagate.*sanitize.*ignore"),
    "compress_ratio 3": (lambda a: {"compress_ratio": 3}, ValueError, r"1 or 2.*3"),
    "compress_ratio 0": (lambda a: {"compress_ratio": 0}, ValueError, r"1 or 2.*0"),
    "compress_ratio 2 without positions": (
        lambda a: {"compress_ratio": 2, "positions": None, "cos_sin": None}, ValueError, r"compress_ratio 2.*positions",
    ),
    "cos_sin without positions": (lambda a: {"positions": None}, ValueError, r"cos_sin.*positions.*None"),
    "cos_sin of another width": (lambda a: {"cos_sin": a["cos_sin"][:, :32]}, ValueError, r"cos_sin.*64.*\[16, 32\]"),
    "RoPE wider than the row": (
        lambda a: {"cache": a["cache"].new_zeros(2, 4, 17), "latent": a["latent"][:, :32]}, ValueError, r"64.*32",
    ),
    "more slots than tokens": (lambda a: {"latent": a["latent"][:2]}, ValueError, r"2.*3"),
    "fewer positions than slots": (lambda a: {"positions": a["positions"][:2]}, ValueError, r"position.*3.*2"),
    "cache_scale of a format with its own": (
        lambda a: {"cache_scale": 2.0}, ValueError, r"cache_scale.*fp8.*mxfp4",
    ),
    "transposed latent": (
        lambda a: {"latent": a["latent"].t().contiguous().t()}, ValueError, r"latent.*contiguous.*strides \[1, 3\]",
    ),
    "strided latent": (lambda a: {"latent": strided(a["latent"])}, ValueError, r"latent.*contiguous.*strides"),
    "strided cos_sin": (lambda a: {"cos_sin": strided(a["cos_sin"])}, ValueError, r"cos_sin.*contiguous.*strides"),
    "strided cache": (lambda a: {"cache": strided(a["cache"])}, ValueError, r"cache.*contiguous.*strides"),
    "transposed cache": (
        lambda a: {"cache": a["cache"].new_zeros(4, 2, 272).transpose(0, 1)}, ValueError, r"cache.*overlap.*strides",
    ),
    "expanded cache": (lambda a: {"cache": a["cache"][:1].expand(2, -1, -1)}, ValueError, r"cache.*overlap.*strides"),
    "latent elsewhere": (lambda a: {"latent": elsewhere(a["latent"])}, ValueError, r"latent on (cpu|cuda:\d).*meta"),
    "slots elsewhere": (lambda a: {"slots": elsewhere(a["slots"])}, ValueError, r"slots on (cpu|cuda:\d).*meta"),
    "positions elsewhere": (
        lambda a: {"positions": elsewhere(a["positions"])}, ValueError, r"positions on (cpu|cuda:\d).*meta",
    ),
    "cos_sin elsewhere": (
        lambda a: {"cos_sin": elsewhere(a["cos_sin"])}, ValueError, r"cos_sin on (cpu|cuda:\d).*meta",
    ),
    "slots in a list": (lambda a: {"slots": [0, 1, 2]}, TypeError, r"slots.*list"),
    "no slots": (lambda a: {"slots": None}, TypeError, r"slots.*None"),
    "latent in numpy": (lambda a: {"latent": a["latent"].cpu().numpy()}, TypeError, r"latent.*ndarray"),
    "no cache": (lambda a: {"cache": None}, TypeError, r"cache.*None"),
    "fractional compress_ratio": (
        lambda a: {"compress_ratio": 1.5},
        (TypeError, ValueError), r"compress_ratio.*1\.5|1 or 2.*1\.5|compress_ratio.*float",
    ),
    "policy of another type": (lambda a: {"nonfinite": True}, (TypeError, ValueError), r"nonfinite"),
}  # fmt: skip


def raises(error: type[Exception] | tuple[type[Exception], ...], match: str, call: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=f"(?s){match}") as caught:
            call()
    assert not isinstance(caught.value, NotImplementedError)
    assert len(str(caught.value)) < 600, "a message that nobody reads"


@pytest.mark.parametrize("met_before", [False, True], ids=["first", "after a good call"])
@pytest.mark.parametrize("what", STORE)
def test_store(ops: Ops, what: str, met_before: bool) -> None:
    change, error, match = STORE[what]
    arguments = good(ops)
    if met_before:
        ops.store(**arguments)
        arguments["cache"].zero_()
    changed = change(arguments)
    call: dict[str, Any] = {"backend": ops.backend, **arguments, **changed}
    raises(error, match, lambda: mxkv.store(**call))
    assert not arguments["cache"].any()
    written = call["cache"]
    assert written is None or not written.view(torch.uint8).any()


LOAD: dict[str, tuple[Change, type[Exception] | tuple[type[Exception], ...], str]] = {
    "slots of rank 2": (lambda a: {"slots": a["slots"][None]}, ValueError, r"slots.*1-D.*\[1, 3\]"),
    "float slots": (lambda a: {"slots": a["slots"].float()}, TypeError, r"slots.*int32.*int64.*float32"),
    "cache of rank 1": (lambda a: {"cache": a["cache"].flatten()}, ValueError, r"cache.*num_blocks.*\[2176\]"),
    "int8 cache": (lambda a: {"cache": a["cache"].view(torch.int8)}, TypeError, r"uint8.*int8|int8.*uint8"),
    "width of no format": (lambda a: {"cache": a["cache"][..., :271]}, ValueError, r"271"),
    "width of another latent_dim": (lambda a: {"latent_dim": 480}, ValueError, r"272.*480.*255"),
    "width of another latent_dim, named": (
        lambda a: {"latent_dim": 480, "format": "mxfp4"}, ValueError, r"480.*255.*272",
    ),
    "width that the format has not": (
        lambda a: {"format": "nvfp4-inline", "cache": a["cache"][..., :271]}, ValueError, r"nvfp4-inline.*271",
    ),
    "float64 rows": (lambda a: {"dtype": torch.float64}, TypeError, r"bfloat16.*float64"),
    "integer rows": (lambda a: {"dtype": torch.int32}, TypeError, r"bfloat16.*int32"),
    "unknown format": (lambda a: {"format": "mxfp5"}, ValueError, r"mxfp5.*mxfp4.*nvfp4.*dsv4"),
    "unknown backend": (lambda a: {"backend": "cuda"}, ValueError, r"cuda.*torch"),
    "d that no group divides": (lambda a: {"format": "mxfp4", "latent_dim": 500}, ValueError, r"mxfp4.*32.*500"),
    "negative latent_dim": (lambda a: {"format": "mxfp4", "latent_dim": -32}, ValueError, r"mxfp4.*32.*-32"),
    "page format in a 2-D cache": (
        lambda a: {"cache": a["cache"].new_zeros(8, 288), "format": "nvfp4"}, ValueError, r"nvfp4.*3-D.*\[8, 288\]",
    ),
    "cache_scale of a format with its own": (lambda a: {"cache_scale": 2.0}, ValueError, r"cache_scale.*fp8.*mxfp4"),
    "slots elsewhere": (lambda a: {"slots": elsewhere(a["slots"])}, ValueError, r"slots on (cpu|cuda:\d).*meta"),
    "out elsewhere": (lambda a: {"out": torch.zeros(3, 512, device="meta")}, ValueError, r"out on (cpu|cuda:\d).*meta"),
    "out of rank 1": (lambda a: {"out": a["out"][0]}, ValueError, r"out.*2-D.*\[512\]"),
    "out of another width": (lambda a: {"out": a["out"][:, :480]}, ValueError, r"480"),
    "out of another width than latent_dim": (
        lambda a: {"out": a["out"][:, :480], "latent_dim": 512}, ValueError, r"out.*512.*480",
    ),
    "out of too few rows": (lambda a: {"out": a["out"][:2]}, ValueError, r"out.*3 slots.*\[2, 512\]"),
    "out of too many rows": (
        lambda a: {"out": torch.zeros(4, 512, device=a["out"].device)}, ValueError, r"3 slots.*\[4, 512\]",
    ),
    "float64 out": (lambda a: {"out": a["out"].double()}, TypeError, r"bfloat16.*float64"),
    "out of another dtype": (lambda a: {"out": a["out"], "dtype": torch.float16}, TypeError, r"out.*float16.*float32"),
    "transposed out": (lambda a: {"out": a["out"].t().contiguous().t()}, ValueError, r"out.*contiguous.*strides"),
    "expanded out": (lambda a: {"out": a["out"][:1].expand(3, -1)}, ValueError, r"out.*overlap.*strides"),
    "strided cache": (lambda a: {"cache": strided(a["cache"])}, ValueError, r"cache.*contiguous.*strides"),
    "slots in a list": (lambda a: {"slots": [0, 1, 2]}, TypeError, r"slots.*list"),
    "dtype in a string": (lambda a: {"dtype": "float32"}, TypeError, r"dtype|float32"),
}  # fmt: skip


@pytest.mark.parametrize("met_before", [False, True], ids=["first", "after a good call"])
@pytest.mark.parametrize("what", LOAD)
def test_load(ops: Ops, what: str, met_before: bool) -> None:
    change, error, match = LOAD[what]
    arguments = {"cache": ops.empty("mxfp4", 2, 4, 512), "slots": ops.slots(0, 1, 2)}
    out = torch.full((3, 512), 7.0, device=ops.device)
    if met_before:
        ops.load(**arguments)
        ops.load(**arguments, out=torch.empty_like(out))
    changed = change({**arguments, "out": out})
    call: dict[str, Any] = {"backend": ops.backend, **arguments, **changed}
    raises(error, match, lambda: mxkv.load(**call))
    assert (out == 7).all()


# What a memoised kind of call must not let through.


def test_bad_strides_after_a_call_of_no_tokens_with_the_same(ops: Ops) -> None:
    cache = ops.empty("mxfp4", 2, 4, 512)
    memory = torch.ones(2048, device=ops.device)
    none = memory.as_strided((0, 512), (1, 3))
    raises(ValueError, r"latent.*contiguous.*strides", lambda: ops.store(cache, none, ops.slots()))
    latent = memory.as_strided((3, 512), (1, 3))
    raises(ValueError, r"latent.*contiguous.*strides", lambda: ops.store(cache, latent, ops.slots(0, 1, 2)))
    assert not cache.any()


def test_bad_table_after_one_of_no_positions_with_the_same_strides(ops: Ops) -> None:
    cache = ops.empty("mxfp4", 2, 4, 512)
    memory = torch.ones(2048, device=ops.device)
    arguments = {"latent": rows_of(3, 512).to(ops.device), "slots": ops.slots(0, 1, 2), "positions": ops.slots(0, 1, 2)}
    none = memory.as_strided((0, 64), (1, 5))
    raises(ValueError, r"cos_sin.*contiguous.*strides", lambda: ops.store(cache, **arguments, cos_sin=none))
    table = memory.as_strided((5, 64), (1, 5))
    raises(ValueError, r"cos_sin.*contiguous.*strides", lambda: ops.store(cache, **arguments, cos_sin=table))
    assert not cache.any()


def test_overlapping_out_after_one_row_with_the_same_strides(ops: Ops) -> None:
    cache = ops.empty("mxfp4", 2, 4, 512)
    memory = torch.zeros(2048, device=ops.device)
    one = memory.as_strided((1, 512), (8, 1))
    raises(ValueError, r"out.*overlap", lambda: ops.load(cache, ops.slots(0), out=one))
    out = memory.as_strided((3, 512), (8, 1))
    raises(ValueError, r"out.*overlap", lambda: ops.load(cache, ops.slots(0, 1, 2), out=out))


def test_slots_and_positions_are_counted_at_every_call(ops: Ops) -> None:
    arguments = good(ops)
    ops.store(**arguments)
    arguments["cache"].zero_()
    raises(ValueError, r"3 latent rows.*4", lambda: ops.store(**{**arguments, "slots": ops.slots(0, 1, 2, 3)}))
    raises(ValueError, r"3 slots.*1", lambda: ops.store(**{**arguments, "positions": ops.slots(0)}))
    assert not arguments["cache"].any()


# fp8's scale.


@pytest.mark.parametrize(
    ("scale", "error", "match"),
    [
        (torch.ones(2), ValueError, r"cache_scale.*one.*\[2\]"),
        (torch.ones(()).double(), TypeError, r"cache_scale.*float32.*float64"),
        (torch.ones((), dtype=torch.int32), TypeError, r"cache_scale.*float32.*int32"),
        (torch.ones((), device="meta"), ValueError, r"cache_scale on (cpu|cuda:\d).*meta"),
        ("1.0", TypeError, r"cache_scale.*str"),
        (True, TypeError, r"cache_scale.*bool"),
    ],
    ids=["two numbers", "float64", "int32", "elsewhere", "string", "bool"],
)
def test_cache_scale(ops: Ops, scale: Any, error: type[Exception], match: str) -> None:
    if isinstance(scale, torch.Tensor) and scale.device.type == "cpu":
        scale = scale.to(ops.device)
    cache = ops.empty("fp8", 2, 4, 64)
    rows = rows_of(1, 64).to(ops.device)
    raises(error, match, lambda: ops.store(cache, rows, ops.slots(0), cache_scale=scale))
    raises(error, match, lambda: ops.load(cache, ops.slots(0), cache_scale=scale))
    assert not cache.view(torch.uint8).any()


# empty_cache and explain.


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("mxfp5", 1, 1, 512), ValueError, r"mxfp5.*mxfp4"),
        ((4, 1, 1, 512), TypeError, r"format.*int"),
        (("mxfp4", -1, 1, 512), ValueError, r"num_blocks.*-1"),
        (("mxfp4", 1, 0, 512), ValueError, r"block_size.*0"),
        (("mxfp4", 1, 1, 500), ValueError, r"32.*500"),
        (("mxfp4", 1, 1, 0), ValueError, r"32.*0"),
        (("dsv4", 1, 1, 576), ValueError, r"512.*576"),
        (("bf16", 1, 1, 0), ValueError, r"positive.*0"),
        (("mxfp4", "4", 1, 512), TypeError, r"num_blocks must be int, got '4'"),
        (("mxfp4", 1, 8.0, 512), TypeError, r"block_size must be int, got 8\.0"),
        (("mxfp4", True, 1, 512), TypeError, r"num_blocks must be int, got True"),
        (("mxfp4", 1, 1, None), TypeError, r"latent_dim must be int, got None"),
        (("turboquant-k8v4", 1, 1, 512), ValueError, r"keys and values: store_kv"),
    ],
)
def test_empty_cache(arguments: tuple[Any, ...], error: type[Exception], match: str) -> None:
    raises(error, match, lambda: mxkv.empty_cache(*arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("mxfp4", 1, 1, 1, 128), ValueError, r"latent rows: store, load"),
        (("turboquant-k8v4", 1, 1, 0, 128), ValueError, r"heads >= 1, got 0"),
        (("turboquant-k8v4", 1, 1, 2.5, 128), TypeError, r"heads must be int, got 2\.5"),
        (("turboquant-k8v4", 1, 1, 1, "128"), TypeError, r"head_dim must be int, got '128'"),
    ],
)
def test_empty_kv_cache(arguments: tuple[Any, ...], error: type[Exception], match: str) -> None:
    raises(error, match, lambda: mxkv.empty_kv_cache(*arguments))


@pytest.mark.parametrize(
    ("operation", "arguments", "error", "match"),
    [
        ("attendd", {}, ValueError, r"attendd.*store.*load"),
        ("store", {"format": "mxfp5"}, ValueError, r"mxfp5.*mxfp4"),
        ("store", {"latent_dim": 500}, ValueError, r"32.*500"),
        ("store", {"backend": "cuda"}, ValueError, r"cuda.*torch"),
        ("store", {"colour": 1}, TypeError, r"colour"),
    ],
)
def test_explain(operation: str, arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    raises(error, match, lambda: mxkv.explain(operation, **arguments))


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"num_splits": 2.5}, TypeError, r"num_splits must be int, got 2\.5"),
        ({"num_splits": 0}, ValueError, r"1 <= num_splits"),
        ({"q": [1.0]}, TypeError, r"q must be Tensor, got list"),
        ({"sink": [0.0]}, TypeError, r"sink must be Tensor or None, got list"),
        ({"value_dim": 65}, ValueError, r"latent_dim 64, got 65"),
    ],
)
def test_attend_workspace_bytes(changed: dict[str, Any], error: type[Exception], match: str) -> None:
    given = {
        "q": torch.zeros(2, 3, 64, dtype=torch.bfloat16), "cache": mxkv.empty_cache("bf16", 2, 8, 64),
        "indices": torch.zeros(2, 4, dtype=torch.int32),
    }  # fmt: skip
    raises(error, match, lambda: mxkv.attend_workspace_bytes(**given | changed))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"num_splits": 2.5}, r"num_splits must be int, got 2\.5"),
        ({"seq_lens": [1]}, r"seq_lens must be Tensor"),
    ],
)
def test_attend_kv_workspace_bytes(changed: dict[str, Any], match: str) -> None:
    given = {
        "q": torch.zeros(1, 1, 64, dtype=torch.bfloat16),
        "kv_cache": mxkv.empty_kv_cache("turboquant-4bit-nc", 4, 16, 1, 64),
        "block_table": torch.zeros(1, 2, dtype=torch.int32), "seq_lens": torch.ones(1, dtype=torch.int32),
        "format": "turboquant-4bit-nc",
    }  # fmt: skip
    raises(TypeError, match, lambda: mxkv.attend_kv_workspace_bytes(**given | changed))


def test_merge_partials_with_a_sink_that_is_no_tensor() -> None:
    parts = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    raises(TypeError, r"sink must be Tensor or None, got list", lambda: mxkv.merge_partials(*parts, [0.0, 0.0, 0.0]))


def test_whole_numbers_of_numpy_are_sizes() -> None:
    q, cache = torch.zeros(2, 3, 64, dtype=torch.bfloat16), mxkv.empty_cache("bf16", 2, 8, 64)
    given = {"indices": torch.zeros(2, 4, dtype=torch.int32), "num_splits": np.int64(2), "value_dim": np.int64(32)}
    assert mxkv.attend_workspace_bytes(q, cache, **given, backend="torch") == 0
    assert mxkv.attend(q, cache, **given).shape == (2, 3, 32)
