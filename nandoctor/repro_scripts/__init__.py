"""Cuts the failing operation out of a step and writes it as a script of its own.

In: a step that can be run again, and its report. Out: the text of a script.
"""
