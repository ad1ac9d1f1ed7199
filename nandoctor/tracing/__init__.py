"""Watches a run: modules, operations, gradients, and what their tensors hold.

In: a model and the calls that are made of it. Out: records of `evidence.trace`.
"""
