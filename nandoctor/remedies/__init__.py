"""Remedies: changes that were tried on the failing step, and what came of them.

In: the failing step, its diagnosis, and a function that runs it with edits. Out: prescriptions and counterfactuals.
"""
