"""Watches a run: modules, operations, gradients, and what their tensors hold."""
