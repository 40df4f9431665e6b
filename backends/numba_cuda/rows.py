"""Reading and writing a step of a row, eight elements or two, in kernels: as fp32, whatever the row's dtype."""

from __future__ import annotations

from mxkv.backends.numba_cuda.codec import encode_bf16
from mxkv.backends.numba_cuda.primitives import (
    bits_of,
    device,
    fetch8,
    fetch16,
    fetch32,
    fetch128,
    fetch_float,
    float_of,
    float_of_half,
    half_of_float,
    i32,
    put8,
    put16,
    put32,
    put64,
    put128,
)

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@device
def float_of_bf16(bits):
    return float_of(bits << 16)


def element_reader(dtype):
    """A function from an element's address to its value."""
    if dtype == "fp32":
        return fetch_float
    convert = float_of_bf16 if dtype == "bf16" else float_of_half

    @device
    def read(address):
        return convert(fetch16(address))

    return read


@device
def halves_of(words):
    """The eight bf16 of four words, as fp32."""
    a, b, c, d = words
    return (
        float_of(a << 16), float_of(a & -0x10000), float_of(b << 16), float_of(b & -0x10000),
        float_of(c << 16), float_of(c & -0x10000), float_of(d << 16), float_of(d & -0x10000),
    )  # fmt: skip


@device
def _fp16_halves(words):
    a, b, c, d = words
    return (
        float_of_half(a), float_of_half(a >> 16), float_of_half(b), float_of_half(b >> 16),
        float_of_half(c), float_of_half(c >> 16), float_of_half(d), float_of_half(d >> 16),
    )  # fmt: skip


@device
def upper_halves(x, y):
    """The upper halves of two fp32 in a word."""
    return i32(((bits_of(x) >> 16) & 0xFFFF) | (bits_of(y) & -0x10000))


def octet_reader(dtype, aligned):
    """A function from an address to eight elements from there on.

    ``aligned``: whether it is a multiple of 16.
    """
    size = ELEMENT_BYTES[dtype]
    if not aligned:
        read = element_reader(dtype)

        @device
        def read_octet(address):
            return (
                read(address), read(address + size), read(address + 2 * size), read(address + 3 * size),
                read(address + 4 * size), read(address + 5 * size), read(address + 6 * size), read(address + 7 * size),
            )  # fmt: skip

    elif dtype == "fp32":

        @device
        def read_octet(address):
            a, b, c, d = fetch128(address)
            e, f, g, h = fetch128(address + 16)
            return (
                float_of(a), float_of(b), float_of(c), float_of(d), float_of(e), float_of(f), float_of(g), float_of(h),
            )  # fmt: skip

    else:
        halves = halves_of if dtype == "bf16" else _fp16_halves

        @device
        def read_octet(address):
            return halves(fetch128(address))

    return read_octet


def encoder(dtype):
    """A function from fp32 to the bits of a dtype."""
    if dtype == "bf16":
        return encode_bf16
    return half_of_float if dtype == "fp16" else bits_of


def element_writer(dtype):
    """A function that writes an fp32 to an element's address, as a dtype."""
    encode, put = encoder(dtype), put32 if dtype == "fp32" else put16

    @device
    def write(address, x):
        put(address, encode(x))

    return write


def octet_writer(dtype, aligned):
    """A function that writes eight fp32 as a dtype; see :func:`octet_reader`."""
    size = ELEMENT_BYTES[dtype]
    encode = encoder(dtype)
    put = put32 if dtype == "fp32" else put16
    if not aligned:

        @device
        def write_octet(address, x):
            for i in range(8):
                put(address + size * i, encode(x[i]))

    elif dtype == "fp32":

        @device
        def write_octet(address, x):
            put128(address, bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3]))
            put128(address + 16, bits_of(x[4]), bits_of(x[5]), bits_of(x[6]), bits_of(x[7]))

    else:

        @device
        def write_octet(address, x):
            put128(
                address,
                encode(x[0]) | (encode(x[1]) << 16), encode(x[2]) | (encode(x[3]) << 16),
                encode(x[4]) | (encode(x[5]) << 16), encode(x[6]) | (encode(x[7]) << 16),
            )  # fmt: skip

    return write_octet


def word_fetcher(alignment):
    """A function from an address, aligned to so many bytes, to the 32-bit word that starts there."""
    if alignment >= 4:
        return fetch32
    if alignment == 2:

        @device
        def fetch_word(address):
            return i32(fetch16(address) | (fetch16(address + 2) << 16))

    else:

        @device
        def fetch_word(address):
            low = fetch8(address) | (fetch8(address + 1) << 8)
            return i32(low | (fetch8(address + 2) << 16) | (fetch8(address + 3) << 24))

    return fetch_word


def word_putter(alignment):
    """A function that writes a 32-bit word to an address that is aligned to so many bytes."""
    if alignment >= 4:
        return put32
    if alignment == 2:

        @device
        def put_word(address, word):
            put16(address, word & 0xFFFF)
            put16(address + 2, (word >> 16) & 0xFFFF)

    else:

        @device
        def put_word(address, word):
            for i in range(4):
                put8(address + i, (word >> (8 * i)) & 0xFF)

    return put_word


def pair_putter(alignment):
    """A function that writes two words, aligned to so many bytes."""
    if alignment >= 8:

        @device
        def put_words(address, low, high):
            put64(address, (low & 0xFFFFFFFF) | (high << 32))

    else:
        put_word = word_putter(alignment)

        @device
        def put_words(address, low, high):
            put_word(address, low)
            put_word(address + 4, high)

    return put_words


def quad_putter(alignment):
    """A function that writes four words, aligned to so many bytes."""
    if alignment >= 16:
        return put128
    put_pair = pair_putter(alignment)

    @device
    def put_words(address, a, b, c, d):
        put_pair(address, a, b)
        put_pair(address + 8, c, d)

    return put_words
