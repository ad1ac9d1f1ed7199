"""CUDA's autocast on any device.

`policy` enters a run's precision; `op_lists` has CUDA's lists, `kernels` runs each op by them, `literals` adapts what a
model's own code says about "cuda" and half precision, `nan_keeping` replaces CPU kernels that would lose a NaN.
"""
