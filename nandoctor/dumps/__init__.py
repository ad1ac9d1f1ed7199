"""The .pth contract: what a dump holds and how it is read."""
