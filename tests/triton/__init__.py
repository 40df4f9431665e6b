"""Tests of the Triton backend that no other backend shares."""
