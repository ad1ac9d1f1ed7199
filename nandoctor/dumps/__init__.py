"""The .pth contract: what a dump holds and how it is read.

In: files. Out: `Dump`, with tensors on the CPU.
"""
