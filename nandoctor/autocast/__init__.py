"""CUDA's autocast on any device.

In: a `Policy` and a device. Out: a context in which torch computes as CUDA's autocast does.
"""
