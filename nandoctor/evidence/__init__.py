"""Frozen plain data: number formats, traces and reports.

In: plain Python and numpy values. Out: records that every other room reads; nothing here knows torch.
"""
