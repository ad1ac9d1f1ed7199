"""Plots of a report, one file per kind.

In: a `Report`. Out: matplotlib figures.
"""
