"""Runs a model on a dump under a precision policy, and measures what happens.

In: a `Dump`, a model and a `Policy`. Out: a `Trace`.
"""
