"""compress_norm, save_ring_rows and compress_store."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxkv
from mxkv import Element, Format, Placement, Scale, numerics
from tests.compression_cases import (
    DIM,
    RING_DIM,
    Call,
    check,
    expected,
    on,
    packed,
    rows_of_scores,
    run,
    weight_of,
)
from tests.conftest import INTERPRET, SIMULATE
from tests.support import FORMATS, GUARD, Ops, cos_sin_table, guarded_pool, guards_of, name_of

# Of the schedules the interpreter, which takes a third of a second for each, has a few in CI; all others have all.
SCHEDULES = int(os.environ.get("MXKV_TEST_SCHEDULES") or (30 if INTERPRET else 3 if SIMULATE else 1000))
ODD = Format("odd", Element.E2M1, Scale.E8M0, 24, Placement.INLINE, tail=8)
STORED = [format for format in (*FORMATS, ODD) if format.accepts_dim(DIM)]
MIXED = [(0, 4), (5, 1), (3, 2), (7, 0), (4, 1), (1, 7)]


def everywhere(ops: Ops, call: Call) -> None:
    """A call gives what is expected, and the very bits of the torch backend on the CPU."""
    have = check(ops, call)
    want, _, _ = run(Ops("torch", torch.device("cpu")), call)
    assert torch.equal(have.view(torch.int16), want.view(torch.int16))


# Chunks, groups, rings.


@pytest.mark.parametrize("capacity", [1, 2, 3, 8])
def test_chunks_of_every_kind(ops: Ops, capacity: int) -> None:
    chunks = [*MIXED, (10, 3), (9, 2 * capacity + 1)]
    everywhere(ops, packed(chunks, capacity, seed=capacity, blocks=[3, 0, 1, 2, 7, 4, 6, 5]))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_row_that_is_read_may_be_the_row_that_is_overwritten(ops: Ops, capacity: int, count: int) -> None:
    """A chunk that begins in the middle of a group, as long as the ring and longer."""
    everywhere(ops, packed([(2 * capacity + 1, count), (1, count)], capacity, seed=count))


def test_ratio_1_needs_no_request(ops: Ops) -> None:
    call = packed([(0, 6)], 4)
    rows = rows_of_scores(6, 3, DIM)
    slots = torch.tensor([0, -1, 5, 1 << 40, -(2**31), 7])
    call = dataclasses.replace(call, kv_score=rows, slots=slots, compress_ratio=1)
    everywhere(ops, call)
    out = torch.zeros(6, DIM).bfloat16()
    before = call.state_cache.clone()
    arguments = call.arguments(ops) | dict.fromkeys(("state_cache", "query_start", "token_to_request"))
    have = out.to(ops.device)
    mxkv.compress_norm(**arguments, out=have, backend=ops.backend)
    want, _ = expected(call)
    assert sorted(want) == have.cpu().any(1).nonzero().flatten().tolist()
    assert torch.equal(before, call.state_cache)


@pytest.mark.parametrize("seed", range(4))
def test_negative_and_foreign_slots(ops: Ops, seed: int) -> None:
    """A slot decides about its own token; a chunk's first slot also about the first group and the ring."""
    g = torch.Generator().manual_seed(seed)
    call = packed([(0, 4), (0, 5), (3, 4), (1, 3), (6, 2), (5, 1)], 3, seed=seed)
    lost = torch.rand(call.tokens, generator=g) < 0.35
    call.slots[lost] = torch.tensor([-1, -3, 18, 1 << 40])[torch.randint(4, (call.tokens,), generator=g)][lost]
    everywhere(ops, call)


def test_a_negative_first_slot_skips_the_first_group_and_the_ring(ops: Ops) -> None:
    call = packed([(0, 4), (1, 4)], 8)
    call.slots[0] = call.slots[4] = -1
    latents, state = expected(call)
    assert sorted(latents) == [3, 6]
    assert torch.equal(state, call.state_cache)
    everywhere(ops, call)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=name_of)
def test_rows_of_other_ranks(ops: Ops, index: torch.dtype) -> None:
    """-1 reads the ring, an index past the end skips the group, and no ring is written."""
    call = packed([(5, 3), (3, 2), (1, 1), (4, 2), (7, 1)], 2, index=index)
    call.prev_rows = rows_of_scores(3, 9)
    call.prev_row_indices = torch.tensor([2, -1, 3, 0, 0, 1, 7], dtype=index)  # longer than there are requests
    latents, state = expected(call)
    assert sorted(latents) == [0, 2, 3, 7, 8]
    assert torch.equal(state, call.state_cache)
    everywhere(ops, call)


def test_ranks_that_share_a_sequence_agree_with_one_that_has_it(ops: Ops) -> None:
    """Context parallelism: the second rank's chunk begins inside of a group; its predecessor is sent to it."""
    whole = packed([(0, 9)], 4)
    want, ring, _ = run(ops, whole)
    poison = torch.full_like(whole.state_cache, float("nan"))
    rows = whole.kv_score
    first = packed([(0, 5)], 4, rows=rows[:5].clone(), state=poison.clone())
    second = packed([(5, 4)], 4, rows=rows[5:].clone(), state=poison.clone())
    second.prev_rows, second.prev_row_indices = rows[4:5].clone(), torch.tensor([0])
    first.weight = second.weight = whole.weight
    outs = [run(ops, first)[0], run(ops, second)[0]]
    assert torch.equal(torch.cat(outs).view(torch.int16), want.view(torch.int16))
    cache = poison.to(ops.device)  # what the second rank did not save
    mxkv.save_ring_rows(rows[5:].to(ops.device), ops.slots(1, 2, 3, 0), cache, backend=ops.backend)
    assert torch.equal(cache.cpu(), ring)


def test_padded_rows_and_strided_indices(ops: Ops) -> None:
    call = packed(MIXED, 2)
    n, step = call.tokens, RING_DIM + 48
    rows, ring = torch.full((n, step), float("nan")), torch.full((6 * 2 + 3, step), float("nan"))
    rows[:, 16 : 16 + RING_DIM] = call.kv_score
    state = ring[: 6 * 2].view(-1)[16:].as_strided((5, 2, RING_DIM), (2 * step + 32, step, 1), 16)
    state.copy_(call.state_cache[:5])
    call = dataclasses.replace(call, kv_score=rows[:, 16 : 16 + RING_DIM], state_cache=state)
    call.slots[call.slots >= 10] -= 2 * 2
    for name in ("positions", "slots", "query_start", "token_to_request"):
        doubled = getattr(call, name).int().repeat_interleave(2)
        setattr(call, name, doubled[::2])
    call.prev_rows = torch.full((4, step), 3.0)[:, :RING_DIM]
    call.prev_rows.copy_(rows_of_scores(4, 5))
    call.prev_row_indices = torch.tensor([-1, 0, 2, 9, 3, 9, -1, 9, -1, 0, 3, 9])[::2]
    everywhere(ops, call)
    everywhere(ops, dataclasses.replace(call, prev_rows=None, prev_row_indices=None))


@pytest.mark.parametrize("stride", [DIM, DIM + 2, DIM + 7])
def test_out_has_any_row_stride(ops: Ops, stride: int) -> None:
    call = packed(MIXED, 2)
    want, _, _ = run(ops, call)
    whole = torch.full((call.tokens + 3, stride), -7.0, dtype=torch.bfloat16, device=ops.device)
    mxkv.compress_norm(**call.arguments(ops), out=whole[:, stride - DIM :], backend=ops.backend)
    have = whole[: call.tokens, stride - DIM :].cpu()
    assert torch.equal(have.view(torch.int16), want.view(torch.int16))
    whole[:, stride - DIM :] = -7.0
    assert (whole == -7.0).all()


def test_tokens_beyond_the_slots_do_not_exist(ops: Ops) -> None:
    """A chunk then ends where the slots do, for its ring too."""
    call = packed([(1, 4), (2, 5)], 2)
    call.slots = call.slots[:7]
    latents, state = expected(call)
    assert sorted(latents) == [0, 2, 5]
    assert torch.equal(state[1, 0], call.kv_score[6])
    everywhere(ops, call)


def test_tokens_of_no_request(ops: Ops) -> None:
    call = packed([(0, 4), (0, 4), (0, 4)], 4)
    call.token_to_request[[1, 6]] = torch.tensor([-1, 3])  # requests that do not exist
    call.token_to_request[9] = 0  # not its own
    call.query_start[-1] = 11  # the last token is padding
    have, ring, before = run(ops, call)
    latents, state = expected(call)
    assert sorted(latents) == [1, 3, 5, 7, 9]
    assert (have != before).any(1).nonzero().flatten().tolist() == [3, 5, 7]
    for slot in (1, 6, 9):  # not saved either: slots are the tokens' numbers here
        state.view(-1, RING_DIM)[slot] = call.state_cache.view(-1, RING_DIM)[slot]
    assert torch.equal(ring, state)
    assert torch.equal(ring.view(-1, RING_DIM)[11], call.state_cache.view(-1, RING_DIM)[11])


def test_the_row_that_is_read_and_tokens_of_no_request(ops: Ops) -> None:
    """Of a chunk whose last token takes the row that its first one reads, either may be skipped."""
    call = packed([(1, 6), (1, 6)], 3)
    call.token_to_request[[0, 11]] = torch.tensor([1, 2])
    have, ring, before = run(ops, call)
    assert (have != before).any(1).nonzero().flatten().tolist() == [2, 4, 6, 8, 10]
    _, state = expected(call)
    state[1, 0] = call.state_cache[1, 0]
    assert torch.equal(ring, state)


@pytest.mark.parametrize("starts", [[0], [0, 0, 0]])
def test_nothing_to_do(ops: Ops, starts: list[int]) -> None:
    call = packed([(0, 3)], 2)
    call.query_start = torch.tensor(starts)
    have, ring, before = run(ops, call)
    assert torch.equal(have, before)
    assert torch.equal(ring, call.state_cache)
    none = dataclasses.replace(call, slots=call.slots[:0])
    assert torch.equal(run(ops, none, 3)[0], torch.full((3, DIM), -7.0).bfloat16())


def test_odd_positions_beside_each_other(ops: Ops) -> None:
    """Two groups close in neighbouring tokens where a chunk ends and the next begins, and none in two others."""
    call = packed([(0, 2), (1, 2), (3, 1), (5, 1), (2, 1), (4, 2)], 2)
    assert sorted(expected(call)[0]) == [1, 2, 4, 5, 8]
    everywhere(ops, call)


# Chunk by chunk.


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A ring's capacity, and for each request the lengths of its chunks, of which some are 0."""
    length = st.integers(0, 5)
    requests = st.lists(st.lists(length, min_size=1, max_size=3), min_size=1, max_size=3)
    return draw(st.integers(1, 4)), draw(requests)


@settings(max_examples=SCHEDULES)
@given(schedule=schedules(), seed=st.integers(0, 999))
def test_chunk_by_chunk_is_one_pass(ops: Ops, schedule: tuple[int, list[list[int]]], seed: int) -> None:
    """Whatever the chunks, a request's latents are those of its whole sequence; rings begin poisoned."""
    capacity, chunks = schedule
    lengths = [sum(counts) for counts in chunks]
    rows = rows_of_scores(max(1, sum(lengths)), seed)
    weight = weight_of(seed)
    begins = np.cumsum([0, *lengths]).tolist()
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed)).tolist()
    ring = torch.full((len(chunks), capacity, RING_DIM), float("nan")).to(ops.device)
    have = torch.full((sum(lengths), DIM), -7.0).bfloat16()
    done = [0] * len(chunks)
    for step in range(max(map(len, chunks))):
        counts = [counts[step] if step < len(counts) else 0 for counts in chunks]
        taken = [begins[r] + done[r] + i for r, count in enumerate(counts) for i in range(count)]
        call = packed(list(zip(done, counts, strict=True)), capacity, blocks=order, rows=rows[taken])
        call.weight = weight
        out = have[taken].to(ops.device)
        mxkv.compress_norm(**(call.arguments(ops) | {"state_cache": ring}), out=out, backend=ops.backend)
        have[taken] = out.cpu()
        done = [a + b for a, b in zip(done, counts, strict=True)]
    whole = packed([(0, length) for length in lengths], capacity, rows=rows[: sum(lengths)])
    whole.weight = weight
    want, _, _ = run(Ops("torch", torch.device("cpu")), whole)
    assert torch.equal(have.view(torch.int16), want.view(torch.int16))


# Arithmetic.


def test_the_softmax_of_two_is_accurate() -> None:
    g = torch.Generator().manual_seed(0)
    difference = torch.cat((torch.linspace(-140, 140, 100_001), torch.randn(100_000, generator=g)))
    base = torch.randn(difference.shape, generator=g) * 0.1
    first, second = numerics.softmax_of_two(base, base + difference)
    exact = torch.sigmoid((base + difference).double() - base.double())
    # A weight is as accurate as the difference of the scores, times it, can be.
    bound = (4e-7 + 2.0**-23 * difference.abs().double()) * exact + 2.0**-125
    assert ((second.double() - exact).abs() <= bound).all()
    assert ((first.double() - (1 - exact)).abs() <= 4e-7 + 2.0**-23 * difference.abs() * first).all()
    assert ((first + second - 1).abs() <= 2.0**-23).all()


def test_the_softmax_of_two_at_its_ends() -> None:
    inf, nan = float("inf"), float("nan")
    first = torch.tensor([0.0, 3.0, -inf, inf, 0.0, 1e38, -inf, inf, nan, 0.0, -0.0, 87.0])
    second = torch.tensor([0.0, 3.0, 0.0, 0.0, -inf, -1e38, -inf, inf, 0.0, nan, 0.0, 0.0])
    want = torch.tensor([0.5, 0.5, 0.0, 1.0, 1.0, 1.0, nan, nan, nan, nan, 0.5, 1.0])
    weights = numerics.softmax_of_two(first, second)
    assert torch.equal(weights[0].nan_to_num(9.0), want.nan_to_num(9.0))
    assert torch.equal(weights[1].isnan(), want.isnan())
    assert 0 < weights[1][-1] < 1e-37


def test_values_that_are_not_finite_stay_in_their_group(ops: Ops) -> None:
    call = packed([(0, 8)], 2)
    call.kv_score[1, 5], call.kv_score[2, 7], call.kv_score[5, DIM + 3] = float("nan"), float("inf"), float("nan")
    call.kv_score[6, DIM:] = -float("inf")  # the other row alone counts
    have, _, _ = run(ops, call)
    assert have[1].isnan().all()  # through the mean of squares
    assert have[5].isnan().all()
    assert have[7].isfinite().all()
    alone = dataclasses.replace(call, kv_score=call.kv_score[7:, :DIM].contiguous(), compress_ratio=1)
    alone = dataclasses.replace(alone, slots=call.slots[7:], positions=call.positions[7:])
    assert torch.equal(run(ops, alone)[0][0], have[7])
    want, _, _ = run(Ops("torch", torch.device("cpu")), call)
    assert torch.equal(have.isnan(), want.isnan())


def test_the_order_of_the_sum() -> None:
    rows = rows_of_scores(3, 0, DIM)
    exact = rows.double().square().sum(-1, keepdim=True)
    assert torch.allclose(numerics.sum_of_squares(rows).double(), exact, rtol=1e-6)
    assert numerics.sum_of_squares(rows).shape == (3, 1)


# compress_store.


def two_calls(ops: Ops, call: Call, cache: torch.Tensor, slots: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """compress_norm, then store of the rows that it made."""
    out = torch.full((call.tokens, DIM), -7.0).bfloat16().to(ops.device)
    given = call.arguments(ops)
    mxkv.compress_norm(**given, out=out, backend=ops.backend)
    made = torch.zeros(call.tokens, dtype=torch.bool)
    made[list(expected(call)[0])] = True
    slots = torch.where(made, slots, -1).to(ops.device)
    ratio = call.compress_ratio
    ops.store(cache, out, slots, positions=given["positions"], compress_ratio=ratio, **arguments)
    call.state_cache = given["state_cache"].cpu()
    return out.cpu()


@pytest.mark.parametrize("format", STORED, ids=name_of)
@pytest.mark.parametrize("kind", range(3))
def test_compress_store_is_the_two_calls(ops: Ops, format: Format, kind: int) -> None:
    if ops.slow and STORED.index(format) % 3 != kind:
        pytest.skip("one kind of call for each format: kernels are interpreted")
    nonfinite, ratio, rope = ("propagate", "sanitize", "propagate")[kind], (2, 2, 1)[kind], kind != 1
    call = packed([(3, 2), (6, 2), (11, 1)] if ops.slow else [(0, 5), (3, 4), (6, 1), (11, 2)], 2, seed=kind)
    call.kv_score[0, 40], call.kv_score[3, 470] = float("nan"), float("inf")
    if ratio == 1:
        call = dataclasses.replace(call, kv_score=call.kv_score[:, :DIM].contiguous(), compress_ratio=1)
    scale = torch.full((1,), 0.37, device=ops.device) if format.scale is Scale.TENSOR else None
    arguments = {
        "format": format, "nonfinite": nonfinite, "cache_scale": scale,
        "cos_sin": cos_sin_table(12).to(ops.device) if rope else None,
    }  # fmt: skip
    slots = torch.tensor([3, 9, 4, 1, 15, 16, 7, -1, 8, 5, 0, 11])[: call.tokens]
    gap = 8 if format.cache_dtype == torch.bfloat16 else 3
    whole, cache = guarded_pool(ops, format, 4, 4, DIM, gap=gap, offset=16)
    wanted, two = guarded_pool(ops, format, 4, 4, DIM, gap=gap, offset=16)
    given, out = call.arguments(ops), torch.full((call.tokens, DIM), -7.0).bfloat16().to(ops.device)
    asked = out if kind else None
    mxkv.compress_store(
        **given, cache=cache, cache_slots=slots.to(ops.device), out=asked, backend=ops.backend, **arguments
    )
    latents = two_calls(ops, call, two, slots, **arguments)
    assert torch.equal(whole, wanted)
    assert (guards_of(whole, cache) == GUARD).all()
    assert torch.equal(given["state_cache"].cpu().view(torch.int32), call.state_cache.view(torch.int32))
    if asked is not None:
        assert torch.equal(out.cpu().view(torch.int16), latents.view(torch.int16))


@pytest.mark.parametrize("format", [mxkv.FORMATS["mxfp8"], mxkv.FORMATS["dsv4"]], ids=name_of)
def test_compress_store_is_the_torch_backends(ops: Ops, format: Format) -> None:
    """The same bytes on every backend, positions beyond the table left out."""
    call = packed([(0, 5), (3, 4), (11, 2)], 2)
    caches = []
    for each in (ops, Ops("torch", torch.device("cpu"))):
        cache = each.empty(format, 4, 4, DIM)
        mxkv.compress_store(
            **call.arguments(each), cache=cache, cache_slots=torch.arange(call.tokens).to(each.device), format=format,
            cos_sin=cos_sin_table(8, torch.bfloat16).to(each.device), backend=each.backend,
        )  # fmt: skip
        caches.append(cache.cpu())
    assert torch.equal(*caches)
    assert caches[0].any()


# save_ring_rows.


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=name_of)
def test_save_ring_rows(ops: Ops, index: torch.dtype) -> None:
    rows = torch.zeros(6, RING_DIM + 16)
    rows[:, :RING_DIM] = rows_of_scores(6, 0)
    state = torch.full((4, 3, RING_DIM + 32), -7.0)[:, :, :RING_DIM]
    slots = torch.tensor([4, 0, -1, 0, 12, 0, 11, 0, 0, 0], dtype=index)[::2]  # one fewer than there are rows
    cache = on(ops, state)
    mxkv.save_ring_rows(rows.to(ops.device)[:, :RING_DIM], slots.to(ops.device), cache, backend=ops.backend)
    want = state.clone()
    for row, slot in ((0, 4), (3, 11), (4, 0)):
        want[slot // 3, slot % 3] = rows[row, :RING_DIM]
    assert torch.equal(cache.cpu(), want)
    mxkv.save_ring_rows(rows.to(ops.device)[:, :RING_DIM], ops.slots(), cache, backend=ops.backend)
    assert torch.equal(cache.cpu(), want)


# Bad input.


Change = Callable[[dict[str, Any]], dict[str, Any]]

BAD: dict[str, tuple[Change, type[Exception], str]] = {
    "ratio 4": (lambda a: {"compress_ratio": 4}, ValueError, r"compress_ratio.*1 or 2.*4"),
    "width": (lambda a: {"compress_ratio": 1}, ValueError, r"kv_score.*512.*1024"),
    "bf16 rows": (lambda a: {"kv_score": a["kv_score"].bfloat16()}, TypeError, r"kv_score.*float32.*bfloat16"),
    "row starts": (
        lambda a: {"kv_score": torch.zeros(9, 1032)[:, :1024]}, ValueError, r"kv_score.*multiples of 16.*1032",
    ),
    "row offset": (
        lambda a: {"kv_score": torch.zeros(9, 1040)[:, 8:1032]}, ValueError, r"kv_score.*multiples of 16.*offset 8",
    ),
    "ring starts": (
        lambda a: {"state_cache": torch.zeros(3, 2, 1028)[..., :1024]}, ValueError, r"state_cache.*multiples of 16",
    ),
    "ring width": (lambda a: {"state_cache": torch.zeros(3, 2, 512)}, ValueError, r"state_cache.*1024.*512"),
    "ring dtype": (lambda a: {"state_cache": a["state_cache"].half()}, TypeError, r"state_cache.*float32.*float16"),
    "ring of nothing": (lambda a: {"state_cache": torch.zeros(3, 0, 1024)}, ValueError, r"capacity of at least 1"),
    "no ring": (lambda a: {"state_cache": None}, ValueError, r"state_cache.*got None for state_cache"),
    "no requests": (
        lambda a: {"query_start": None, "token_to_request": None}, ValueError, r"None for query_start, token_to_req",
    ),
    "float slots": (lambda a: {"slots": a["slots"].float()}, TypeError, r"slots.*int32.*int64.*float32"),
    "2-D positions": (lambda a: {"positions": a["positions"][None]}, ValueError, r"positions.*1-D.*\[1, 9\]"),
    "few positions": (lambda a: {"positions": a["positions"][:8]}, ValueError, r"positions.*9 slots.*8"),
    "few requests": (lambda a: {"token_to_request": a["token_to_request"][:8]}, ValueError, r"token_to_request.*9.*8"),
    "many slots": (lambda a: {"kv_score": a["kv_score"][:8]}, ValueError, r"one slot.*8 rows.*9"),
    "empty starts": (lambda a: {"query_start": a["query_start"][:0]}, ValueError, r"query_start.*requests \+ 1"),
    "weight": (lambda a: {"weight": a["weight"][:511]}, ValueError, r"weight.*512.*511"),
    "fp32 weight": (lambda a: {"weight": a["weight"].float()}, TypeError, r"weight.*bfloat16.*float32"),
    "eps": (lambda a: {"eps": -1.0}, ValueError, r"eps.*at least 0.*-1"),
    "fp16 out": (lambda a: {"out": a["out"].half()}, TypeError, r"out.*bfloat16.*float16"),
    "short out": (lambda a: {"out": a["out"][:8]}, ValueError, r"out.*9 slots.*8"),
    "wide out": (lambda a: {"out": torch.zeros(9, 513).bfloat16()}, ValueError, r"out.*512.*513"),
    "rows alone": (lambda a: {"prev_rows": a["kv_score"]}, ValueError, r"prev_rows and prev_row_indices"),
    "few indices": (
        lambda a: {"prev_rows": a["kv_score"], "prev_row_indices": torch.zeros(1, dtype=torch.int32)},
        ValueError, r"prev_row_indices.*2 requests.*1",
    ),
    "elsewhere": (lambda a: {"slots": a["slots"].to("meta")}, ValueError, r"one device.*slots.*meta"),
    "a list": (lambda a: {"slots": [0]}, TypeError, r"slots.*Tensor.*list"),
    "eps of text": (lambda a: {"eps": "small"}, TypeError, r"eps.*small"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    change, error, message = BAD[what]
    call = packed([(1, 4), (3, 5)], 2)
    good = call.arguments(Ops("torch", torch.device("cpu"))) | {"out": torch.zeros(9, DIM).bfloat16()}
    before = good["state_cache"].clone()
    with pytest.raises(error, match=message):
        mxkv.compress_norm(**(good | change(good)))
    assert torch.equal(good["state_cache"], before)
    assert not good["out"].any()
    if "out" not in change(good) and what != "a list":
        cache = mxkv.empty_cache("mxfp8", 2, 8, DIM)
        with pytest.raises(error, match=message):
            mxkv.compress_store(**(good | change(good)), cache=cache, cache_slots=torch.arange(9))
        assert not cache.any()


def test_bad_input_of_the_others() -> None:
    call = packed([(1, 4), (3, 5)], 2)
    good = call.arguments(Ops("torch", torch.device("cpu")))
    cache = mxkv.empty_cache("mxfp8", 2, 8, DIM)
    for change, message in (
        ({"cache_slots": torch.arange(8)}, r"cache_slots.*9 slots.*8"),
        ({"cache": mxkv.empty_cache("mxfp8", 2, 8, 64)}, r"no format has.*512"),
        ({"cos_sin": torch.zeros(4, 32)}, r"cos_sin.*64"),
        ({"nonfinite": "explode"}, r"nonfinite.*explode"),
        ({"backend": "moon"}, r"unknown backend 'moon'"),
    ):
        with pytest.raises(ValueError, match=message):
            mxkv.compress_store(**(good | {"cache": cache, "cache_slots": torch.arange(9)} | change))
    with pytest.raises(ValueError, match=r"one slot.*4 rows.*9"):
        mxkv.save_ring_rows(call.kv_score[:4], call.slots, call.state_cache)
    with pytest.raises(ValueError, match=r"rows.*multiples of 16"):
        mxkv.save_ring_rows(torch.zeros(9, 1028)[:, 4:], call.slots, call.state_cache)
    with pytest.raises(TypeError, match=r"state_cache.*Tensor"):
        mxkv.save_ring_rows(call.kv_score, call.slots, None)  # type: ignore[arg-type]
    assert not cache.any()


def test_values_are_checked_for_a_kind_of_call_that_is_known() -> None:
    call = packed([(1, 4), (3, 5)], 2)
    good = call.arguments(Ops("torch", torch.device("cpu")))
    out = torch.zeros(9, DIM).bfloat16()
    mxkv.compress_norm(**good, out=out)
    with pytest.raises(ValueError, match="positions"):
        mxkv.compress_norm(**(good | {"positions": good["positions"][:5]}), out=out)
    with pytest.raises(ValueError, match="out"):
        mxkv.compress_norm(**good, out=out[:5])
    for eps in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="eps"):
            mxkv.compress_norm(**(good | {"eps": eps}), out=out)


def test_strides_are_checked_after_a_call_of_one_row() -> None:
    """One row's stride leads nowhere; that of several does."""
    call = packed([(1, 4), (3, 5)], 2)
    good = call.arguments(Ops("torch", torch.device("cpu")))
    slots, apart, out = torch.arange(4) - 4, torch.zeros(4, 1032)[:, :1024], torch.zeros(1, DIM).bfloat16()
    one = good | {"slots": slots[:1], "kv_score": apart[:1]}
    mxkv.compress_norm(**one, out=out)
    with pytest.raises(ValueError, match="multiples of 16"):
        mxkv.compress_norm(**(one | {"slots": slots, "kv_score": apart}), out=torch.zeros(4, DIM).bfloat16())
    mxkv.compress_norm(**(one | {"kv_score": torch.zeros(1, 1024)}), out=out)
    with pytest.raises(ValueError, match="out"):
        mxkv.compress_norm(**(one | {"slots": slots, "kv_score": torch.zeros(4, 1024)}), out=out.expand(4, DIM))
    mxkv.save_ring_rows(apart[:1], slots[:1], call.state_cache)
    with pytest.raises(ValueError, match="multiples of 16"):
        mxkv.save_ring_rows(apart, slots, call.state_cache)


# As torch operators, and in dispatch.


def positional(call: Call, ops: Ops, *between: Any) -> tuple[Any, ...]:
    given = call.arguments(ops)
    previous = (given.pop("prev_rows"), given.pop("prev_row_indices"))
    return (*given.values(), *between, *previous)


@pytest.mark.parametrize("ratio", [1, 2])
def test_opcheck(ops: Ops, ratio: int) -> None:
    call = packed([(1, 2)], 2)
    call = dataclasses.replace(call, kv_score=call.kv_score[:, : DIM * ratio].contiguous(), compress_ratio=ratio)
    if ratio == 2:
        call.prev_rows, call.prev_row_indices = rows_of_scores(1, 0), torch.tensor([0])
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    out = torch.zeros(2, DIM, dtype=torch.bfloat16, device=ops.device)
    options = {"backend": ops.backend}
    torch.library.opcheck(torch.ops.mxkv.compress_norm.default, positional(call, ops, out), options, test_utils=utils)
    cache = ops.empty("mxfp8", 2, 4, DIM)
    arguments = positional(call, ops, cache, ops.slots(3, 6))
    table = cos_sin_table(8).to(ops.device)
    options |= {"out": out, "cos_sin": table}
    torch.library.opcheck(torch.ops.mxkv.compress_store.default, arguments, options, test_utils=utils)
    if ratio == 2:
        saved = (arguments[0], arguments[3], arguments[2])
        options = {"backend": ops.backend}
        torch.library.opcheck(torch.ops.mxkv.save_ring_rows.default, saved, options, test_utils=utils)


def test_schemas_declare_what_is_written() -> None:
    written = {
        name: [a.name for a in getattr(torch.ops.mxkv, name).default._schema.arguments if a.alias_info is not None]
        for name in ("compress_norm", "compress_store", "save_ring_rows")
    }
    assert written == {
        "compress_norm": ["state_cache", "out"],
        "compress_store": ["state_cache", "cache", "out"],
        "save_ring_rows": ["state_cache"],
    }


def test_compiled(ops: Ops) -> None:
    call = packed([(0, 3), (1, 2)], 2)

    def step(given: dict[str, Any], cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(slots[:, None].expand(-1, DIM), dtype=torch.bfloat16)
        mxkv.compress_norm(**given, out=out, backend=ops.backend)
        mxkv.compress_store(**given, cache=cache, cache_slots=slots, format="mxfp8", backend=ops.backend)
        mxkv.save_ring_rows(rows * 2, slots - 3, given["state_cache"], backend=ops.backend)
        return out + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        given, cache = call.arguments(ops), ops.empty("mxfp8", 2, 4, DIM)
        out = function(given, cache, ops.slots(0, 1, 2, 3, 4), call.kv_score.to(ops.device))
        results.append((out, cache, given["state_cache"]))
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)
    assert results[0][1].any()


@pytest.mark.parametrize("operation", ["compress_norm", "compress_store", "save_ring_rows"])
def test_dispatch_knows_them(ops: Ops, operation: str) -> None:
    found = mxkv.explain(operation, device=ops.device, backend=ops.backend)
    assert found.chosen == ops.backend
    assert operation in str(found)
    spec = mxkv.spec(operation, device=ops.device, state_cache=torch.zeros(3, 2, RING_DIM))
    assert spec.operation == operation
    assert callable(mxkv.plan(spec, ops.backend))
    mxkv.warmup(spec, tokens=[1, 4096])


def test_specs_have_the_fields_of_the_call() -> None:
    spec = mxkv.spec("compress_store", format="dsv4", compress_ratio=2, rotate=True, previous=True)
    assert isinstance(spec, mxkv.CompressStoreSpec)
    assert spec.stored == mxkv.spec("store", format="dsv4", positioned=True, rotate=True, compress_ratio=2)
    assert spec.compressed == mxkv.spec("compress_norm", previous=True)
    with pytest.raises(TypeError):
        mxkv.spec("compress_norm", rotate=True)


def counts_of(chunks: Sequence[tuple[int, int]]) -> int:
    return sum(count for _, count in chunks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    """Graphs, no synchronisation, no race."""

    def test_a_graph_honours_what_changes_in_place(self) -> None:
        ops = Ops("triton", torch.device("cuda:0"))
        chunks = [(0, 7), (5, 4), (3, 0), (9, 3), (7, 1)]
        calls = [packed(chunks, 2, seed=seed) for seed in (1, 2)]
        given, cache = calls[0].arguments(ops), ops.empty("mxfp8", 4, 4, DIM)
        out = torch.zeros(counts_of(chunks), DIM, dtype=torch.bfloat16, device="cuda")
        slots = torch.arange(counts_of(chunks), device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # of a kind of call that was never seen: nothing waits, the capture survives
            mxkv.compress_norm(**given, out=out, backend="triton")
            mxkv.compress_store(**given, cache=cache, cache_slots=slots, format="mxfp8", backend="triton")
        for call in calls:
            given["kv_score"].copy_(call.kv_score)
            given["state_cache"].copy_(call.state_cache)
            given["weight"].copy_(call.weight)
            given["slots"].copy_(call.slots)
            out.fill_(-7.0)
            graph.replay()
            want, _, _ = run(Ops("torch", torch.device("cpu")), call)
            assert torch.equal(out.cpu(), want)
            assert cache.any()

    def test_nothing_waits_and_nothing_is_allocated(self) -> None:
        ops = Ops("triton", torch.device("cuda:0"))
        call = packed(MIXED, 2)
        given, cache = call.arguments(ops), ops.empty("mxfp8", 4, 4, DIM)
        out = torch.zeros(call.tokens, DIM, dtype=torch.bfloat16, device="cuda")
        slots = torch.arange(call.tokens, device="cuda")

        def step() -> None:
            mxkv.compress_norm(**given, out=out, backend="triton")
            mxkv.compress_store(**given, cache=cache, cache_slots=slots, format="mxfp8", backend="triton")
            mxkv.save_ring_rows(given["kv_score"], given["slots"], given["state_cache"], backend="triton")

        step()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

    @pytest.mark.parametrize("capacity", [1, 2, 5])
    def test_ten_thousand_launches_give_one_result(self, capacity: int) -> None:
        """Each chunk reads the very ring row that it overwrites; whoever read it too late would read another row."""
        ops = Ops("triton", torch.device("cuda:0"))
        chunks = [(2 * capacity + 1, 1 + (i * 7) % 40) for i in range(200)]
        call = packed(chunks, capacity)
        call.state_cache[:, [i for i in range(capacity) if i != 2 * capacity % capacity]] = float("nan")
        given = call.arguments(ops)
        ring = given["state_cache"]
        before = ring.clone()
        out = torch.zeros(call.tokens, DIM, dtype=torch.bfloat16, device="cuda")
        want, want_ring, _ = run(Ops("torch", torch.device("cpu")), call)
        odd = torch.zeros((), dtype=torch.int64, device="cuda")
        latents = torch.tensor(sorted(expected(call)[0]), device="cuda")
        want_out, want_state = want.cuda()[latents].view(torch.int16), want_ring.cuda().view(torch.int32)
        graph = torch.cuda.CUDAGraph()
        mxkv.compress_norm(**given, out=out, backend="triton")
        with torch.cuda.graph(graph):
            ring.copy_(before)
            out.fill_(float("nan"))
            mxkv.compress_norm(**given, out=out, backend="triton")
            odd += (out[latents].view(torch.int16) != want_out).any()
            odd += (ring.view(torch.int32) != want_state).any()
        for _ in range(10_000):
            graph.replay()
        assert odd.item() == 0
