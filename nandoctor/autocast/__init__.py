"""CUDA's autocast on any device.

`policy` enters a run's precision; `kernels` runs each op by CUDA's lists, and keeps NaN where a CPU's own kernel would
lose it; `literals` adapts what a model's own code says about "cuda" and half precision.
"""
