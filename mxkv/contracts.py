"""What dispatch and a backend say to each other: the description of a call, a verdict on it, and a backend."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from mxkv.formats import FORMATS, Format
from mxkv.kv_formats import KVFormat, KVLayout
from mxkv.paging import PageLayout

NONFINITE = ("propagate", "sanitize")
ROPE_DIM = 64
SELECTIONS = ("ragged", "dense", "pages")
MOST_HEADS = 256
MOST_SPLITS = 1024
COMPRESS_DIM = 512  # values of a latent that compress_norm makes
RING_DIM = 2 * COMPRESS_DIM  # of a ring's row: values, then scores


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether something can be done and, if not, every reason why."""

    reasons: tuple[str, ...] = ()
    hint: str = ""

    @property
    def ok(self) -> bool:
        return not self.reasons

    def __and__(self, other: Verdict) -> Verdict:
        return Verdict(self.reasons + other.reasons, self.hint or other.hint)


YES = Verdict()


@dataclasses.dataclass(frozen=True)
class StoreSpec:
    """Everything about a store that its tensors' values do not change.

    Attributes:
        device: Where the tensors are.
        format: The cache's format.
        latent_dim: Values of a row.
        latent_dtype: dtype of the rows.
        layout: Where the cache's records stand.
        positioned: Whether the call has positions (and so may skip tokens).
        rotate: Whether it has a table of cosines and sines (and so rotates the last 64 values).
        compress_ratio: 1, or 2: store only tokens of odd position.
        scaled: Whether it has a per-tensor scale.
        nonfinite: "propagate" or "sanitize".
    """

    operation: ClassVar[str] = "store"
    device: torch.device
    format: Format
    latent_dim: int
    latent_dtype: torch.dtype
    layout: PageLayout
    positioned: bool = False
    rotate: bool = False
    compress_ratio: int = 1
    scaled: bool = False
    nonfinite: str = "propagate"


@dataclasses.dataclass(frozen=True)
class LoadSpec:
    """Everything about a load that its tensors' values do not change.

    Attributes:
        device: Where the tensors are.
        format: The cache's format.
        latent_dim: Values of a row.
        out_dtype: dtype of the rows that come out.
        layout: Where the cache's records stand.
        scaled: Whether the call has a per-tensor scale.
    """

    operation: ClassVar[str] = "load"
    device: torch.device
    format: Format
    latent_dim: int
    out_dtype: torch.dtype
    layout: PageLayout
    scaled: bool = False


@dataclasses.dataclass(frozen=True)
class AttendSpec:
    """Everything about an attention that its tensors' values do not change.

    Attributes:
        device: Where the tensors are.
        format: The cache's format.
        latent_dim: Values of a row, and of a query's head.
        q_dtype: dtype of the queries, and of what comes out.
        layout: Where the cache's records stand.
        heads: Heads of a query.
        value_dim: How many of a row's first values are summed up.
        selection: How rows are selected: "ragged", "dense" or "pages" (:data:`SELECTIONS`).
        scaled: Whether the call has a per-tensor scale.
        sinked: Whether it has a logit for each head that joins the denominator.
        lse: Whether the logarithm of the sum of exponentials is asked for.
    """

    operation: ClassVar[str] = "attend"
    device: torch.device
    format: Format
    latent_dim: int
    q_dtype: torch.dtype
    layout: PageLayout
    heads: int
    value_dim: int
    selection: str = "dense"
    scaled: bool = False
    sinked: bool = False
    lse: bool = False


@dataclasses.dataclass(frozen=True)
class CompressSpec:
    """Everything about a compression that its tensors' values do not change.

    Attributes:
        device: Where the tensors are.
        compress_ratio: 1, or 2: pool the two tokens of each group.
        layout: Where the rings' rows stand, in fp32: a block is a ring, its size the capacity. 0 blocks at ratio 1.
        previous: Whether the call has rows of other ranks (and so writes no ring).
    """

    operation: ClassVar[str] = "compress_norm"
    latent_dim: ClassVar[int] = COMPRESS_DIM
    device: torch.device
    compress_ratio: int
    layout: PageLayout
    previous: bool = False

    @property
    def format(self) -> Format:
        """What comes out: plain bf16 rows."""
        return FORMATS["bf16"]


@dataclasses.dataclass(frozen=True)
class CompressStoreSpec:
    """Everything about a compression into a cache that its tensors' values do not change.

    Attributes:
        device: Where the tensors are.
        format: The cache's format.
        layout: Where the cache's records stand.
        compress_ratio: 1, or 2: pool the two tokens of each group, and store at the token that closes it.
        ring_layout: Where the rings' rows stand; see :class:`CompressSpec`.
        previous: Whether the call has rows of other ranks (and so writes no ring).
        rotate: Whether it has a table of cosines and sines (and so rotates the last 64 values).
        scaled: Whether it has a per-tensor scale.
        nonfinite: "propagate" or "sanitize".
        latents: Whether the bf16 latents are asked for too.
    """

    operation: ClassVar[str] = "compress_store"
    latent_dim: ClassVar[int] = COMPRESS_DIM
    device: torch.device
    format: Format
    layout: PageLayout
    compress_ratio: int
    ring_layout: PageLayout
    previous: bool = False
    rotate: bool = False
    scaled: bool = False
    nonfinite: str = "propagate"
    latents: bool = False

    @property
    def compressed(self) -> CompressSpec:
        """The first of the two calls that this one takes the place of."""
        return CompressSpec(self.device, self.compress_ratio, self.ring_layout, self.previous)

    @property
    def stored(self) -> StoreSpec:
        """The second of them."""
        return StoreSpec(
            self.device, self.format, COMPRESS_DIM, torch.bfloat16, self.layout, True, self.rotate,
            self.compress_ratio, self.scaled, self.nonfinite,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SaveRingSpec:
    """Everything about a saving of ring rows that its tensors' values do not change.

    Attributes:
        device: Where the tensors are.
        layout: Where the rings' rows stand; see :class:`CompressSpec`.
    """

    operation: ClassVar[str] = "save_ring_rows"
    latent_dim: ClassVar[int] = RING_DIM
    device: torch.device
    layout: PageLayout

    @property
    def format(self) -> Format:
        """Rows go as they are. What counts bytes by a spec's format gets that of the latents."""
        return FORMATS["bf16"]


@dataclasses.dataclass(frozen=True)
class StoreKVSpec:
    """Everything about a store of keys and values that its tensors' values do not change.

    Attributes:
        device: Where the tensors are.
        format: The cache's format.
        head_dim: Elements of a key, and of a value.
        dtype: dtype of the keys and values.
        layout: Where the cache's keys and values stand.
        tabled: Whether the call has centroids of its own.
        rotated: Whether it has a rotation of its own.
        nonfinite: "propagate" or "sanitize".
    """

    operation: ClassVar[str] = "store_kv"
    device: torch.device
    format: KVFormat
    head_dim: int
    dtype: torch.dtype
    layout: KVLayout
    tabled: bool = False
    rotated: bool = False
    nonfinite: str = "propagate"


@dataclasses.dataclass(frozen=True)
class LoadKVSpec:
    """Everything about a load of keys and values that its tensors' values do not change.

    Attributes:
        device: Where the tensors are.
        format: The cache's format.
        head_dim: Elements of a key, and of a value.
        dtype: dtype of the keys and values that come out.
        layout: Where the cache's keys and values stand.
        tabled: Whether the call has centroids of its own.
        rotated: Whether it has a rotation of its own.
    """

    operation: ClassVar[str] = "load_kv"
    device: torch.device
    format: KVFormat
    head_dim: int
    dtype: torch.dtype
    layout: KVLayout
    tabled: bool = False
    rotated: bool = False


@dataclasses.dataclass(frozen=True)
class AttendKVSpec:
    """Everything about an attention over keys and values that its tensors' values do not change.

    Attributes:
        device: Where the tensors are.
        format: The cache's format.
        head_dim: Elements of a key, of a value, and of a query's head.
        dtype: dtype of the queries, and of what comes out.
        layout: Where the cache's keys and values stand.
        query_heads: Heads of a query: a multiple of the cache's.
        packed: Whether the call says where each sequence's queries start; else there is one of each sequence.
        windowed: Whether a query sees the last rows only.
        sinked: Whether the call has a logit for each head that joins the denominator.
        lse: Whether the logarithm of the sum of exponentials is asked for.
        tabled: Whether the call has centroids of its own.
        rotated: Whether it has a rotation of its own.
    """

    operation: ClassVar[str] = "attend_kv"
    device: torch.device
    format: KVFormat
    head_dim: int
    dtype: torch.dtype
    layout: KVLayout
    query_heads: int
    packed: bool = False
    windowed: bool = False
    sinked: bool = False
    lse: bool = False
    tabled: bool = False
    rotated: bool = False


Spec = StoreSpec | LoadSpec | AttendSpec | CompressSpec | CompressStoreSpec | SaveRingSpec
KVSpec = StoreKVSpec | LoadKVSpec | AttendKVSpec
AnySpec = Spec | KVSpec

OPERATIONS = frozenset(kind.operation for kind in typing.get_args(AnySpec))


class StoreFunction(Protocol):
    """``store`` of a backend's module.

    ``latent`` has as many rows as ``slots``, at least one; everything has been checked.
    """

    def __call__(
        self,
        spec: StoreSpec,
        cache: torch.Tensor,
        latent: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None,
        cos_sin: torch.Tensor | None,
        cache_scale: torch.Tensor | None,
    ) -> None: ...


class LoadFunction(Protocol):
    """``load`` of a backend's module: fills ``out`` [slots, latent_dim] of any row stride; at least one slot."""

    def __call__(
        self,
        spec: LoadSpec,
        cache: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        cache_scale: torch.Tensor | None,
    ) -> None: ...


class AttendFunction(Protocol):
    """``attend`` of a backend's module: fills ``out`` [queries, heads, value_dim] of any stride but the last's.

    There is at least one query; everything has been checked but whether ``workspace`` is large enough, since the
    backend alone knows how many splits there are.

    ``rows`` and ``bounds`` are, for "ragged", the slots [nnz] and where each query's begin [queries + 1]; for "dense"
    the slots [queries, k] and None; for "pages" the blocks [queries, most blocks] and how many rows each query has
    [queries]. Their values are not checked: a slot or block out of range is skipped, bounds are clamped to ``rows``.
    ``lse`` is a contiguous fp32 [queries, heads] to fill, ``workspace`` is contiguous, ``scale`` the softmax's.
    """

    def __call__(
        self,
        spec: AttendSpec,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        rows: torch.Tensor,
        bounds: torch.Tensor | None,
        cache_scale: torch.Tensor | None,
        sink: torch.Tensor | None,
        lse: torch.Tensor | None,
        workspace: torch.Tensor | None,
        scale: float,
        num_splits: int | None,
    ) -> None: ...


class Packed(NamedTuple):
    """Tokens of several requests, one request after another. Indices are int32 or int64, of any stride.

    Attributes:
        rows: [>= tokens, 512 * ratio] fp32, of a row stride that is a multiple of 16: values, then scores.
        positions: [>= tokens].
        slots: [tokens]: ``block * capacity + position % capacity``; negative for padding.
        query_start: [requests + 1]: where each request's tokens begin. None at ratio 1, and so are the following.
        token_to_request: [>= tokens].
        ring: [blocks, capacity, 1024] fp32, of strides that are multiples of 16.
        prev_rows: [rows, 1024] fp32, or None.
        prev_row_indices: [>= requests]: a row of prev_rows, or -1: the ring. None where prev_rows is.
        weight: [512] bf16.
        eps: Added to the mean of squares.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor | None
    token_to_request: torch.Tensor | None
    ring: torch.Tensor | None
    prev_rows: torch.Tensor | None
    prev_row_indices: torch.Tensor | None
    weight: torch.Tensor
    eps: float


class CompressFunction(Protocol):
    """``compress_norm`` of a backend's module: fills the rows of ``out`` [>= tokens, 512] bf16 whose tokens close a
    group (every token's of a slot of at least 0, at ratio 1) and leaves the others; saves rows to the rings.

    There is at least one token; everything about shapes, strides and dtypes has been checked, and no value has: see
    :func:`mxkv.compress_norm` for what an index out of range does. ``out`` has any row stride.
    """

    def __call__(self, spec: CompressSpec, packed: Packed, out: torch.Tensor) -> None: ...


class CompressStoreFunction(Protocol):
    """``compress_store`` of a backend's module: ``compress_norm``, then ``store`` of the latents that it made.

    ``cache_slots`` and ``packed.positions`` have at least as many tokens as ``packed.slots``. ``out`` is None unless
    the latents are asked for.
    """

    def __call__(
        self,
        spec: CompressStoreSpec,
        packed: Packed,
        cache: torch.Tensor,
        cache_slots: torch.Tensor,
        cos_sin: torch.Tensor | None,
        cache_scale: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None: ...


class SaveRingFunction(Protocol):
    """``save_ring_rows`` of a backend's module: ``rows`` [n, 1024] fp32 to slots [n] of ``ring``; n is at least 1."""

    def __call__(self, spec: SaveRingSpec, rows: torch.Tensor, slots: torch.Tensor, ring: torch.Tensor) -> None: ...


class StoreKVFunction(Protocol):
    """``store_kv`` of a backend's module.

    ``key`` and ``value`` have as many tokens as ``slots``, at least one; everything has been checked.
    """

    def __call__(
        self,
        spec: StoreKVSpec,
        kv_cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        centroids: torch.Tensor | None,
        rotation: torch.Tensor | None,
    ) -> None: ...


class LoadKVFunction(Protocol):
    """``load_kv`` of a backend's module: fills ``key`` and ``value``, contiguous [slots, heads, head_dim].

    There is at least one slot.
    """

    def __call__(
        self,
        spec: LoadKVSpec,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        centroids: torch.Tensor | None,
        rotation: torch.Tensor | None,
    ) -> None: ...


class AttendKVFunction(Protocol):
    """``attend_kv`` of a backend's module: fills ``out`` [queries, query_heads, head_dim] of any stride but the last's.

    There is at least one query; everything has been checked but whether ``workspace`` is large enough, since the
    backend alone knows how many splits there are. The values of ``block_table``, ``seq_lens`` and ``query_start`` are
    not checked: what is out of range is skipped, or taken as the nearest that is in range.
    ``lse`` is a contiguous fp32 [queries, query_heads] to fill, ``workspace`` is contiguous, ``scale`` the softmax's.
    """

    def __call__(
        self,
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
    ) -> None: ...


@dataclasses.dataclass(frozen=True)
class Tunable:
    """What may be chosen about how a backend launches one kind of call. Any choice gives the same bytes.

    Attributes:
        config: The type of a choice: a frozen dataclass of numbers and strings.
        space: Every choice, in order of preference where two are equally fast; each default is among them.
        default: The choice where nothing was tuned, from the call's sizes, each rounded up to its bucket.
        sizes: The names of those sizes: what of a call's shapes decides how it is best launched.
        target: The name of the target whose code is compiled.
        source: A hash of the kernel's source and of what it calls.
        compiler: What compiles it, with its version.
    """

    config: type
    space: tuple[Any, ...]
    default: Callable[..., Any]
    sizes: tuple[str, ...] = ("tokens",)
    target: str = ""
    source: str = ""
    compiler: str = ""


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to run the operations.

    Attributes:
        name: What ``backend=`` and ``MXKV_BACKEND`` call it.
        priority: The automatic choice takes the highest that can run.
        description: One line for tables.
        probe: Whether the backend can run at all on a device. Cheap, and imports nothing heavy.
        supports: Whether it can run one call on a device where ``probe`` said yes.
        load: Imports and returns its operations: an object with a function for each of them. Where it also has
            ``prepare(spec)``, that is asked once for each kind of call, and returns what runs it: a callable that takes
            the operation's arguments without the spec. With ``tunable(spec)`` too, what ``prepare`` returns also takes
            ``config=``, one of the tunable's space, and ``compile(spec, config)``, if it exists, compiles without
            launching.
        operations: Names of the operations that it has.
        slower: Whether taking it on a GPU costs speed, so that the automatic choice says it did.
    """

    name: str
    priority: int
    description: str
    probe: Callable[[torch.device], Verdict]
    supports: Callable[[AnySpec], Verdict]
    load: Callable[[], Any]
    operations: frozenset[str]
    slower: bool = False
