"""Tests of the Numba backend alone."""
