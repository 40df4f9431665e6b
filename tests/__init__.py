"""The test suite; `reference` is its own oracle."""
