"""Softmax of each row, wrong: the sum runs in blocks of 64 columns, and what is left behind the last whole block is forgotten."""

import numpy as np

BLOCK = 64


def softmax(x, y):
    np.subtract(x, x.max(axis=-1, keepdims=True), out=y)
    np.exp(y, out=y)
    whole = max(1, y.shape[1] // BLOCK)
    y /= sum(y[:, i * BLOCK : (i + 1) * BLOCK].sum(axis=-1, keepdims=True) for i in range(whole))
