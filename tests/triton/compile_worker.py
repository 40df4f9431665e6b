"""Compile the Triton kernels for one target, with no GPU, and check the machine code. One process a target.

    MXKV_TARGET=hopper python -m tests.triton.compile_worker [--all] [--match TEXT]

Each line of output is a case's name, written before it is compiled (a bad inline-assembly constraint kills the process:
the last line names the culprit), then its verdict as JSON. The launches are the backend's own: its launch functions run
on tensors of the CPU, and what they would launch is recorded, specialised by Triton's own rules and compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import mxkv
from mxkv import Element, Format, Placement, Scale, checks, devices
from mxkv.backends.triton_gpu import latents
from mxkv.backends.triton_gpu.config import LaunchConfig, default_config
from mxkv.contracts import ROPE_DIM
from mxkv.devices import Target
from tests.triton import attend_cases, compress_cases, kv_cases

H200_COMPUTE_UNITS = 132
MANY_TOKENS = 1 << 16
COSTLY_ON = ("hopper", "gfx950")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPE_NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
WIDEST_ACCESS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch to compile."""

    operation: str
    format: Format
    dtype: torch.dtype
    dim: int = 512
    rope: bool = False
    nonfinite: str = "propagate"
    ratio: int = 1
    gap: int = 0
    config: LaunchConfig | None = None
    index: torch.dtype = torch.int64

    @property
    def name(self) -> str:
        parts = [self.operation, self.format.name, DTYPE_NAMES[self.dtype], str(self.dim)]
        parts += ["rope"] * self.rope + [self.nonfinite] * (self.nonfinite != "propagate")
        parts += [f"ratio={self.ratio}"] * (self.ratio > 1) + [f"gap={self.gap}"] * (self.gap > 0)
        parts += ["int32"] * (self.index == torch.int32)
        if self.config:
            parts.append(f"tokens={self.config.block_tokens},warps={self.config.num_warps}")
        return " ".join(parts)

    @property
    def aligned(self) -> bool:
        """Whether rows and records allow the widest accesses."""
        power_of_two = self.format.group & (self.format.group - 1) == 0
        whole = power_of_two and self.gap == 0 and self.format.value_bytes(self.dim) % WIDEST_ACCESS == 0
        return whole and self.format.record_bytes(self.dim) % WIDEST_ACCESS == 0 and self.dim % 128 == 0


ODD_GROUPS = Format("groups-of-24", Element.E2M1, Scale.E8M0, 24, Placement.INLINE)
EIGHTS = Format("fp8-groups-of-128", Element.E4M3, Scale.E4M3, 128, Placement.PAGE, tail=64, scale_padding=2)


def cases(everything: bool) -> Iterator[Case]:
    """What is compiled: every format with every dtype; the other choices spread over them, or all of them."""
    formats = list(mxkv.FORMATS.values())
    small, large = LaunchConfig(1, 1), LaunchConfig(8, 4)
    for (i, format), (j, dtype) in itertools.product(enumerate(formats), enumerate((BF16, FP16, FP32))):
        turn = i + j
        for rope, nonfinite in (
            itertools.product((False, True), ("propagate", "sanitize"))
            if everything
            else {(dtype == BF16 and turn % 2 == 1, ("propagate", "sanitize")[turn % 3 == 2])}
        ):
            yield Case("store", format, dtype, rope=rope, nonfinite=nonfinite, index=(torch.int64, torch.int32)[j % 2])
        yield Case("load", format, dtype)
    for name in ("mxfp4", "mxfp8", "nvfp4", "dsv4"):
        yield Case("store", mxkv.FORMATS[name], BF16, rope=True)
    yield Case("store", mxkv.FORMATS["mxfp4"], BF16, dim=96)  # records of 51 bytes
    yield Case("load", mxkv.FORMATS["mxfp4"], BF16, dim=96)
    yield Case("store", mxkv.FORMATS["mxfp8"], BF16, dim=576, rope=True, ratio=2, gap=3)
    yield Case("store", mxkv.FORMATS["mxfp4"], BF16, config=small)
    yield Case("store", ODD_GROUPS, FP32, dim=72, rope=True)
    yield Case("store", EIGHTS, BF16, dim=576)
    if everything:
        for format, dim in itertools.product((*formats, ODD_GROUPS, EIGHTS), (64, 96, 192, 320, 384, 576, 1024)):
            if format.accepts_dim(dim):
                for dtype in (BF16, FP16, FP32):
                    yield Case("store", format, dtype, dim=dim, rope=dim >= ROPE_DIM)
                    yield Case("load", format, dtype, dim=dim)
        for format, config in itertools.product(formats, (small, large)):
            yield Case("store", format, BF16, config=config, rope=True)
            yield Case("load", format, BF16, config=config)


class Recorder:
    """Stands where a kernel stands, and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Recorder:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


def launch_of(case: Case) -> Recorder:
    """What the backend launches for a case."""
    format, dim, blocks, block_size, tokens = case.format, case.dim, 2, 16, 32
    width, size = format.record_width(dim), format.cache_dtype.itemsize
    page = block_size * width + case.gap // size
    cache = torch.zeros(blocks * page, dtype=format.cache_dtype)
    cache = cache.as_strided((blocks, block_size, width), (page, width, 1))
    slots = torch.arange(tokens, dtype=case.index)
    scale = torch.ones(1) if format.scale is Scale.TENSOR else None
    if case.operation == "load":
        out = torch.empty(tokens, dim, dtype=case.dtype)
        spec = checks.load_spec(cache, slots, format.spec, dim, case.dtype, scale, out)
        return _recorded(latents.LoadLaunch(spec), case, cache, slots, out, scale)
    latent = torch.zeros(tokens, dim, dtype=case.dtype)
    positions = slots if case.rope or case.ratio > 1 else None
    table = torch.zeros(tokens, ROPE_DIM) if case.rope else None
    store_spec = checks.store_spec(
        cache, latent, slots, format.spec, positions, table, case.ratio, scale, case.nonfinite
    )
    return _recorded(latents.StoreLaunch(store_spec), case, cache, latent, slots, positions, table, scale)


def _recorded(launch: Any, case: Case, *tensors: torch.Tensor | None) -> Recorder:
    recorder = launch.launcher.kernel = Recorder(launch.launcher.kernel)
    launch(*tensors, config=case.config or default_config(launch.spec, MANY_TOKENS, H200_COMPUTE_UNITS))
    return recorder


def compile_launch(launch: Recorder, target: Target) -> Any:
    """The compiled kernel, specialised as Triton's JIT would."""
    gpu = (
        GPUTarget("cuda", target.capability, 32)
        if target.vendor == "nvidia"
        else GPUTarget("hip", target.arch, target.warp_size)
    )
    kernel, backend = launch.kernel, make_backend(gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **launch.options)
    options, signature, constexprs, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=gpu, options=options.__dict__)


@dataclasses.dataclass
class Code:
    """What the machine code of a kernel says about itself."""

    registers: int
    spills: int
    widest_load: int
    widest_store: int
    text: str


def _widths(text: str, pattern: str) -> int:
    """The widest access in bytes; the pattern's groups are a vector length (or nothing) and an element's bits."""
    return max((int(n or 1) * int(bits) // 8 for n, bits in re.findall(pattern, text)), default=0)


def read_nvidia(compiled: Any) -> Code:
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout)
    if not found:
        raise RuntimeError(f"cuobjdump says nothing about registers: {usage.stdout!r}")
    registers, stack, local = map(int, found.groups())
    access = r"{}\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)\b"
    return Code(
        registers, stack + local, _widths(ptx, access.format(r"\bld")), _widths(ptx, access.format(r"\bst")), ptx
    )


def read_amd(compiled: Any) -> Code:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found.group(1)) if found else 0

    spills = number("vgpr_spill_count") + number("sgpr_spill_count") + number("private_segment_fixed_size")
    sizes = {"ubyte": 1, "byte": 1, "ushort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}

    def widest(verb: str) -> int:
        found = re.findall(rf"\b(?:buffer|global|flat)_{verb}_([a-z]+(?:x\d)?)\b", text)
        return max((sizes.get(f, 0) for f in found), default=0)

    return Code(number("vgpr_count"), spills, widest("load"), widest("store"), text)


def problems(case: Case, code: Code, target: Target) -> list[str]:
    """What is wrong with a case's machine code."""
    found = []
    if code.spills:
        found.append(f"spills {code.spills} bytes or registers")
    if case.aligned and case.config is None:
        loaded = min(WIDEST_ACCESS, 8 if case.operation == "load" and case.format.element is Element.E2M1 else 16)
        if code.widest_load < loaded:
            found.append(f"widest load is {code.widest_load} bytes, expected {loaded}")
        stored = 8 if case.operation == "store" and case.format.element is Element.E2M1 else 16
        if code.widest_store < stored:
            found.append(f"widest store is {code.widest_store} bytes, expected {stored}")
    for instruction, expected in _instructions(case, target).items():
        if bool(re.search(instruction, code.text)) != expected:
            found.append(f"{instruction} is {'absent' if expected else 'present'}")
    return found


def _instructions(case: Case, target: Target) -> dict[str, bool]:
    """Instructions that must, or must not, be there."""
    e4m3 = case.format.element is Element.E4M3
    if target.vendor == "nvidia":
        hardware = target.fp8 == "e4nv"
        wanted = {r"cvt\.[\w.]*e2m1x2": False}
        if case.operation == "store" and (e4m3 or not hardware):
            wanted[r"cvt\.rn\.satfinite\.e4m3x2\.f32"] = hardware
        elif case.operation == "load" and e4m3:
            wanted[r"cvt\.rn\.f16x2\.e4m3x2"] = hardware
        if case.operation == "store" and case.format.element is Element.E2M1 and case.dtype == BF16 and not case.rope:
            least = r"min\.u16x2" if target.bf16_pairs == "full" else r"min\.bf16x2"
            wanted |= dict.fromkeys((r"fma\.rn\.bf16x2", least), case.nonfinite == "propagate")
        return wanted
    # gfx942's fp8 instructions speak another code (fnuz), and it has no converter for FP4.
    reads = target.fp4_unpack and case.operation == "load"
    return {
        r"v_cvt\w*_f32_fp4": reads and case.format.element is Element.E2M1,
        r"v_cvt\w*_f32_fp8": reads and e4m3,
        r"v_cvt\w*_(fp8|bf8|fp4)_": False,  # writing is in software: what the converters do is not the oracle's to say
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every combination; CI takes a covering subset")
    parser.add_argument("--match", default="", help="only cases whose name has this in it")
    parser.add_argument("--dump", type=Path, help="a folder for the assembly of each case")
    arguments = parser.parse_args()
    target = devices.forced_target()
    if target is None or target.vendor == "cpu":
        parser.error(f"MXKV_TARGET must name a GPU target, got {os.environ.get('MXKV_TARGET')!r}")
    failures = count = 0
    started = time.perf_counter()
    families = (module.cases(arguments.all) for module in (attend_cases, compress_cases, kv_cases))
    for case in itertools.chain(cases(arguments.all), *families):
        if arguments.match not in case.name:
            continue
        if getattr(case, "costly", False) and not arguments.all and target.name not in COSTLY_ON:
            continue
        print(case.name, flush=True)
        begun = time.perf_counter()
        try:
            plain = isinstance(case, Case)
            compiled = compile_launch(launch_of(case) if plain else case.launch(Recorder, target), target)
            code = read_nvidia(compiled) if target.vendor == "nvidia" else read_amd(compiled)
            wrong = problems(case, code, target) if plain else case.problems(code, target)
            shared = compiled.metadata.shared
            if shared > target.shared_memory:
                wrong.append(f"takes {shared} bytes of shared memory, {target.name} has {target.shared_memory}")
            verdict = {key: value for key, value in vars(code).items() if key != "text"}
        except Exception as error:
            causes = [error]
            while causes[-1].__cause__ is not None:
                causes.append(causes[-1].__cause__)
            wrong, verdict = [f"{type(causes[-1]).__name__}: {causes[-1]}"], {}
        if arguments.dump and verdict:
            arguments.dump.mkdir(parents=True, exist_ok=True)
            (arguments.dump / f"{target.name} {case.name}.s".replace(" ", "_")).write_text(code.text)
        verdict |= {"case": case.name, "problems": wrong, "seconds": round(time.perf_counter() - begun, 2)}
        print(json.dumps(verdict), flush=True)
        failures += bool(wrong)
        count += 1
    print(
        f"{target.name}: {count} kernels in {time.perf_counter() - started:.0f} s, {failures} with problems", flush=True
    )
    return 1 if failures or not count else 0


if __name__ == "__main__":
    sys.exit(main())
