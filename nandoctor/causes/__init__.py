"""Causes of non-finite values, one module each: pure functions over plain data, without a tensor in sight.

In: findings about the ops, the state or the batch of a run. Out: the `Cause`, and changes that may fix it.
"""
