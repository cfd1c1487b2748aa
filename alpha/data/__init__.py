"""Data: corpora of files, the split into train and validation, tokenizers, token shards, the sampler, the order-2 byte model.

The way of the data: `corpus` (files and their hashes) -> `split` (whole files, by path hash) -> `tokenizer` (bytes to ids and
back) -> `shards` (memory-mapped token streams, checked by blocks) -> `sampler` (step to batch, with no state but the step).
`prepare` makes the same shards of a user's files (`sources`) once, into a folder that a run takes as it is (`prepared`, `inspect`).
`ngram` is the baseline that a trained model has to beat. `contract` holds the cases that the gates run.
"""
