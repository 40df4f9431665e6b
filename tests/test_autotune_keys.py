"""Keys of tuned configurations: what is in them, what is not, the bucket function, specs as JSON."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mxkv import Format, contracts, devices, formats
from mxkv.autotune_cache import choice, keys, shapes, snapshots
from mxkv.autotune_cache.keys import Key, bucket, key_of, layout_class, plain, spec_from_json, spec_to_json
from mxkv.paging import PageLayout, contiguous_layout
from tests.support import CUSTOM, FORMATS, width_for
from tests.test_environment import run
from tests.tuned_entries import (
    BACKEND,
    CPU,
    SPACE,
    TUNABLE,
    Launch,
    default,
    key,
    layout,
    load_spec,
    rekeyed,
    store_spec,
    tunable,
)

# The bucket function.


@given(st.integers(-5, 1 << 40))
def test_a_bucket_is_the_next_power_of_two(size: int) -> None:
    found = bucket(size)
    assert found & (found - 1) == 0
    assert 1 <= found <= 1 << 20
    assert found >= min(size, 1 << 20)
    assert found == 1 or found < 2 * size
    assert bucket(found) == found


@given(st.integers(0, 1 << 22), st.integers(0, 1 << 22))
def test_buckets_grow_with_the_size(a: int, b: int) -> None:
    assert (bucket(a) <= bucket(b)) or a > b


def test_buckets_at_the_edges() -> None:
    sizes = (0, 1, 2, 3, 4, 5, 512, 513, (1 << 20) - 1, 1 << 20, (1 << 20) + 1)
    assert [bucket(size) for size in sizes] == [1, 1, 2, 4, 4, 8, 512, 1024, 1 << 20, 1 << 20, 1 << 20]


def test_there_is_one_bucket_function() -> None:
    """What is tuned is what is looked up: keys take nothing that the function would change, and nobody has another."""
    assert choice.bucket is bucket
    assert snapshots.bucket is bucket
    assert shapes.bucket is bucket
    for wrong in (0, 3, 1 << 21):
        with pytest.raises(ValueError, match="bucket"):
            key(tokens=wrong)
    with pytest.raises(ValueError, match="one bucket for each"):
        key_of(store_spec(), (1, 2), backend=BACKEND, tunable=TUNABLE)


# What is in a key.


def test_a_key_says_what_must_agree() -> None:
    spec = store_spec("mxfp8", positioned=True, compress_ratio=2)
    here = devices.describe(CPU)
    found = key(spec, 1024)
    assert dict(found.hard) == {
        "schema": 1, "operation": "store", "backend": "torch", "format": "mxfp8", "latent_dim": 512,
        "latent_dtype": "bfloat16", "layout": "pow2/16", "positioned": True, "rotate": False, "compress_ratio": 2,
        "scaled": False, "nonfinite": "propagate", "tokens": 1024, "arch": "cpu", "compute_units": here.compute_units,
        "target": "cpu", "space": keys.space_of(TUNABLE),
    }  # fmt: skip
    assert found.name.startswith("store-")
    assert "tokens=1024" in found.text
    assert "positioned=true" in str(found)
    assert "\n" not in found.text


def test_a_key_is_a_value() -> None:
    a, b = key(), key()
    assert a is not b
    assert a == b
    assert hash(a) == hash(b)
    assert a.name == b.name
    assert Key(dict(reversed(a.hard.items()))) == a
    for again in (copy.deepcopy(a), pickle.loads(pickle.dumps(a)), Key.from_json(json.loads(json.dumps(dict(a.hard))))):
        assert again == a
        assert again.name == a.name
    assert rekeyed(a, positioned=0) != a  # 0 is not false
    with pytest.raises(TypeError):
        a.hard["tokens"] = 1  # type: ignore[index]


def test_a_key_is_the_same_in_every_process() -> None:
    code = "from tests.tuned_entries import key\nimport torch\ntorch.set_num_threads(1)\nprint(key().name)"
    assert {run(code, PYTHONHASHSEED=seed).stdout.strip() for seed in ("1", "2")} == {
        rekeyed(key(), compute_units=1).name
    }


@pytest.mark.parametrize(
    "changed",
    [
        store_spec("nvfp4"), store_spec(latent_dim=576), store_spec(latent_dtype=torch.float16),
        store_spec(positioned=True), store_spec(rotate=True), store_spec(compress_ratio=2), store_spec(scaled=True),
        store_spec(nonfinite="sanitize"), store_spec(layout=layout(size=1)), store_spec(layout=layout(size=48)),
        store_spec(layout=dataclasses.replace(layout(), block_stride=layout().block_stride + 8)), load_spec(),
        dataclasses.replace(store_spec(), format=CUSTOM[0]),
    ],
)  # fmt: skip
def test_what_makes_another_key(changed: Any) -> None:
    assert key(changed) != key()
    assert key(changed).name != key().name


@pytest.mark.parametrize(
    "field", ["operation", "backend", "arch", "compute_units", "target", "space", "tokens", "schema"]
)
def test_every_field_counts(field: str) -> None:
    value = key().hard[field]
    other = rekeyed(key(), **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other != key()
    assert other.name != key().name
    assert list(key().differences(other)) == [field]


def test_what_makes_no_other_key() -> None:
    assert key(store_spec(layout=layout(blocks=1000))) == key()
    far = dataclasses.replace(layout(), block_stride=2 * layout().block_stride)
    assert key(store_spec(layout=far)) == key()
    assert key(store_spec(layout=layout(size=128))) == key()
    assert key(of=tunable(source="other", compiler="other")) == key()
    assert keys.soft_of(tunable(source="other")) == {"source": "other", "compiler": "none 1.0"}


def test_fields_of_later_specs_are_taken_as_they_come() -> None:
    @dataclasses.dataclass(frozen=True)
    class AttendSpec(contracts.LoadSpec):
        operation = "attend"
        heads: int = 16
        window: int | None = None
        swa_format: Format = formats.FORMATS["bf16"]
        swa_layout: PageLayout = dataclasses.field(default_factory=lambda: layout("bf16", 512, size=1))
        causal: bool = True

    two = tunable(sizes=("tokens", "keys"), default=lambda tokens, keys: SPACE[0])
    spec = AttendSpec(CPU, formats.FORMATS["mxfp4"], 512, torch.bfloat16, layout())
    found = key_of(spec, (4, 65536), backend=BACKEND, tunable=two).hard  # type: ignore[arg-type]
    assert {name: found[name] for name in ("heads", "window", "swa_format", "swa_layout", "tokens", "keys")} == {
        "heads": 16, "window": "none", "swa_format": "bf16", "swa_layout": "rows/16", "tokens": 4, "keys": 65536,
    }  # fmt: skip
    narrow = dataclasses.replace(spec, swa_layout=layout("bf16", 4, size=1))  # 8 bytes, as its own format says
    assert key_of(narrow, (4, 4), backend=BACKEND, tunable=two).hard["swa_layout"] == "rows/8"  # type: ignore[arg-type]


# Layouts.


@pytest.mark.parametrize(
    ("block_size", "block_stride", "value_stride", "itemsize", "expected"),
    [
        (1, 272, 272, 1, "rows/16"), (1, 264, 264, 1, "rows/8"), (1, 273, 273, 1, "rows/1"), (1, 6, 6, 2, "rows/4"),
        (64, 64 * 272, 272, 1, "pow2/16"), (64, 64 * 272 + 4, 272, 1, "pow2/4"), (2, 8, 4, 2, "pow2/8"),
        (48, 48 * 272, 272, 1, "any/16"), (3, 9, 3, 1, "any/1"), (0, 0, 16, 1, "any/16"), (1, 0, 0, 1, "rows/16"),
    ],
)  # fmt: skip
def test_layout_classes(block_size: int, block_stride: int, value_stride: int, itemsize: int, expected: str) -> None:
    found = layout_class(PageLayout(7, block_size, block_stride, value_stride, 5, 3), itemsize)
    assert found == expected


@given(st.sampled_from(FORMATS), st.integers(1, 300), st.integers(1, 1000))
def test_the_number_of_blocks_is_no_part_of_a_layout_class(format: Format, size: int, blocks: int) -> None:
    few, many = (contiguous_layout(format, width_for(format), count, size) for count in (2, 1 + blocks))
    itemsize = format.cache_dtype.itemsize
    assert layout_class(few, itemsize) == layout_class(many, itemsize)


def test_plain_values() -> None:
    assert plain(torch.float32) == "float32"
    assert plain(formats.FORMATS["dsv4"]) == "dsv4"
    assert plain(CUSTOM[0]) == CUSTOM[0].spec
    assert plain(formats.Element.E2M1) == "e2m1"
    assert plain(True) is True
    assert plain(None) == "none"
    assert plain(0.5) == "0.5"
    assert plain((1, "a", torch.float16)) == "1,a,float16"
    with pytest.raises(TypeError, match="list"):
        plain([1])


# The space.


def test_a_space_is_named_by_its_choices() -> None:
    @dataclasses.dataclass(frozen=True)
    class Other(Launch):
        pass

    @dataclasses.dataclass(frozen=True)
    class Renamed:
        block: int
        num_warps: int
        staged: bool = False
        order: str = "rows"

    same = [tunable(), tunable(space=tuple(reversed(SPACE))), tunable(default=lambda tokens: SPACE[1])]
    renamed = tuple(Renamed(one.block_tokens, one.num_warps, one.staged) for one in SPACE)
    others = [
        tunable(space=SPACE[:-1]), tunable(space=(*SPACE, Launch(16, 4))), tunable(space=(*SPACE[1:], Launch(1, 2))),
        tunable(config=Other), tunable(config=Renamed, space=renamed),
    ]  # fmt: skip
    assert {keys.space_of(one) for one in same} == {keys.space_of(TUNABLE)}
    names = [keys.space_of(one) for one in [TUNABLE, *others]]
    assert len(set(names)) == len(names)


# Devices.


def test_a_device_that_is_not_here_is_unknown_and_its_key_matches_nothing() -> None:
    found = key(store_spec(device=torch.device("cuda", 99)))
    assert found.hard["arch"] == "unknown"
    assert not found.known
    assert key().known
    for missing in ({"arch": "unknown"}, {"arch": ""}, {"compute_units": 0}):
        assert not rekeyed(key(), **missing).known
        with pytest.raises(ValueError, match="device is unknown"):
            Key.from_json({**key().hard, **missing})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema"), ({"schema": True}, "schema"), ({"schema": None}, "schema"),
        ({"operation": "../../x"}, "operation"), ({"operation": 3}, "operation"), ({"backend": None}, "backend"),
        ({"tokens": -1}, "tokens"), ({"tokens": 1 << 40}, "tokens"), ({"tokens": 1.5}, "tokens"), ({"a b": 1}, "a b"),
        ({"format": "a\nb"}, "format"), ({"format": "x" * 2000}, "format"), ({"layout": []}, "layout"),
        ({"compute_units": True}, "compute_units"), ({f"x{n}": 1 for n in range(100)}, "few fields"),
    ],
)  # fmt: skip
def test_keys_that_are_read_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Key.from_json({**key().hard, **changes})


def test_a_key_without_a_field_that_all_have() -> None:
    for name in ("schema", "operation", "backend", "arch", "compute_units", "target", "space"):
        with pytest.raises(ValueError, match=name):
            Key.from_json({k: v for k, v in key().hard.items() if k != name})
    with pytest.raises(ValueError, match="not an object"):
        Key.from_json([])


def test_the_nearest_key() -> None:
    wanted = key(tokens=512)
    others = [key(tokens=1), key(tokens=4096), key(tokens=1024), key(store_spec(rotate=True), 4096), key(load_spec())]
    assert sorted(others, key=wanted.distance) == [others[2], others[1], others[0], others[3], others[4]]
    assert wanted.differences(others[3]) == {"rotate": (False, True), "tokens": (512, 4096)}
    assert wanted.differences(others[4])["nonfinite"] == ("propagate", None)


# Specs as JSON.


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("device", ["cpu", "cuda:3"])
def test_specs_as_json_lose_nothing(format: Format, device: str) -> None:
    dim = width_for(format)
    where = contiguous_layout(format, dim, 5, 3)
    specs: list[contracts.Spec] = [
        contracts.StoreSpec(torch.device(device), format, dim, dtype, where, True, False, 2, True, "sanitize")
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
    specs.append(contracts.LoadSpec(torch.device(device), format, dim, torch.float32, where, scaled=True))
    for spec in specs:
        data = json.loads(json.dumps(spec_to_json(spec)))
        assert spec_from_json(data) == spec
        assert type(spec_from_json(data)) is type(spec)
        assert spec_from_json(data).format.spec == format.spec


def test_a_spec_without_a_field_that_has_a_default() -> None:
    data = spec_to_json(store_spec())
    del data["nonfinite"]
    assert spec_from_json(data) == store_spec()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operation": "fly"}, "store, load"), ({"operation": []}, "store, load"), ({"altitude": 3}, "altitude"),
        ({"latent_dim": "512"}, "latent_dim"), ({"latent_dim": True}, "latent_dim"), ({"rotate": 1}, "rotate"),
        ({"format": "mxfp9"}, "mxfp9"), ({"format": 3}, "format"), ({"latent_dtype": "load"}, "latent_dtype"),
        ({"latent_dtype": None}, "latent_dtype"), ({"layout": {"num_blocks": 3}}, "layout"),
        ({"layout": {f.name: 1.5 for f in dataclasses.fields(PageLayout)}}, "layout"), ({"device": "moon"}, "device"),
        ({"device": None}, "device"),
    ],
)  # fmt: skip
def test_specs_that_are_read_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_from_json({**spec_to_json(store_spec()), **changes})
    with pytest.raises(ValueError, match="latent_dim"):
        spec_from_json({k: v for k, v in spec_to_json(store_spec()).items() if k != "latent_dim"})
    with pytest.raises(ValueError, match="expected a spec"):
        spec_from_json([1])


def test_the_default_of_the_tests_is_in_its_space() -> None:
    assert {default(1), default(1 << 20)} <= set(SPACE)
