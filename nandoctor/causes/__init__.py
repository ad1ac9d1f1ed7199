"""Causes of non-finite values, one module each: pure functions over plain data, without tensors.

`registry` lists them in the order in which they are tried. `base` has the findings that they get, and the checks and
candidate fixes that several share; `sentences` has shared wording, `log_space` numerically stable rewrites.
"""
