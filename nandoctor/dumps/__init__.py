"""The .pth format: what a dump holds, and how it is read and written."""
