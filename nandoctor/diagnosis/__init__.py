"""Conclusions from traces: pure functions over plain data, without torch.

In: the traces of the runs. Out: what was non-finite first, its origin and cause, and the verdict.
"""
