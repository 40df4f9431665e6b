"""Requests cut into chunks and packed into calls, and what these must give: from the specification, in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import mxkv
from tests.support import Ops

DIM, RING_DIM, EPS = 512, 1024, 1e-6
Doubles = npt.NDArray[np.float64]


@dataclasses.dataclass
class Call:
    """The arguments of one call, on the CPU."""

    kv_score: torch.Tensor
    positions: torch.Tensor
    state_cache: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    token_to_request: torch.Tensor
    weight: torch.Tensor
    eps: float = EPS
    compress_ratio: int = 2
    prev_rows: torch.Tensor | None = None
    prev_row_indices: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self.slots.shape[0])

    def arguments(self, ops: Ops) -> dict[str, Any]:
        """Copies on the device of the operations; strides stay."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: on(ops, value) if isinstance(value, torch.Tensor) else value for name, value in fields.items()}


def on(ops: Ops, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on a device with the strides that it has."""
    base = torch.full((tensor.untyped_storage().nbytes() // tensor.element_size(),), 0, dtype=tensor.dtype)
    base.copy_(tensor.as_strided(base.shape, (1,), 0))
    return base.to(ops.device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def rows_of_scores(n: int, seed: int, width: int = RING_DIM) -> torch.Tensor:
    """fp32 rows: values of several magnitudes, and scores of which some decide alone."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, width, generator=g)
    rows[:, :DIM] *= 2.0 ** torch.randint(-6, 7, (n, 1), generator=g)
    rows[:, DIM:] *= 3 ** torch.randint(0, 4, (n, 1), generator=g)
    return rows


def weight_of(seed: int = 0) -> torch.Tensor:
    return (1 + 0.2 * torch.randn(DIM, generator=torch.Generator().manual_seed(seed))).bfloat16()


def packed(
    chunks: list[tuple[int, int]],
    capacity: int,
    *,
    seed: int = 0,
    blocks: list[int] | None = None,
    rows: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    index: torch.dtype = torch.int64,
) -> Call:
    """A call of chunks (first position, tokens), each of a request whose ring is the block of its number."""
    blocks = list(range(len(chunks))) if blocks is None else blocks
    positions = [first + i for first, count in chunks for i in range(count)]
    requests = [number for number, (_, count) in enumerate(chunks) for _ in range(count)]
    starts = np.cumsum([0, *(count for _, count in chunks)]).tolist()
    slots = [blocks[r] * capacity + p % capacity for p, r in zip(positions, requests, strict=True)]
    rows = rows_of_scores(len(positions), seed) if rows is None else rows
    state = rows_of_scores((max(blocks, default=0) + 1) * capacity, seed + 1) if state is None else state
    return Call(
        rows, torch.tensor(positions, dtype=index), state.view(-1, capacity, RING_DIM),
        torch.tensor(slots, dtype=index), torch.tensor(starts, dtype=index), torch.tensor(requests, dtype=index),
        weight_of(seed),
    )  # fmt: skip


def latent_of(first: torch.Tensor | None, second: torch.Tensor, call: Call) -> tuple[Doubles, Doubles]:
    """The latent of a group in fp64, and how large the terms are that it sums up."""
    kv = second[:DIM].double().numpy()
    size = np.abs(kv)
    if first is not None:
        scores = np.stack((first[DIM:].double().numpy(), second[DIM:].double().numpy()))
        weights = np.exp(scores - scores.max(0))
        weights /= weights.sum(0)
        values = np.stack((first[:DIM].double().numpy(), kv))
        kv, size = (values * weights).sum(0), (np.abs(values) * weights).sum(0)
    with np.errstate(invalid="ignore"):  # an infinity times the 0 that it makes the factor
        factor = call.weight.double().numpy() / np.sqrt(np.mean(kv * kv) + call.eps)
        return kv * factor, size * np.abs(factor)


def expected(call: Call) -> tuple[dict[int, tuple[Doubles, Doubles]], torch.Tensor]:
    """The latents of the tokens that have one, and the rings afterwards."""
    state = call.state_cache.clone()
    latents: dict[int, tuple[Doubles, Doubles]] = {}
    if call.compress_ratio == 1:
        for token in range(call.tokens):
            if call.slots[token] >= 0:
                latents[token] = latent_of(None, call.kv_score[token], call)
        return latents, state
    blocks, capacity, _ = state.shape
    for request in range(len(call.query_start) - 1):
        begin, end = int(call.query_start[request]), min(int(call.query_start[request + 1]), call.tokens)
        for token in range(begin, end):
            position, slot = int(call.positions[token]), int(call.slots[token])
            if position < 0 or position % 2 == 0 or slot < 0 or (token <= begin + 1 and call.slots[begin] < 0):
                continue
            if token > begin:
                first = call.kv_score[token - 1]
            else:
                index = -1 if call.prev_row_indices is None else int(call.prev_row_indices[request])
                if index >= 0:
                    assert call.prev_rows is not None
                    if index >= call.prev_rows.shape[0]:
                        continue
                    first = call.prev_rows[index]
                elif slot >= blocks * capacity:
                    continue
                else:
                    first = call.state_cache[slot // capacity, (position - 1) % capacity]
            latents[token] = latent_of(first, call.kv_score[token], call)
        if call.prev_rows is None and begin < end and call.slots[begin] >= 0:
            for token in range(max(begin, end - capacity), end):
                slot = int(call.slots[token])
                if 0 <= slot < blocks * capacity:
                    state[slot // capacity, slot % capacity] = call.kv_score[token]
    return latents, state


def assert_latents(out: torch.Tensor, latents: dict[int, tuple[Doubles, Doubles]], untouched: torch.Tensor) -> None:
    """Rows within one bf16 ulp of fp64's (and of what fp32 loses where terms cancel); all other rows as they were."""
    have = out.detach().cpu()
    for token in range(have.shape[0]):
        if token not in latents:
            assert torch.equal(have[token].view(torch.int16), untouched[token].view(torch.int16)), f"row {token}"
            continue
        want, size = latents[token]
        ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(want), 2.0**-126))) - 7)
        error = np.abs(have[token].double().numpy() - want)
        assert (error <= ulp + 2.0**-19 * size).all(), f"row {token}: off by {np.max(error / ulp)} ulp"


def run(ops: Ops, call: Call, rows_out: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a call leaves in ``out`` and in the rings, and what ``out`` was before."""
    before = torch.full((call.tokens if rows_out is None else rows_out, DIM), -7.0).bfloat16()
    out, arguments = before.clone().to(ops.device), call.arguments(ops)
    mxkv.compress_norm(**arguments, out=out, backend=ops.backend)
    return out.cpu(), arguments["state_cache"].cpu(), before


def check(ops: Ops, call: Call) -> torch.Tensor:
    """Run a call, and compare everything that it may have written. Gives the latents."""
    latents, state = expected(call)
    out, ring, before = run(ops, call)
    assert_latents(out, latents, before)
    assert torch.equal(ring.view(torch.int32), state.view(torch.int32))
    return out
