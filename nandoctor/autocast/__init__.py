"""CUDA's autocast on any device.

`policy` enters what a run computes in; `op_lists` are CUDA's lists, `kernels` what they make of each op, `literals`
what a model's own code says for "cuda" or of half precision, `nan_keeping` the CPU's kernels that would lose a NaN.
"""
