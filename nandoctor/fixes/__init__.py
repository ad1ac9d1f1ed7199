"""Searches for changes that fix the failing step, and verifies each by running it.

In: a step that can be run again, and its diagnosis. Out: fixes, and what else was tried.
"""
