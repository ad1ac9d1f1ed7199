"""Causes of non-finite values, one module each: pure functions over plain data, without a tensor in sight.

`registry` lists them in the order in which they are asked; `base` has what they are shown, and the questions and
changes that several share; `sentences` the words that they share, `log_space` the logarithms in a better form.
"""
