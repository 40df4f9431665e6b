"""``python -m mxkv.cli``."""

from mxkv.cli import main

main()
