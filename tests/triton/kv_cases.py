"""The kernels' cases of the compile gate for keys and values: what is launched, and what its machine code must be."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch

import mxkv
from mxkv import KeyCode, KVFormat, kv_checks
from mxkv.backends.triton_gpu import kv
from mxkv.backends.triton_gpu.codec import paths_of
from mxkv.devices import Target

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCK_SIZE = 64
MOST_SPILLED = 64  # bytes
# Where 12 programs of 168 registers are to fit: with Triton 3.9. With 3.6, which was measured, none.
MOST_SPILLED_IN_TWELVE = 100
MOST_SHARED_LOADS = (24, 90)
MOST_SHARED_LOADS_OF_SIGNS = 2
K3V3 = KVFormat("k3v3", KeyCode.MSE3, 3)


@dataclasses.dataclass(frozen=True)
class KVCase:
    """One launch of an operation on keys and values to compile. A costly one takes long: few targets do it in CI."""

    operation: str
    format: KVFormat
    dim: int = 128
    heads: int = 8
    group: int = 4
    dtype: torch.dtype = BF16
    packed: bool = False
    tabled: bool = False
    rotated: bool = False
    splits: int = 1
    software: bool = False
    main: bool = False
    costly: bool = False

    @property
    def name(self) -> str:
        parts = [self.operation, self.format.name, str(self.dim), f"heads={self.heads}"]
        parts += [f"group={self.group}"] * (self.operation == "attend_kv")
        parts += [str(self.dtype).removeprefix("torch.")] * (self.dtype != BF16)
        parts += [name for name in ("packed", "tabled", "rotated", "software") if getattr(self, name)]
        parts += [f"splits={self.splits}"] * (self.splits > 1)
        return " ".join(parts)

    @property
    def products(self) -> bool:
        """Whether a matrix product takes a part of a rotation."""
        wide = self.dim % 64 == 0 or (self.dim % 32 == 0 and 3 not in (self.format.key.bits, self.format.value_bits))
        normed = self.operation == "store_kv" and self.format.normed and not (self.rotated or self.software)
        return normed and wide and self.dtype != FP32

    def launch(self, recorder: type, target: Target) -> Any:
        """What the backend launches, recorded."""
        names = ("store_kv_kernel", "load_kv_kernel", "attend_kv_kernel", "reduce_kernel")
        kernels = {name: getattr(kv, name) for name in names}
        recorders = {name: recorder(kernel) for name, kernel in kernels.items()}
        for name, stand_in in recorders.items():
            setattr(kv, name, stand_in)
        try:
            self._call(target)
        finally:
            for name, kernel in kernels.items():
                setattr(kv, name, kernel)
        return recorders[f"{self.operation}_kernel"]

    def _call(self, target: Target) -> None:
        paths = paths_of(target)
        if self.software:
            paths = dataclasses.replace(paths, pairs="none", e4m3="software", scaled_reads=False)
        cache = mxkv.empty_kv_cache(self.format, 4, BLOCK_SIZE, self.heads, self.dim)
        centroids = torch.zeros(1 << self.format.key.bits) if self.tabled else None
        rotation = torch.zeros(self.dim, self.dim) if self.rotated else None
        name, tokens = self.format.spec, 64
        if self.operation == "attend_kv":
            q = torch.zeros(4, self.heads * self.group, self.dim, dtype=self.dtype)
            blocks, lengths = torch.zeros(4, 32, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
            starts = torch.zeros(5, dtype=torch.int32) if self.packed else None
            window = 128 if self.packed else None
            spec = kv_checks.attend_kv_spec(
                q, cache, q, blocks, lengths, name, starts, None, window, None, centroids, rotation, None, None
            )
            kv.AttendKVLaunch(spec, paths)(
                q, cache, q, blocks, lengths, starts, None, centroids, rotation, None, None, 0.1, window, self.splits,
                config=kv.attend_kv_default(spec, target),
            )  # fmt: skip
            return
        rows, slots = torch.zeros(tokens, self.heads, self.dim, dtype=self.dtype), torch.arange(tokens)
        if self.operation == "store_kv":
            stored = kv_checks.store_kv_spec(cache, rows, rows, slots, name, centroids, rotation, "propagate")
            launch = kv.RowsLaunch(stored, paths)
            launch(cache, rows, rows, slots, centroids, rotation, config=kv.rows_default(stored, target, paths))
        else:
            loaded = kv_checks.load_kv_spec(cache, slots, name, self.dim, self.dtype, centroids, rotation)
            launch = kv.RowsLaunch(loaded, paths)
            launch(cache, slots, rows, rows, centroids, rotation, config=kv.rows_default(loaded, target, paths))

    def problems(self, code: Any, target: Target) -> list[str]:
        """What is wrong with the machine code."""
        found = []
        twelve = self.operation == "attend_kv" and target.vendor == "nvidia" and code.registers == 168
        if self.main and code.spills > (MOST_SPILLED_IN_TWELVE if twelve else MOST_SPILLED):
            found.append(f"spills {code.spills} bytes or registers")
        words = self.operation == "attend_kv" and 3 in (self.format.key.bits, self.format.value_bits)
        if self.main and code.widest_load < (8 if words else 16):
            found.append(f"widest load is {code.widest_load} bytes")
        if self.main and self.operation == "attend_kv" and target.vendor == "nvidia":
            shared = len(re.findall(r"\b(?:ld\.shared|ldmatrix)", code.text))
            most = MOST_SHARED_LOADS[self.format.normed]  # operands are made in registers; rotating queries needs some
            if shared > most:
                found.append(f"{shared} loads from shared memory, expected at most {most}")
        if self.products and target.vendor == "nvidia":
            shared = len(re.findall(r"\b(?:ld\.shared|ldmatrix)", code.text))
            if shared > MOST_SHARED_LOADS_OF_SIGNS:  # rows and products stay in registers
                found.append(f"{shared} loads from shared memory, expected at most {MOST_SHARED_LOADS_OF_SIGNS}")
        for instruction, expected in self._instructions(target).items():
            if bool(re.search(instruction, code.text)) != expected:
                found.append(f"{instruction} is {'absent' if expected else 'present'}")
        return found

    def _instructions(self, target: Target) -> dict[str, bool]:
        wanted: dict[str, bool] = {}
        fp8 = self.format.key is KeyCode.FP8
        if target.vendor == "nvidia":
            cvt = target.fp8 == "e4nv" and not self.software
            if self.operation == "store_kv":
                wanted[r"cvt\.rn\.satfinite\.e4m3x2\.f32"] = fp8 and cvt
                wanted[r"tanh\.approx\.f32"] = not (fp8 or self.tabled or self.rotated or self.software)
                if self.products:
                    wanted[r"mma\.sync"] = True
                    wanted["wgmma"] = False
            elif fp8:
                wanted[r"cvt\.rn\.f16x2\.e4m3x2"] = cvt
            if self.operation == "attend_kv":
                wanted[r"mma\.sync"] = True
        elif target.fp8 == "fnuz":
            wanted[r"v_cvt\w*_(?:fp8|bf8|fp4)"] = False  # they speak another code
        return wanted


def cases(everything: bool) -> Iterator[KVCase]:
    """The main shapes, and each other choice once or twice; or more of everything."""
    k8v4, k4v4, k3v4, k3v3 = mxkv.KV_FORMATS.values()
    yield KVCase("store_kv", k8v4, main=True)
    yield KVCase("store_kv", k4v4, main=True, costly=True)
    yield KVCase("store_kv", k4v4, 64)
    yield KVCase("store_kv", K3V3, 16, tabled=True, dtype=FP16)
    yield KVCase("store_kv", k3v3, 16, rotated=True, dtype=FP32)
    yield KVCase("load_kv", k3v4, 32)
    for format in (k8v4, k4v4, k3v3):
        yield KVCase("attend_kv", format, main=True, splits=4, costly=format == k3v3)
    yield KVCase("attend_kv", k3v4, 48, heads=2, group=1, packed=True, dtype=FP16, costly=True)
    yield KVCase("attend_kv", k8v4, 32, group=16, software=True)
    if everything:
        yield KVCase("store_kv", k4v4, 256)
        yield KVCase("store_kv", k4v4, software=True)
        yield KVCase("load_kv", k8v4)
        yield KVCase("load_kv", k4v4, 192, dtype=FP32)
        yield KVCase("load_kv", k4v4, 64, rotated=True, tabled=True)
        for format in mxkv.KV_FORMATS.values():
            for dim in (32, 64, 96, 128, 192, 256):
                yield KVCase("store_kv", format, dim)
                for packed in (False, True):
                    yield KVCase("attend_kv", format, dim, packed=packed, group=1 if packed else 8)
        yield KVCase("attend_kv", k4v4, 64, rotated=True, tabled=True, dtype=FP16)
