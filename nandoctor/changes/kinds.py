"""The kinds of changes; each module has the records of its kind, and all that is known of them."""

from nandoctor.changes import (
    batch,
    clamp,
    constant,
    guard,
    keep_fp32,
    log_space,
    setting,
    softmax_rows,
    state,
)

MODULES = (keep_fp32, constant, clamp, guard, log_space, softmax_rows, state, batch, setting)
