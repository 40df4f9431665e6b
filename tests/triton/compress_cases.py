"""The compression kernels' cases of the compile gate: what is launched, and what its machine code must be."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch

import mxkv
from mxkv import Element, Format, Scale, compression_checks
from mxkv.backends.triton_gpu import compression
from mxkv.backends.triton_gpu.codec import paths_of
from mxkv.backends.triton_gpu.config import CompressConfig, compress_default
from mxkv.contracts import COMPRESS_DIM, ROPE_DIM
from mxkv.devices import Target
from tests.compression_cases import packed
from tests.support import CUSTOM

MOST_SPILLED = 16  # bytes, by newer compilers at the limit of 64 registers; on an H200 that limit saves much time
MANY_TOKENS, H200_COMPUTE_UNITS = 1 << 18, 132
FEW = CompressConfig(1, 64, 4)  # of few tokens


@dataclasses.dataclass(frozen=True)
class CompressCase:
    """One compression to compile: into a cache of a format where there is one."""

    format: Format | None = None
    ratio: int = 2
    rope: bool = True
    latents: bool = False
    previous: bool = False
    nonfinite: str = "propagate"
    index: torch.dtype = torch.int64
    capacity: int = 8
    save: bool = False
    rings: bool = True
    config: CompressConfig | None = None

    @property
    def name(self) -> str:
        parts = ["save_ring_rows"] if self.save else ["compress_store" if self.format else "compress_norm"]
        parts += [self.format.name] if self.format else []
        parts += [f"ratio={self.ratio}"]
        parts += ["rope"] * (self.rope and bool(self.format)) + ["latents"] * self.latents
        parts += ["previous"] * self.previous + [self.nonfinite] * (self.nonfinite != "propagate")
        parts += ["int32"] * (self.index == torch.int32) + [f"capacity={self.capacity}"] * (self.capacity != 8)
        parts += [] if self.rings else ["no rings"]
        parts += [",".join(map(str, dataclasses.astuple(self.config)))] if self.config else []
        return " ".join(parts)

    def launch(self, recorder: type, target: Target) -> Any:
        """What the backend launches, recorded."""
        name = "save_kernel" if self.save else "compress_kernel"
        kernel = getattr(compression, name)
        stand_in = recorder(kernel)
        setattr(compression, name, stand_in)
        try:
            self._call(target)
        finally:
            setattr(compression, name, kernel)
        return stand_in

    def _call(self, target: Target) -> None:
        call = packed([(0, 32), (5, 32)], self.capacity, index=self.index)
        if not self.rings:
            call = dataclasses.replace(call, state_cache=call.state_cache[:0])
        rows = call.kv_score if self.ratio == 2 else call.kv_score[:, :COMPRESS_DIM].contiguous()
        paths = paths_of(target)
        if self.save:
            spec = compression_checks.save_ring_spec(rows, call.slots, call.state_cache)
            launch: Any = compression.SaveRingLaunch(spec, paths)
            return launch(rows, call.slots, call.state_cache, config=self._config(spec, target))
        previous = (rows, torch.zeros(2, dtype=self.index)) if self.previous else (None, None)
        tokens = mxkv.contracts.Packed(
            rows, call.positions, call.slots, call.query_start, call.token_to_request, call.state_cache, *previous,
            call.weight, call.eps,
        )  # fmt: skip
        out = torch.empty(call.tokens, COMPRESS_DIM, dtype=torch.bfloat16)
        if self.format is None:
            norm = compression_checks.compress_spec(tokens, self.ratio, out)
            return compression.CompressLaunch(norm, paths)(tokens, out, config=self._config(norm, target))
        cache = mxkv.empty_cache(self.format, 4, 16, COMPRESS_DIM)
        table = torch.zeros(64, ROPE_DIM) if self.rope else None
        scale = torch.ones(1) if self.format.scale is Scale.TENSOR else None
        asked = out if self.latents else None
        stored = compression_checks.compress_store_spec(
            tokens, self.ratio, cache, call.slots, asked, self.format.spec, table, scale, self.nonfinite
        )
        compression.CompressStoreLaunch(stored, paths)(
            tokens, cache, call.slots, table, scale, asked, config=self._config(stored, target)
        )

    def _config(self, spec: Any, target: Target) -> CompressConfig:
        return self.config or compress_default(spec, target, MANY_TOKENS, H200_COMPUTE_UNITS)

    def problems(self, code: Any, target: Target) -> list[str]:
        """What is wrong with the machine code."""
        found = []
        # Where AMD's compiler unrolls the loop over tokens it runs out of scalar registers; no default has one there.
        tolerated = MOST_SPILLED if target.vendor == "nvidia" and self.ratio == 2 else 0
        if code.spills > tolerated and not (target.vendor == "amd" and self.config):
            found.append(f"spills {code.spills} bytes or registers")
        if code.widest_load < 16:
            found.append(f"widest load is {code.widest_load} bytes, expected 16")
        narrow = re.findall(r"ld\.global(?:\.\w+)*\.b64 \t?[^{]", code.text)
        if target.vendor == "nvidia" and self.format is None and self.index == torch.int32 and narrow:
            found.append(f"{len(narrow)} loads of rows are 8 bytes wide, expected 16")
        saves = self.ratio == 2 and not self.previous and not self.save
        barrier = bool(re.search(r"\bbar(?:rier)?\.(?:warp\.)?sync", code.text))
        if target.vendor == "nvidia" and (saves and not barrier):
            found.append("the barrier between a ring's read and its write is absent")
        e4m3 = bool(self.format) and self.format.element is Element.E4M3  # type: ignore[union-attr]
        if target.vendor == "nvidia" and (e4m3 or target.fp8 != "e4nv"):
            hardware = target.fp8 == "e4nv" and e4m3
            if bool(re.search(r"cvt\.rn\.satfinite\.e4m3x2\.f32", code.text)) != hardware:
                found.append(f"the E4M3 converter is {'absent' if hardware else 'present'}")
        return found


def cases(everything: bool) -> Iterator[CompressCase]:
    """The main shapes, and each other choice once; or every format, and more of everything."""
    formats = mxkv.FORMATS
    yield CompressCase()
    yield CompressCase(ratio=1, index=torch.int32)
    yield CompressCase(previous=True, index=torch.int32)
    yield CompressCase(previous=True, rings=False)
    yield CompressCase(formats["mxfp8"])
    yield CompressCase(formats["nvfp4"], nonfinite="sanitize", capacity=1)
    yield CompressCase(formats["dsv4"], latents=True, index=torch.int32)
    yield CompressCase(formats["bf16"], ratio=1, rope=False)
    yield CompressCase(save=True)
    yield CompressCase(formats["mxfp8"], config=FEW)
    if everything:
        for format in (*formats.values(), *(custom for custom in CUSTOM if custom.accepts_dim(COMPRESS_DIM))):
            for ratio, latents in ((1, True), (2, False)):
                yield CompressCase(format, ratio, latents=latents)
                yield CompressCase(format, ratio, rope=False, nonfinite="sanitize", index=torch.int32)
        for tokens in (1, 2, 4, 8):
            yield CompressCase(formats["mxfp8"], config=CompressConfig(tokens, 64))
