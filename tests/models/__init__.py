"""Models that nandoctor did not write: transformers' own, and torch's database of its modules.

In: random weights, no download. Out: tests that no healthy one is blamed and that a sick layer is found.
"""
