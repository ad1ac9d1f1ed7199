"""Frozen plain data: number formats, traces and reports.

Records that every other room reads; nothing here knows torch.
"""
