"""The ``mxkv`` command. Imported only when it runs: typer and rich load inside :func:`main`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    import typer

    from mxkv.cli import demo, info, verify

    app = typer.Typer(
        name="mxkv",
        help="KV caches in 3 to 8 bits: see what they cost and keep, and whether this machine computes them right.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (demo.demo, info.info, verify.verify):
        app.command()(command)
    app()
