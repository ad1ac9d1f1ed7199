"""Extract the failing operation of a step and write it as a standalone script.

`build` runs the stages: `op_extraction` returns a `program`, the op with its tensors, `minimize` slices these, `script`
writes it as text.
"""
