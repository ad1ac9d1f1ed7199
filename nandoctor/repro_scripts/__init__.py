"""Extract the failing operation of a step and write it as a standalone script.

`build` takes the op from a run and writes the script; `program` is the op with its tensors, and slices these.
"""
