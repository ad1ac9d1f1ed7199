"""Extract the failing operation of a step and write it as a standalone script.

`build` runs the stages: `op_extraction` returns a `program` of a few ops with their tensors, `minimize` shrinks it,
`nearest_passing` finds the smallest change that makes it pass, `script` writes it as text.
"""
