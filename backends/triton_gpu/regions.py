"""A record as regions: consecutive groups of a row that are encoded in the same way."""

from __future__ import annotations

import dataclasses
import itertools

import triton

from mxkv.formats import Element, Format, Scale

_PLAIN_LINE = 64  # elements of a tile's line where no group says how many


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive groups of a row that are encoded in the same way.

    Attributes:
        first: The first element.
        groups: How many groups (lines of the tile, where there are no scales).
        group: Elements of a group.
        size: Elements of the region.
        element: "e2m1", "e4m3" or "bf16".
        scale: "e8m0", "e4m3", "tensor" or "none".
        rotated: From this element of the row on RoPE rotates; the row's width where it does not.
        value_offset: Where the region's values start in a record, in bytes.
        first_scale: Which of the record's scales is its first.
    """

    first: int
    groups: int
    group: int
    size: int
    element: str
    scale: str
    rotated: int
    value_offset: int
    first_scale: int

    @property
    def groups_padded(self) -> int:
        return triton.next_power_of_2(self.groups)

    @property
    def pairs(self) -> int:
        return (self.group + 1) // 2

    @property
    def pairs_padded(self) -> int:
        return triton.next_power_of_2(self.pairs)

    @property
    def all_pairs(self) -> int:
        return (self.size + 1) // 2

    @property
    def end(self) -> int:
        return self.first + self.size

    @property
    def turned(self) -> str:
        """What RoPE rotates: "nothing", "all", the last "groups", or "some" elements, which are not whole groups."""
        if self.rotated >= self.end:
            return "nothing"
        if self.rotated <= self.first:
            return "all"
        grouped = self.scale in ("e8m0", "e4m3")
        return "groups" if grouped and (self.rotated - self.first) % self.group == 0 else "some"

    @property
    def fills_tile(self) -> bool:
        """Whether its tile holds nothing else."""
        return self.groups == self.groups_padded and self.pairs == self.pairs_padded

    @property
    def pair_bytes(self) -> int:
        return {"e2m1": 1, "e4m3": 2, "bf16": 4}[self.element]


def regions_of(format: Format, dim: int, rotated: int, merge: bool = False) -> tuple[Region, ...]:
    """A row's regions, in order.

    Args:
        format: The cache's format.
        dim: Values of a row.
        rotated: The first element that RoPE rotates; ``dim`` where it rotates none.
        merge: Whether the groups that it rotates are in one region with the others.
    """
    if not format.grouped:
        element, scale = format.element.value, format.scale.value
        return (Region(0, -(-dim // _PLAIN_LINE), _PLAIN_LINE, dim, element, scale, rotated, 0, 0),)
    group, body = format.group, dim - format.tail
    bits = 4 if format.element is Element.E2M1 else 8
    # Apart from those that RoPE touches, the others do not pay for it.
    edges = [0, body] if merge else sorted({0, min(rotated, body) // group * group, body})
    found = [
        Region(
            first, (end - first) // group, group, end - first, format.element.value, format.scale.value,
            rotated, first * bits // 8, first // group,
        )
        for first, end in itertools.pairwise(edges)
    ]  # fmt: skip
    if format.tail:
        lines = -(-format.tail // _PLAIN_LINE)
        found.append(
            Region(
                body, lines, _PLAIN_LINE, format.tail, Element.BF16.value, Scale.NONE.value,
                rotated, body * bits // 8, 0,
            )
        )  # fmt: skip
    return tuple(found)
