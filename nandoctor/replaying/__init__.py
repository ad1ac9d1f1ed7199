"""Turns a dump into the step that failed, and runs it.

In: a `Dump`, a model and `Settings`. Out: an `Outcome` with a `Trace`.
"""
