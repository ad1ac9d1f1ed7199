"""What lives in somebody's training loop: watches for non-finite steps, saves them, and decides when to stop.

In: a model, and the loss of each step. Out: `nandoctor.dump/1` files, and `NonFiniteTrainingError` where it makes no
sense to go on.
"""
