"""Conclusions from traces: pure functions over plain data, without torch."""
