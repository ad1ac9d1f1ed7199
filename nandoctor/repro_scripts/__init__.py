"""Extract the failing operation of a step and write it as a standalone script.

`build` runs the stages: `op_extraction` returns a `program` of a few ops with their tensors, `minimize` slices these,
`script` writes it as text.
"""
