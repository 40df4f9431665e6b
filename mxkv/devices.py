"""A device -> its target, and what that target can do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch

from mxkv import settings


@dataclasses.dataclass(frozen=True)
class Target:
    """A family of devices that run the same code.

    Attributes:
        name: What ``MXKV_TARGET`` and tables call it.
        vendor: "nvidia", "amd" or "cpu".
        arch: The oldest architecture of the family, as compilers name it ("sm_90", "gfx950").
        warp_size: Threads of a warp (a wavefront on AMD).
        shared_memory: Bytes of shared memory (LDS on AMD) that one program can have.
        fp8: How E4M3 is converted: "e4nv" (hardware, OCP), "e4b15" (software writes, reads through bias 15),
            "fnuz" (the hardware's own code is another one: software), "software".
        fp4_unpack: Whether an instruction turns FP4 into bf16.
        fp4_pack: Whether an instruction rounds to FP4.
        bf16_pairs: Arithmetic on two bf16 in one register: "full" (add, mul, max), "fma" only, or "none".
    """

    name: str
    vendor: str
    arch: str
    warp_size: int = 32
    shared_memory: int = 48 << 10
    fp8: str = "software"
    fp4_unpack: bool = False
    fp4_pack: bool = False
    bf16_pairs: str = "none"

    @property
    def capability(self) -> int:
        """10 * major + minor of an NVIDIA architecture, 0 elsewhere."""
        return int(self.arch.removeprefix("sm_")) if self.vendor == "nvidia" else 0


_TARGETS = (
    Target(
        "gfx950", "amd", "gfx950", shared_memory=160 << 10, warp_size=64, fp8="e4nv", fp4_unpack=True, fp4_pack=True
    ),
    Target("gfx942", "amd", "gfx942", shared_memory=64 << 10, warp_size=64, fp8="fnuz"),
    Target(
        "blackwell",
        "nvidia",
        "sm_100",
        shared_memory=227 << 10,
        fp8="e4nv",
        fp4_unpack=True,
        fp4_pack=True,
        bf16_pairs="full",
    ),
    Target("hopper", "nvidia", "sm_90", shared_memory=227 << 10, fp8="e4nv", bf16_pairs="full"),
    Target("ada", "nvidia", "sm_89", shared_memory=99 << 10, fp8="e4nv", bf16_pairs="fma"),
    Target("ampere", "nvidia", "sm_80", shared_memory=163 << 10, fp8="e4b15", bf16_pairs="fma"),
    Target("cuda", "nvidia", "sm_50"),
    Target("rocm", "amd", "gfx900", shared_memory=64 << 10, warp_size=64),
    Target("cpu", "cpu", "cpu", warp_size=1),
)

TARGETS: Mapping[str, Target] = MappingProxyType({t.name: t for t in _TARGETS})
"""Every known target; "cuda" and "rocm" are those of devices that no other row describes."""


# Of capabilities that have less, or more, than the rest of their target.
_SHARED_MEMORY = {70: 96 << 10, 72: 96 << 10, 75: 64 << 10, 86: 99 << 10, 120: 99 << 10, 121: 99 << 10}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of this machine.

    Attributes:
        device: torch's name for it.
        name: The vendor's name for it.
        arch: Its architecture ("sm_90", "gfx950", "cpu").
        target: The target whose code it runs by nature.
        compute_units: Multiprocessors, compute units, or CPU threads that torch uses.
        memory_bytes: Its memory; 0 where unknown.
        l2_bytes: Its last-level cache; 0 where unknown.
    """

    device: torch.device
    name: str
    arch: str
    target: Target
    compute_units: int
    memory_bytes: int
    l2_bytes: int


def nvidia_target(capability: tuple[int, int]) -> Target:
    """The target of an NVIDIA compute capability, with the shared memory that this one has."""
    number = capability[0] * 10 + capability[1]
    fitting = [t for t in _TARGETS if t.vendor == "nvidia" and t.capability <= number]
    target = max(fitting, key=lambda t: t.capability) if fitting else TARGETS["cuda"]
    shared_memory = _SHARED_MEMORY.get(number, target.shared_memory)
    return dataclasses.replace(target, shared_memory=shared_memory)


def amd_target(arch: str) -> Target:
    """The target of an AMD architecture such as ``gfx942:sramecc+:xnack-``."""
    return TARGETS.get(arch.split(":")[0], TARGETS["rocm"])


@functools.lru_cache(maxsize=64)
def describe(device: torch.device) -> Device:
    """What torch says about a device.

    Raises:
        ValueError: This machine has no such device.
    """
    if device.type == "cpu":
        return Device(device, "CPU", "cpu", TARGETS["cpu"], torch.get_num_threads(), 0, 0)
    if device.type != "cuda":
        raise ValueError(f"expected a cpu or cuda device (ROCm devices are called cuda in torch), got {device}")
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ValueError(f"this machine has {count} GPU(s) that torch can use, got device {device}")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = str(properties.gcnArchName).split(":")[0]
        target = amd_target(arch)
    else:
        arch = f"sm_{properties.major}{properties.minor}"
        target = nvidia_target((properties.major, properties.minor))
    return Device(
        device,
        properties.name,
        arch,
        target,
        properties.multi_processor_count,
        properties.total_memory,
        getattr(properties, "L2_cache_size", 0),
    )


def forced_target() -> Target | None:
    """The target that ``MXKV_TARGET`` names.

    Raises:
        ValueError: No target has that name.
    """
    name = settings.current().target
    if name is None:
        return None
    if name not in TARGETS:
        raise ValueError(f"MXKV_TARGET={name!r} is no target; known targets: {', '.join(TARGETS)}")
    return TARGETS[name]


@functools.lru_cache(maxsize=64)
def target_of(device: torch.device) -> Target:
    """The target whose code runs for a device: its own, or the one that ``MXKV_TARGET`` forces."""
    return forced_target() or describe(device).target


def foreign_target(device: torch.device) -> str:
    """Why the forced target's code cannot run on a device; empty where it can."""
    forced = forced_target()
    if forced is None or device.type == "cpu":  # on the CPU a target's code is interpreted, whichever it is
        return ""
    own = describe(device).target
    if forced.vendor != own.vendor:
        return f"MXKV_TARGET={forced.name} is code for {forced.vendor}, and {device} is {own.vendor} ({own.name})"
    newer = forced.capability > own.capability if own.vendor == "nvidia" else forced not in (own, TARGETS["rocm"])
    if newer:
        return f"MXKV_TARGET={forced.name} ({forced.arch}) is code that {device} ({own.name}) does not run"
    return ""
