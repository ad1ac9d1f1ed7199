"""What lives in somebody's training loop: watches for non-finite steps, saves them, and decides when to stop."""
