"""Writes a fix as a patch of the user's source.

In: an edit that was tried, and the traced op. Out: text.
"""
