"""Causes of non-finite values, one module each: pure functions over plain data, without a tensor in sight."""
