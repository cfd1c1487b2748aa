"""Data: corpora of files, the split into train and validation, tokenizers, token shards, the sampler, the order-2 byte model.

The way of the data: `corpus` (files and their hashes) -> `split` (whole files, by path hash) -> `tokenizer` (bytes to ids and
back) -> `shards` (memory-mapped token streams, cached) -> `sampler` (step to batch, with no state but the step).
`ngram` is the yardstick that a trained model has to beat. `contract` holds the cases that the gates run.
"""
