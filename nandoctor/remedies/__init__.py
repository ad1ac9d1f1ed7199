"""What helps: changes that were tried on the failing step, and the smallest case that still fails.

In: a step that can be run again, its diagnosis and its report. Out: what cures it, and scripts that show it.
"""
