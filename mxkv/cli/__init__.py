"""The ``mxkv`` command. Imported only when it runs, and typer and rich load no sooner than :func:`make_app`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def make_app() -> typer.Typer:
    """The command line with all its commands."""
    import typer

    from mxkv.cli import configs, demo, info, tune, verify

    app = typer.Typer(
        name="mxkv",
        help="KV caches in 3 to 8 bits: see what they cost and keep, and whether this machine computes them right.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (demo.demo, info.info, tune.tune, verify.verify):
        app.command()(command)
    app.add_typer(configs.make_app())
    return app


def main() -> None:
    """Run the command line."""
    make_app()()
