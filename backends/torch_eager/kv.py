"""Keys and values per head, in the order in which the specification says it: store, load and attention.

Tokens are taken in chunks, so that temporaries stay small; on a GPU tensors' values are read back, so that these calls
cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from mxkv import lloyd_max, numerics
from mxkv.backends.torch_eager import latents
from mxkv.contracts import AttendKVSpec, KVSpec, LoadKVSpec, StoreKVSpec
from mxkv.kv_formats import KVFormat, data_rows, hadamard_block, meta_rows

FP16_MAX = 65504.0
FP16_NAN = 0x7E00
NORM_FLOOR = 1e-8
SCALE_FLOOR = 1e-8
CORRECTION_FLOOR = 1e-16

_CHUNK = 1 << 20  # elements of keys at a time
_MOST_ROWS = 4096  # of a sequence at a time


def prepare(spec: KVSpec) -> Callable[..., None]:
    """What runs one kind of call."""
    functions: dict[str, Callable[..., None]] = {"store_kv": store_kv, "load_kv": load_kv, "attend_kv": attend_kv}
    return functools.partial(functions[spec.operation], spec)


@latents.never_compiled
def store_kv(
    spec: StoreKVSpec,
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    centroids: torch.Tensor | None,
    rotation: torch.Tensor | None,
) -> None:
    """Quantize keys and values and scatter them. See :func:`mxkv.store_kv`."""
    key, value = key.detach(), value.detach()  # quantizing has no gradient
    layout, fmt = spec.layout, spec.format
    slots = slots.long()
    tokens = latents._last_of_each(slots, (slots >= 0) & (slots < layout.num_slots))
    table, rotation = _tables(spec, centroids, rotation, kv_cache.device)
    for chunk in tokens.split(max(1, _CHUNK // (layout.heads * spec.head_dim))):
        codes, norm = encode_keys(key[chunk].to(torch.float32), fmt, table, rotation, spec.nonfinite)
        value_codes, scale, zero = encode_values(value[chunk].to(torch.float32), fmt.value_bits, spec.nonfinite)
        fields = torch.stack((scale, zero) if norm is None else (norm, scale, zero), -1)  # [n, heads, fields]
        block, place = slots[chunk] // layout.block_size, slots[chunk] % layout.block_size
        data_rows(kv_cache, layout)[block, place] = torch.cat((codes, value_codes), -1)
        meta_rows(kv_cache, layout)[block, place] = fields.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))


@latents.never_compiled
def load_kv(
    spec: LoadKVSpec,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    centroids: torch.Tensor | None,
    rotation: torch.Tensor | None,
) -> None:
    """Gather keys and values and dequantize them. See :func:`mxkv.load_kv`."""
    layout = spec.layout
    slots = slots.long()
    valid = (slots >= 0) & (slots < layout.num_slots)
    if not layout.num_slots:
        key.zero_()
        value.zero_()
        return
    table, rotation = _tables(spec, centroids, rotation, kv_cache.device)
    step = max(1, _CHUNK // (layout.heads * spec.head_dim))
    for start in range(0, slots.shape[0], step):
        here = slice(start, start + step)
        keys, values = _read(spec, kv_cache, torch.where(valid[here], slots[here], 0), table)
        if spec.format.normed:
            keys = turn_back(keys, rotation)
        for rows, out in ((keys, key), (values, value)):
            rows = latents.saturate(rows, out.dtype, keep_infinite=False)
            out[here] = torch.where(valid[here, None, None], rows, 0.0).to(out.dtype)


def _read(
    spec: LoadKVSpec | AttendKVSpec, kv_cache: torch.Tensor, slots: torch.Tensor, table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, as they were rotated, and values of slots that exist, fp32 [n, heads, head_dim]."""
    layout, fmt = spec.layout, spec.format
    at = (slots // layout.block_size, slots % layout.block_size)
    codes = data_rows(kv_cache, layout)[at]  # [n, heads, bytes]
    fields = meta_rows(kv_cache, layout)[at].view(torch.float16).squeeze(-1).to(torch.float32)  # [n, heads, fields]
    keys = codes[..., : layout.key_bytes]
    if table is None:
        keys = numerics.decode_e4m3(keys)
    else:
        keys = fields[..., :1] * table[unpack(keys, fmt.key.bits).int()]
    values = unpack(codes[..., layout.key_bytes :], fmt.value_bits).to(torch.float32)
    return keys, values * fields[..., -2:-1] + fields[..., -1:]


def _tables(
    spec: KVSpec, centroids: torch.Tensor | None, rotation: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The centroids, None for FP8 keys, and the rotation, None for the Hadamard matrix."""
    if not spec.format.normed:
        return None, None
    if centroids is None:
        centroids = torch.tensor(lloyd_max.centroids(spec.head_dim, spec.format.key.bits), device=device)
    return centroids.detach(), None if rotation is None else rotation.detach()


def butterfly(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [..., D] times the orthonormal Hadamard matrix of D, or of its blocks: stages 1, 2, 4 …, then the factor."""
    block = hadamard_block(rows.shape[-1])
    half = 1
    while half < block:
        pairs = rows.unflatten(-1, (-1, 2, half))
        x, y = pairs[..., 0, :], pairs[..., 1, :]
        rows = torch.stack((x + y, x - y), -2).flatten(-3)
        half *= 2
    turned: torch.Tensor = rows * block**-0.5
    return turned


def turn(rows: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    """fp32 [..., D] rotated."""
    return butterfly(rows) if rotation is None else rows @ rotation.T


def turn_back(rows: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    """The inverse of :func:`turn`; a Hadamard matrix is its own."""
    return butterfly(rows) if rotation is None else rows @ rotation


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] codes of 3 or 4 bits (uint8) to [..., n * bits / 8] bytes, the first code in the lowest bits."""
    if bits == 4:
        return numerics.pack_nibbles(codes)
    shifts = torch.arange(0, 24, 3, device=codes.device, dtype=torch.int32)
    words = (codes.unflatten(-1, (-1, 8)).int() << shifts).sum(-1, dtype=torch.int32)
    packed: torch.Tensor = words[..., None] >> torch.arange(0, 24, 8, device=codes.device)
    return packed.flatten(-2).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    if bits == 4:
        return numerics.unpack_nibbles(packed)
    shifts = torch.arange(0, 24, 8, device=packed.device, dtype=torch.int32)
    words = (packed.unflatten(-1, (-1, 3)).int() << shifts).sum(-1, dtype=torch.int32)
    codes: torch.Tensor = (words[..., None] >> torch.arange(0, 24, 3, device=packed.device)) & 7
    return codes.flatten(-2).to(torch.uint8)


def encode_keys(
    rows: torch.Tensor, format: KVFormat, table: torch.Tensor | None, rotation: torch.Tensor | None, nonfinite: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 keys [..., D] to codes [..., key_bytes] and, where they have one, norms fp16 [...]."""
    lost = ~rows.isfinite()
    if nonfinite == "sanitize":
        rows = rows.nan_to_num(nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX)
    if table is None:
        codes = numerics.encode_e4m3(rows)
        return (codes if nonfinite == "sanitize" else codes.masked_fill(lost, numerics.E4M3_NAN)), None
    row_lost = lost.any(-1) & (nonfinite == "propagate")
    rows = torch.where(row_lost[..., None], 0.0, rows)
    norm = rows.square().sum(-1).sqrt()
    rotated = turn(rows / (norm + NORM_FLOOR)[..., None], rotation)
    # The sum of two fp32 is rounded once, and halving it is exact.
    index = torch.bucketize(rotated, (table[:-1] + table[1:]) / 2, right=True)
    if format.norm_correction:
        norm = norm * (1 / (table[index].square().sum(-1) + CORRECTION_FLOOR).sqrt())
    codes = torch.where(row_lost[..., None], 0, index).to(torch.uint8)
    return pack(codes, format.key.bits), _fp16(norm, row_lost)


def encode_values(rows: torch.Tensor, bits: int, nonfinite: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 values [..., D] to codes [..., value_bytes], scales and zeros fp16 [...]."""
    lost = ~rows.isfinite().all(-1)
    if nonfinite == "sanitize":
        rows = rows.nan_to_num(nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX)
        lost = torch.zeros_like(lost)
    rows = torch.where(lost[..., None], 0.0, rows)
    most = (1 << bits) - 1
    low, high = (each.clamp(-FP16_MAX, FP16_MAX) for each in (rows.amin(-1), rows.amax(-1)))
    low = low + 0.0  # a zero of either sign may be the least: it is stored as +0
    scale = numerics.divide(high - low, float(most)).clamp(min=SCALE_FLOOR)
    steps = (rows - low[..., None]) / scale[..., None] + 0.5
    codes = steps.clamp(0, most).trunc().to(torch.uint8)
    return pack(codes, bits), _fp16(scale, lost), _fp16(low, lost)


def _fp16(x: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """fp32 clamped to fp16's finite range, NaN where it is lost."""
    nan = torch.full((), FP16_NAN, dtype=torch.int16, device=x.device).view(torch.float16)
    return torch.where(lost, nan, x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16))


@latents.never_compiled
def attend_kv(
    spec: AttendKVSpec,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor | None,
    sink: torch.Tensor | None,
    centroids: torch.Tensor | None,
    rotation: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    scale: float,
    window: int | None,
    num_splits: int | None,
) -> None:
    """Attend to pages. See :func:`mxkv.attend_kv`; the result has no splits and needs no workspace."""
    layout = spec.layout
    of_none = torch.ones(q.shape[0], dtype=torch.bool, device=q.device)  # queries that no sequence has
    if lse is not None:
        lse.fill_(-torch.inf)
    table, rotation = _tables(spec, centroids, rotation, kv_cache.device)
    sinks = None if sink is None else sink.detach().unflatten(0, (layout.heads, -1))[..., None]  # [heads, group, 1]
    lengths = seq_lens.clamp(0, block_table.shape[1] * layout.block_size).tolist()
    bounds = list(range(q.shape[0] + 1)) if query_start is None else query_start.clamp(0, q.shape[0]).tolist()
    for sequence, length in enumerate(lengths):
        first, count = bounds[sequence], bounds[sequence + 1] - bounds[sequence]
        step = max(1, _CHUNK // (min(max(length, 1), _MOST_ROWS) * spec.query_heads))
        for begin in range(first, first + count, step):
            here = slice(begin, min(begin + step, first + count))
            # The last row that each query sees, and the first.
            last = torch.arange(here.start, here.stop, device=q.device) + (length - first - count)
            least = 0 if window is None else (last - window + 1)[:, None]
            queries = q[here].detach().to(torch.float32)  # [n, query_heads, D]
            if table is not None:
                queries = turn(queries, rotation)
            queries = queries.unflatten(1, (layout.heads, -1)).permute(1, 2, 0, 3)  # [heads, group, n, D]
            top = queries.new_full(queries.shape[:3], -torch.inf)
            total, summed = torch.zeros_like(top), torch.zeros_like(queries)
            for start in range(0, length, _MOST_ROWS):
                row = torch.arange(start, min(start + _MOST_ROWS, length), device=q.device)
                block = block_table[sequence, row // layout.block_size].long()
                known = (block >= 0) & (block < layout.num_blocks)
                seen = known & (row <= last[:, None]) & (row >= least)  # [n, rows]
                used = seen.any(0)
                if not used.any():
                    continue
                row, seen = row[used], seen[:, used]
                slots = block[used] * layout.block_size + row % layout.block_size
                keys, values = (rows.transpose(0, 1) for rows in _read(spec, kv_cache, slots, table))
                logits = (queries @ keys[:, None].mT * scale).masked_fill(~seen, -torch.inf)
                raised = torch.maximum(top, logits.amax(-1))
                shift = torch.where(raised == -torch.inf, 0.0, raised)  # no row yet: -inf less -inf is NaN
                weights = (logits - shift[..., None]).exp()
                shrink = (top - shift).exp()
                total = total * shrink + weights.sum(-1)
                summed = summed * shrink[..., None] + _weighted(weights, values[:, None], seen)
                top = raised
            shift = torch.where(top == -torch.inf, 0.0, top)
            if lse is not None:
                lse[here] = (shift + total.log()).permute(2, 0, 1).flatten(1)
            # Where the sink is the larger, it is what the exponentials are taken relative to.
            larger = shift if sinks is None else torch.maximum(shift, sinks)
            divisor = total * (shift - larger).exp() + (0.0 if sinks is None else (sinks - larger).exp())
            result = summed * (shift - larger).exp()[..., None] / divisor[..., None]
            result = torch.where((top == -torch.inf)[..., None], 0.0, result)
            out[here] = result.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            of_none[here] = False
    out[of_none] = 0


def _weighted(weights: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """weights [.., n, rows] times values [.., rows, D]; NaN goes only to the queries that see it (seen [n, rows])."""
    lost = ~values.isfinite()
    if not lost.any():
        return weights @ values
    reached = seen.to(torch.float32) @ lost.to(torch.float32) > 0
    return (weights @ values.masked_fill(lost, 0.0)).masked_fill(reached, torch.nan)
