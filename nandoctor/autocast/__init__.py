"""CUDA's autocast on any device."""
