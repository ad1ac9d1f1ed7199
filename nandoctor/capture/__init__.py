"""The part that runs inside a user's training loop: it finds and saves non-finite steps, and decides when to stop."""
