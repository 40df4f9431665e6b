"""The attention kernels' cases of the compile gate: what is launched, and what its machine code must be."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch

import mxkv
from mxkv import Element, Format, Placement, Scale, checks
from mxkv.backends.triton_gpu import attention
from mxkv.backends.triton_gpu.codec import paths_of
from mxkv.backends.triton_gpu.config import AttendConfig, attend_default
from mxkv.devices import Target

BF16, FP16 = torch.bfloat16, torch.float16
QUERIES, ROWS, BLOCK_SIZE = 4, 2048, 64
# Bytes, on Hopper, with tiles of 64 rows: measured faster than smaller ones, which spill less.
MOST_SPILLED = 600  # by 64 heads at a time
MOST_SPILLED_FEW = 128  # by packed rows and 16 heads, with Triton 3.9; with 3.6, which was measured, 16 at most
ODD_TAIL = Format("odd-tail", Element.E2M1, Scale.E8M0, 8, Placement.INLINE, tail=2)


@dataclasses.dataclass(frozen=True)
class AttendCase:
    """One attention to compile; of the two kernels the one that ``kernel`` names."""

    format: Format
    dim: int = 512
    value_dim: int = 0
    heads: int = 16
    dtype: torch.dtype = BF16
    selection: str = "dense"
    splits: int = 1
    sink: bool = False
    index: torch.dtype = torch.int32
    kernel: str = "attend_kernel"
    main: bool = False
    software: bool = False
    config: AttendConfig | None = None

    @property
    def name(self) -> str:
        parts = [self.kernel.removesuffix("_kernel"), self.format.name, str(self.dim)]
        parts += [f"values={self.value_dim}"] * bool(self.value_dim) + [f"heads={self.heads}"]
        parts += ["fp16"] * (self.dtype == FP16) + [self.selection] * (self.selection != "dense")
        parts += [f"splits={self.splits}"] * (self.splits > 1) + ["sink"] * self.sink
        parts += ["int64"] * (self.index == torch.int64) + ["software"] * self.software
        parts += [",".join(map(str, dataclasses.astuple(self.config)))] if self.config else []
        return " ".join(parts)

    def launch(self, recorder: type, target: Target) -> Any:
        """What the backend launches, recorded."""
        kernels = {name: getattr(attention, name) for name in ("attend_kernel", "reduce_kernel")}
        recorders = {name: recorder(kernel) for name, kernel in kernels.items()}
        for name, stand_in in recorders.items():
            setattr(attention, name, stand_in)
        try:
            self._call(target)
        finally:
            for name, kernel in kernels.items():
                setattr(attention, name, kernel)
        return recorders[self.kernel]

    def _call(self, target: Target) -> None:
        cache = mxkv.empty_cache(self.format, 4, BLOCK_SIZE, self.dim)
        q = torch.zeros(QUERIES, self.heads, self.dim, dtype=self.dtype)
        out = torch.empty(QUERIES, self.heads, self.value_dim or self.dim, dtype=self.dtype)
        rows = {
            "ragged": (torch.zeros(QUERIES * ROWS, dtype=self.index), torch.zeros(QUERIES + 1, dtype=self.index)),
            "dense": (torch.zeros(QUERIES, ROWS, dtype=self.index), None),
            "pages": (
                torch.zeros(QUERIES, ROWS // BLOCK_SIZE, dtype=self.index), torch.zeros(QUERIES, dtype=self.index),
            ),
        }[self.selection]  # fmt: skip
        scale = torch.ones(1) if self.format.scale is Scale.TENSOR else None
        sink = torch.zeros(self.heads) if self.sink else None
        lse = torch.empty(QUERIES, self.heads) if self.sink else None
        selected = (None, None, *rows) if self.selection == "pages" else (*rows, None, None)
        spec = checks.attend_spec(q, cache, out, *selected, self.format.spec, scale, sink, None, lse, None)
        config = self.config or attend_default(spec, target, QUERIES, ROWS)
        paths = paths_of(target)
        if self.software:
            paths = dataclasses.replace(paths, pairs="none", e4m3="software", scaled_reads=False)
        attention.AttendLaunch(spec, paths)(
            q, cache, out, *rows, scale, sink, lse, None, self.dim**-0.5, self.splits, config=config
        )

    def problems(self, code: Any, target: Target) -> list[str]:
        """What is wrong with the machine code."""
        found = []
        most = 0
        if target.name == "hopper":
            packed = self.format.element is not Element.BF16
            most = MOST_SPILLED if self.heads == 64 else MOST_SPILLED_FEW if packed else 0
        if self.main and code.spills > most:
            found.append(f"spills {code.spills} bytes or registers")
        if self.main and code.widest_load < 16:
            found.append(f"widest load is {code.widest_load} bytes, expected 16")
        for instruction, expected in self._instructions(target).items():
            if bool(re.search(instruction, code.text)) != expected:
                found.append(f"{instruction} is {'absent' if expected else 'present'}")
        return found

    def _instructions(self, target: Target) -> dict[str, bool]:
        if self.kernel != "attend_kernel":
            return {}
        packed = self.format.element is Element.E2M1
        if target.vendor == "nvidia":
            plain = self.format.element is Element.BF16
            return {
                r"cvt\.[\w.]*e2m1x2": False,
                r"cvt\.rn\.f16x2\.e4m3x2": self.format.element is Element.E4M3
                and target.fp8 == "e4nv"
                and not self.software,
                **({r"cp\.async": True} if plain and self.dim % 2 == 0 else {}),
                r"prmt\.b32 lower": packed and not self.software,
                r"mma\.|wgmma|tcgen05": True,
            }
        powers = packed and self.format.scale is Scale.E8M0
        return {
            r"v_cvt_scalef32_pk_bf16_fp4": powers and target.fp4_unpack and not self.software,
            r"v_mfma": True,
            # gfx942's fp8 instructions speak another code (fnuz), and it has no converter for FP4.
            **({r"v_cvt\w*_(?:fp8|bf8|fp4)": False} if target.fp8 == "fnuz" else {}),
        }


def cases(everything: bool) -> Iterator[AttendCase]:
    """The main shapes, and each other choice once or twice; or every format, and more of everything."""
    formats = list(mxkv.FORMATS.values())
    mxfp4, bf16 = mxkv.FORMATS["mxfp4"], mxkv.FORMATS["bf16"]
    for format in formats if everything else [mxkv.FORMATS[name] for name in ("mxfp4", "mxfp8", "dsv4", "bf16")]:
        yield AttendCase(format, main=True)
    for format in formats if everything else [mxfp4, bf16]:
        yield AttendCase(format, heads=64, main=True, sink=True)
    yield AttendCase(mxkv.FORMATS["nvfp4"], 80, heads=1, selection="pages", splits=3, index=torch.int64)
    yield AttendCase(mxkv.FORMATS["fp8"], 96, heads=3, selection="ragged", dtype=FP16)
    yield AttendCase(ODD_TAIL, 26, heads=3)
    yield AttendCase(mxfp4, 64, splits=8, sink=True, kernel="reduce_kernel")
    yield AttendCase(mxfp4, 64, software=True)
    if everything:
        yield AttendCase(mxfp4, 576, value_dim=512)
        yield AttendCase(bf16, 576, value_dim=512, heads=64)
        yield AttendCase(bf16, 576, value_dim=500, dtype=FP16)
        yield AttendCase(bf16, 33, heads=3)
        yield AttendCase(mxkv.FORMATS["mxfp8"], software=True)
        for format, dim, heads in itertools.product(formats, (64, 96, 192, 320, 576, 1024), (1, 16, 64, 256)):
            if format.accepts_dim(dim):
                for dtype, splits in ((BF16, 1), (FP16, 3)):
                    yield AttendCase(format, dim, heads=heads, dtype=dtype, splits=splits)
        for format, selection, index in itertools.product(
            formats, ("ragged", "dense", "pages"), (torch.int32, torch.int64)
        ):
            yield AttendCase(format, selection=selection, index=index, sink=True)
