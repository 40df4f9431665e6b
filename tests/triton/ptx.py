"""Run the kernels' inline assembly on arrays: the few PTX instructions that it uses, on 32-bit registers.

Of an array 32 neighbours are a warp.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from mxkv import numerics

Register = torch.Tensor  # int64, 0 to 2**32 - 1
WORD = 0xFFFFFFFF
LANES = 32


def float_of(bits: Register) -> torch.Tensor:
    """32 bits as fp32."""
    return torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def bits_of(x: torch.Tensor) -> Register:
    return x.to(torch.float32).contiguous().view(torch.int32).long() & WORD


def bf16(x: torch.Tensor) -> torch.Tensor:
    """fp64 rounded once to bf16, nearest even, subnormals kept; what is not finite stays."""
    exponent = (x.abs().frexp().exponent - 1).clamp(min=-126)
    step = torch.ldexp(torch.ones_like(x), exponent - 7)
    rounded = torch.where(x.isfinite(), (x / step).round() * step, x)
    largest = (2 - 2.0**-7) * 2.0**127
    return torch.where(rounded.abs() > largest, rounded.sign() * torch.inf, rounded)


def halves(word: Register) -> tuple[Register, Register]:
    return word & 0xFFFF, word >> 16


def _packed_bf16(operation: Callable[..., torch.Tensor]) -> Callable[..., Register]:
    def run(*words: Register) -> Register:
        done = []
        for half in zip(*(halves(word) for word in words), strict=True):
            value = bf16(operation(*(float_of(h << 16).double() for h in half)))
            done.append(bits_of(value.float()) >> 16)
        return done[0] | (done[1] << 16)

    return run


def _packed_u16(operation: Callable[..., torch.Tensor]) -> Callable[..., Register]:
    def run(a: Register, b: Register) -> Register:
        low, high = (operation(x, y) for x, y in zip(halves(a), halves(b), strict=True))
        return low | (high << 16)

    return run


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    """Bytes of two words by number; a number's fourth bit asks for the byte's sign bit, eight times."""
    both = torch.stack([(word >> (8 * i)) & 0xFF for word in (a, b) for i in range(4)])
    result = torch.zeros_like(a)
    for i in range(4):
        chosen = (selector >> (4 * i)) & 15
        byte = both.gather(0, (chosen & 7)[None]).squeeze(0)
        result |= torch.where(chosen > 7, (byte >> 7) * 0xFF, byte) << (8 * i)
    return result


def _two_fp16(bytes: Register) -> Register:
    """Two E4M3 bytes to two fp16, exactly."""
    low, high = (numerics.decode_e4m3(((bytes >> n) & 0xFF).to(torch.uint8)).half() for n in (0, 8))
    return (low.view(torch.int16).long() & 0xFFFF) | ((high.view(torch.int16).long() & 0xFFFF) << 16)


def _number(operation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda a, b: torch.where(a.isnan(), b, torch.where(b.isnan(), a, operation(a, b)))  # type: ignore[call-arg]


def _towards_zero(exact: torch.Tensor) -> Register:
    """fp64 to fp32, rounded towards zero."""
    nearest = exact.float()
    past = nearest.double().abs() > exact.abs()
    return bits_of(torch.where(past, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest))


def _shuffled(value: Register, lane: Register, clamp: Register, members: Register) -> Register:
    """What another lane of each warp has."""
    at = torch.arange(len(value))
    return value[at - at % LANES + lane % LANES]


def _fp32(operation: Callable[..., torch.Tensor]) -> Callable[..., Register]:
    """An operation on fp32 that is exact in fp64, rounded once."""
    return lambda *registers: bits_of(operation(*(float_of(r).double() for r in registers)).float())


OPERATIONS: dict[str, Callable[..., Register]] = {
    "and.b32": torch.bitwise_and,
    "or.b32": torch.bitwise_or,
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: (a << n) & WORD,
    "shr.u32": lambda a, n: a >> n,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & WORD,
    "add.u32": lambda a, b: (a + b) & WORD,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _packed_bf16(lambda a, b, c: a * b + c),  # exact in fp64 wherever the codes depend on it
    "mul.rn.bf16x2": _packed_bf16(lambda a, b: a * b),
    "min.NaN.bf16x2": _packed_bf16(torch.minimum),
    "max.NaN.bf16x2": _packed_bf16(torch.maximum),
    "min.NaN.xorsign.abs.bf16x2": _packed_bf16(
        lambda a, b: torch.minimum(a.abs(), b.abs()).copysign(a) * torch.ones_like(b).copysign(b)
    ),
    "min.bf16x2": _packed_bf16(_number(torch.minimum)),
    "max.bf16x2": _packed_bf16(_number(torch.maximum)),
    "min.u16x2": _packed_u16(torch.minimum),
    "max.u16x2": _packed_u16(torch.maximum),
    "sub.rn.f32": lambda a, b: bits_of(float_of(a) - float_of(b)),
    "rcp.approx.ftz.f32": lambda a: bits_of(1 / float_of(a)),
    "cvt.rn.bf16x2.f32": lambda high, low: (
        (bits_of(bf16(float_of(high).double()).float()) & 0xFFFF0000)
        | (bits_of(bf16(float_of(low).double()).float()) >> 16)
    ),
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: (
        (numerics.encode_e4m3(float_of(high)).long() << 8) | numerics.encode_e4m3(float_of(low)).long()
    ),
    "cvt.u32.u16": lambda a: a,
    "cvt.rn.f16x2.e4m3x2": _two_fp16,
    "cvt.f32.f16": lambda a: bits_of(a.to(torch.int16).view(torch.float16).float()),
    "mov.f32": lambda a: a,
    "abs.f32": lambda a: a & 0x7FFFFFFF,
    "add.rn.f32": _fp32(lambda a, b: a + b),
    "add.rz.f32": lambda a, b: _towards_zero(float_of(a).double() + float_of(b).double()),
    "fma.rn.f32": _fp32(lambda a, b, c: a * b + c),
    "copysign.f32": lambda sign, a: (a & 0x7FFFFFFF) | (sign & 0x80000000),
    "dp4a.u32.u32": lambda a, b, c: (sum(((a >> n) & 0xFF) * ((b >> n) & 0xFF) for n in (0, 8, 16, 24)) + c) & WORD,
    "mov.u32": lambda a: a,
    "sub.s32": lambda a, b: (a - b) & WORD,
    "abs.s32": lambda a: torch.where(a > 0x7FFFFFFF, (1 << 32) - a, a),
    "setp.eq.s32": lambda a, b: (a == b).long(),
    "set.ge.f32.f32": lambda a, b: bits_of((float_of(a) >= float_of(b)).float()),
    "tanh.approx.f32": lambda a: bits_of(float_of(a).double().tanh().float() * (1 + 2.0**-11)),
    "shfl.sync.idx.b32": _shuffled,
    "selp.f32": lambda a, b, chosen: torch.where(chosen != 0, a, b),
    "not.b32": lambda a: a ^ WORD,
    "xor.b32": torch.bitwise_xor,
    "mul.hi.u32": lambda a, b: (a * b) >> 32,  # of a product below 2**63
    "mul.lo.u32": lambda a, b: (a * b) & WORD,
    "sub.u32": lambda a, b: (a - b) & WORD,
    "mul.rn.f32": lambda a, b: bits_of(float_of(a) * float_of(b)),
}


def run(assembly: str, outputs: int, *inputs: Register) -> list[Register]:
    """The output registers of a piece of inline assembly."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def read(operand: str) -> Register:
        if operand == "%laneid":
            return torch.arange(len(inputs[0])) % LANES
        if operand.startswith("0f"):
            return torch.full_like(inputs[0], int(operand[2:], 16))
        if operand.startswith("0x") or operand.isdigit():
            return torch.full_like(inputs[0], int(operand, 0))
        if operand.startswith("{"):
            low, high = (registers[name.strip()] for name in operand.strip("{} ").split(","))
            return low | (high << 16)
        return registers[operand]

    for statement in re.sub(r"^\s*{|}\s*$", "", assembly.strip()).split(";"):
        words = statement.split(None, 1)
        if not words or words[0].startswith(".reg"):
            continue
        operands = [o.strip() for o in re.findall(r"{[^}]*}|[^,\s][^,]*", words[1])]
        result = OPERATIONS[words[0]](*(read(o) for o in operands[1:]))
        if operands[0].startswith("{"):
            low, high = (name.strip() for name in operands[0].strip("{} ").split(","))
            registers[low], registers[high] = halves(result)
        else:
            registers[operands[0]] = result
    return [registers[f"${i}"] for i in range(outputs)]
