"""Causes of non-finite values, one module each: pure functions over plain data, without tensors.

`registry` lists them in the order in which they are tried. `base` has the findings that they get, and the checks that
several share; `candidates` has the changes that several suggest, `sentences` shared wording.
"""
