"""Softmax of each row, rounded once."""

import numpy as np


def softmax(x, y):
    e = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))  # exp in float32 errs by two units in the last place
    np.divide(e, e.sum(axis=-1, keepdims=True), out=y, casting="same_kind")
