"""Cuts the failing operation out of a step and writes it as a script of its own.

`build` tells the story: `op_extraction` gives a `program` of a few ops with their tensors, `minimize` makes it small,
`nearest_passing` finds the smallest change with which it passes, `script` writes it down.
"""
